"""Every public name says what it is, what a newcomer meets shows how it is used, and what it shows is true."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

LIBRARY = ("hostcache", "staging", "npu")
ROOT = Path(__file__).parents[1]

ENTRY_POINTS = {
    "hostcache.blocks.BlockPool",
    "hostcache.cache.PagedKVCache",
    "hostcache.errors",
    "hostcache.geometry.KVGeometry",
    "hostcache.prefix.PrefixCache",
    "hostcache.scheduler.Scheduler",
    "hostcache.table.BlockTable",
    "npu.chat.ChatTemplate",
    "npu.chat.encode_chat",
    "npu.engine.Engine",
    "npu.engine.Engine.encode_chat",
    "npu.engine.Engine.score",
    "npu.gguf.GGUFFile",
    "npu.memory_plan.MemoryPlan",
    "npu.runtimes.open_runtime",
    "npu.sampler.Sampler",
    "npu.sampling_params.SamplingParams",
    "npu.score.Score",
    "npu.source.open_model",
    "npu.stream.RequestOutput",
    "npu.structured.Structure",
    "npu.tokenizer.Tokenizer",
    "staging.arena.StagingArena",
    "staging.buckets.Buckets",
    "staging.buffer.StagingBuffer",
    "staging.plan.GatherPlan",
}
"""Where a user of the library begins; each has an example."""


MODULES = [
    *LIBRARY,
    *(
        f"{package}.{module.name}"
        for package in LIBRARY
        for module in pkgutil.iter_modules([str(ROOT / package)])
        if not module.name.startswith("_")
    ),
]
"""The public ones."""


def undocumented(source: str) -> list[str]:
    """The names in a module's `__all__` that it defines and says nothing of; the module itself is called `module`."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["module"]
    public: list[str] = []
    documented: set[str] = set()
    elsewhere: set[str] = set()
    for node, behind in zip(tree.body, [*tree.body[1:], None], strict=True):
        match node:
            case ast.ImportFrom():
                elsewhere |= {alias.asname or alias.name for alias in node.names}
            case ast.FunctionDef() | ast.ClassDef():
                if ast.get_docstring(node):
                    documented.add(node.name)
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                public = ast.literal_eval(node.value)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                match behind:
                    case ast.Expr(value=ast.Constant(value=str())):
                        documented.add(name)
    return found + [name for name in public if name not in documented | elsewhere]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_says_what_it_is(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert undocumented(Path(spec.origin).read_text(encoding="utf-8")) == []


def test_a_name_without_a_word_is_found() -> None:
    source = (
        '"""A module."""\nfrom a import e\n__all__ = ["A", "B", "c", "d", "e", "f"]\nA = 1\n"""One."""\nB: int = 2\n'
        'def c() -> None:\n    """Do."""\nclass d: pass\ndef f() -> None: "not public" + "nor a docstring"\n'
    )
    assert undocumented(source) == ["B", "d", "f"]
    assert undocumented("__all__ = []") == ["module"]


FINDER = doctest.DocTestFinder()
EXAMPLES = {
    example.name: example
    for module in MODULES
    for example in FINDER.find(importlib.import_module(module), extraglobs={}, globs={})
    if example.examples
}


def test_what_a_newcomer_meets_has_an_example() -> None:
    assert EXAMPLES.keys() >= ENTRY_POINTS


@pytest.fixture
def beside_a_model(tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which `model.gguf` is the demo's model."""
    (tmp_path / "model.gguf").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("beside_a_model")
def test_the_example_is_true(name: str) -> None:
    """It finds nothing but what it imports, so that a reader may paste it."""
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(EXAMPLES[name], out=report.append)
    assert not failed, "".join(report)

"""The import rule: tools -> npu -> staging -> hostcache, nothing upward, and nothing heavy at the bottom.

Imports are read from the source, wherever they stand: at the top, in a function, or for the type checker alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hostcache", "staging", "npu", "tools")  # from the bottom up: each may import those before it

LIGHT = {"numpy", "cffi"}
EXTRAS = {
    "gguf",
    "jinja2",
    "llguidance",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "pyudev",
    "rknn",
    "rknnlite",
    "safetensors",
    "tokenizers",
}
PEERS = {"llama_cpp", "nanovllm", "torch"}
"""Measured beside, where they are installed, or from a checkout that the user names."""

TYPES = {"typing_extensions"}
"""Type checkers know it without its being installed; nothing else may ask for it."""

THIRD_PARTY = {"hostcache": LIGHT, "staging": LIGHT, "npu": LIGHT | EXTRAS, "tools": LIGHT | EXTRAS | PEERS}


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import; relative ones keep their leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
            "import_module",
        ):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield node.lineno, name
                case _:
                    yield node.lineno, "a computed name"


def lines_for_types(tree: ast.AST) -> set[int]:
    """Lines that only a type checker reads."""
    blocks = [n.body for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {line for body in blocks for line in range(body[0].lineno, (body[-1].end_lineno or 0) + 1)}


def violations(root: Path) -> list[str]:
    """Each import under `root` that breaks the rule, as `file:line imports name`."""
    found = []
    for rank, package in enumerate(PACKAGES):
        allowed = {*PACKAGES[: rank + 1], *THIRD_PARTY[package], *sys.stdlib_module_names, "__future__"}
        if package == "tools":
            allowed.remove("tools")  # installed as rockpage_tools: only relative imports reach it under both names
        for path in sorted((root / package).rglob("*.py")):
            depth = len(path.relative_to(root).parts) - 1  # leading dots that stay inside the package
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            for_types = lines_for_types(tree)
            for line, name in imported_modules(tree):
                dots = len(name) - len(name.lstrip("."))
                legal = dots <= depth if dots else name.split(".")[0] in allowed
                if not legal and not (name in TYPES and line in for_types):
                    found.append(f"{path.relative_to(root)}:{line} imports {name}")
    return found


def test_the_checkout_keeps_the_rule() -> None:
    assert violations(ROOT) == []


def test_the_checker_sees_the_checkout() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").is_file()
    tree = ast.parse((ROOT / "npu" / "attention.py").read_text())
    assert "numpy" in {name for _, name in imported_modules(tree)}


@pytest.mark.parametrize(
    ("package", "source", "name"),
    [
        ("hostcache", "import staging", "staging"),
        ("hostcache", "from npu.attention import AttentionBatch", "npu.attention"),
        ("staging", "import numpy, npu", "npu"),
        ("staging", "from tools import main", "tools"),
        ("npu", "import tools.main as m", "tools.main"),
        ("npu", "import rockpage_tools", "rockpage_tools"),
        ("hostcache", "import onnxruntime", "onnxruntime"),
        ("staging", "import tokenizers", "tokenizers"),
        ("staging", "from jinja2 import Template", "jinja2"),
        ("hostcache", "import pyudev", "pyudev"),
        ("hostcache", "from rknnlite.api import RKNNLite", "rknnlite.api"),
        ("npu", "import transformers", "transformers"),
        ("npu", "import typing_extensions", "typing_extensions"),
        (
            "npu",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import typing_extensions",
            "typing_extensions",
        ),
        ("tools", "import pytest", "pytest"),
        ("tools", "from tools.main import main", "tools.main"),
        ("tools", "import rockpage_tools.main", "rockpage_tools.main"),
        ("hostcache", "def f():\n    import npu", "npu"),
        ("hostcache", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import staging.plan", "staging.plan"),
        ("hostcache", "try:\n    import onnx\nexcept ImportError:\n    pass", "onnx"),
        ("hostcache", "__import__('npu')", "npu"),
        ("staging", "import importlib\nimportlib.import_module('npu.cpu')", "npu.cpu"),
        ("staging", "from importlib import import_module\nimport_module('n' + 'pu')", "a computed name"),
        ("hostcache", "from ..npu import cpu", "..npu"),
        ("hostcache", "from .. import npu", ".."),
    ],
)
def test_a_seeded_violation_is_caught(tmp_path: Path, package: str, source: str, name: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "seeded.py").write_text(source)
    (found,) = violations(tmp_path)
    assert found.startswith(f"{package}/seeded.py:")
    assert found.endswith(f" imports {name}")


@pytest.mark.parametrize(
    ("package", "source"),
    [
        (
            "hostcache",
            "import numpy.typing, mmap\nfrom cffi import FFI\nfrom . import errors\nfrom .geometry import KVGeometry",
        ),
        ("staging", "from hostcache.errors import NoBucket"),
        (
            "npu",
            "import onnxruntime, tokenizers, pyudev\nimport staging, hostcache\nfrom rknnlite.api import RKNNLite",
        ),
        ("npu", "if TYPE_CHECKING:\n    from typing_extensions import Unpack"),
        ("tools", "from . import plan\nfrom .main import main\nimport npu, staging, hostcache, argparse"),
    ],
)
def test_what_the_rule_allows_passes(tmp_path: Path, package: str, source: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "fine.py").write_text(source)
    assert violations(tmp_path) == []


def test_subfolders_are_read_too(tmp_path: Path) -> None:
    deep = tmp_path / "hostcache" / "deep"
    deep.mkdir(parents=True)
    (deep / "fine.py").write_text("from .. import errors")
    (deep / "wrong.py").write_text("from ... import npu")
    assert violations(tmp_path) == ["hostcache/deep/wrong.py:1 imports ..."]

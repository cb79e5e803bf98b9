"""The wheel works where there is nothing else of ours, from a folder that has `tools`, `npu` and so on of its own.

Python 3.10 and the newest CPython that every dependency has wheels for run a model. The versions between, and the next
one, do what numpy and cffi alone allow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.commands import BIN, ROOT, run
from tests.test_readme import check_answers, library_example

pytestmark = pytest.mark.wheel

OLDEST = "3.10"
NEWEST = "3.14"
"""ONNX Runtime 1.32 has no wheel for 3.15; numpy, cffi and all others do. See docs/packaging.md."""
CORE_ALONE = ("3.11", "3.12", "3.13", "3.15")

IMPORT_EVERYTHING = """
import importlib, pkgutil
for package in ("hostcache", "staging", "npu", "rockpage_tools"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("_build"):  # compile-time only
            importlib.import_module(module.name)
"""

NAME_FILES = """
import sys
print("files:")
for module in list(sys.modules.values()):
    if getattr(module, "__file__", None):
        print(module.__file__)
"""

USE_C = """
import numpy as np
from hostcache import _kv
from npu import _attention
from staging import _gather
pool, buffer = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
view = _gather.ffi.from_buffer
# One head of 8 channels, two tokens a block: K, then V. The block at 0 has one token, which goes to the first place.
place = {"head_stride": 32, "token_stride": 16, "piece_stride": 16, "piece_bytes": 16, "pieces": 1}
run = np.array([[0, 0, 0, 1]], np.int64)
part = _gather.ffi.new("rp_part[]", [((64, 32, 32, 2, 1, 8, 0), view("int64_t[]", run), 1)])
plan = _gather.ffi.new("rp_plan *", (place, place, 0, 32, part, 1, _gather.ffi.NULL, 0, 0))
_gather.lib.rp_stage(plan, view("uint8_t[]", pool), 0, view("uint8_t[]", buffer))
print(buffer.tolist())
"""


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def installed(request: pytest.FixtureRequest, environments: Callable[[str, str], Path], wheel: Path) -> Path:
    """The `bin` of an environment that can run models."""
    return environments(request.param, f"{wheel}[model,structured]")


def check_the_core(bin_: Path, user_folder: Path) -> None:
    expected = [*range(16)] + [0] * 16 + [*range(32, 48)] + [0] * 16
    assert run(bin_ / "python", "-I", "-c", USE_C, cwd=user_folder).strip() == str(expected)
    arguments = ["--geometry", "layers=24,kv_heads=2,head_dim=128", "--weights", "1.1GB", "--ram", "4GiB", "--json"]
    answer = json.loads(run(bin_ / "rockpage", "plan", *arguments, cwd=user_folder))
    assert answer["block_bytes"] == 384 * 1024


@pytest.mark.parametrize("version", CORE_ALONE)
def test_the_library_works_with_numpy_and_cffi_alone(
    environments: Callable[[str, str], Path], wheel: Path, user_folder: Path, version: str
) -> None:
    check_the_core(environments(version, str(wheel)), user_folder)


def test_the_sdist_builds_under_the_oldest_python_and_its_own_pip(
    python: Callable[[str], Path], sdist: Path, user_folder: Path, tmp_path: Path
) -> None:
    run(python(OLDEST), "-m", "venv", tmp_path / "v", cwd=tmp_path)
    run(tmp_path / "v/bin/python", "-m", "pip", "install", "--quiet", sdist, cwd=tmp_path)
    check_the_core(tmp_path / "v/bin", user_folder)


@pytest.mark.parametrize("runtime", ["cpu", "emulated"])
def test_the_command_gives_the_tokens_of_the_checkout(
    installed: Path, user_folder: Path, demo_model: Path, runtime: str
) -> None:
    """A count, since dependencies' versions move the logits a little: no other next token comes near."""
    prompt = ["--prompt", "1, 2, 3, 4, 5,", "--max-tokens", "20", "--runtime", runtime, "--json"]
    command = ["run", str(demo_model), *prompt]
    cache = str(installed.parent / "cache")
    answer = json.loads(run(installed / "rockpage", *command, cwd=user_folder, XDG_CACHE_HOME=cache))
    assert answer["text"] == " 6, 7, 8, 9, 10, 11,"
    assert answer["ids"] == json.loads(run(BIN / "rockpage", *command, cwd=ROOT))["ids"]


def test_an_answer_keeps_to_a_schema(installed: Path, user_folder: Path, tmp_path: Path, demo_model: Path) -> None:
    schema = {"type": "object", "properties": {"torque_nm": {"const": 35}}, "required": ["torque_nm"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    arguments = ["--chat", "--prompt", "Which torque?", "--json-schema", str(tmp_path / "schema.json")]
    cache = str(installed.parent / "cache")
    answer = run(installed / "rockpage", "run", demo_model, *arguments, cwd=user_folder, XDG_CACHE_HOME=cache)
    assert json.loads(answer) == {"torque_nm": 35}


def test_the_library_example_runs_and_uses_nothing_of_the_checkout(
    installed: Path, user_folder: Path, demo_model: Path
) -> None:
    code = library_example(demo_model) + IMPORT_EVERYTHING + NAME_FILES
    cache = str(installed.parent / "cache")
    output = run(installed / "python", "-I", "-c", code, cwd=user_folder, XDG_CACHE_HOME=cache)
    answers, _, files = output.partition("files:\n")
    check_answers(answers)
    loaded = [Path(file) for file in files.splitlines()]
    assert {path.name for path in loaded} >= {"_kv.abi3.so", "_gather.abi3.so", "_attention.abi3.so", "main.py"}
    assert not [path for path in loaded if path.is_relative_to(ROOT) or path.is_relative_to(user_folder)]


def test_the_command_and_the_core_need_no_model(installed: Path, user_folder: Path) -> None:
    check_the_core(installed, user_folder)
    assert run(installed / "rockpage", "--version", cwd=user_folder) == "rockpage 0.1.0\n"
    assert "plan" in run(installed / "rockpage", "--help", cwd=user_folder)

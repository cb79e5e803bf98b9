"""No test of a compiled module is left out where compiled modules are tested."""

from __future__ import annotations

import re
from pathlib import Path

from tests.board import arm64
from tests.kernels import KERNEL_TESTS, MODEL_TESTS

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.name.removesuffix("_build.py") for path in ROOT.glob("*/_*_build.py"))
CALLS_C = re.compile(rf"^from (?:hostcache|staging|npu)\.(?:{'|'.join(MODULES)}) import ", re.MULTILINE)


def test_every_test_that_calls_c_is_a_kernel_test() -> None:
    folders = (ROOT / "tests" / package for package in ("hostcache", "staging", "npu"))
    files = (path for folder in folders for path in folder.glob("test_*.py"))
    calling = {str(path.relative_to(ROOT)) for path in files if CALLS_C.search(path.read_text(encoding="utf-8"))}
    assert len(calling) >= 3
    assert calling <= {*KERNEL_TESTS, *MODEL_TESTS}


def test_kernel_tests_are_there_and_run_on_arm64() -> None:
    assert [path for path in (*KERNEL_TESTS, *MODEL_TESTS) if not (ROOT / path).is_file()] == []
    assert set(KERNEL_TESTS) <= set(arm64.TESTS)

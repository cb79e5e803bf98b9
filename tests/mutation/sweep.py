"""Plants faults into copies of the packages, one each, and runs tests there; C is compiled with its fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .fault import Fault

__all__ = ["BrokenFault", "planted", "survivors"]

ROOT = Path(__file__).parents[2]
COPIED = ("hostcache", "staging", "npu", "tools", "tests", "pyproject.toml")
SECONDS = 120
"""For one fault's tests, which take a few seconds. A fault that makes them hang is noticed, too."""

FAILED = 1
"""What pytest returns when tests ran and failed; errors of collection and of use are other numbers."""

# The same examples every time, and none made smaller: that a test fails is all that is asked.
CONFTEST = """
from hypothesis import Phase, settings
settings.register_profile("sweep", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("sweep")
"""

# What setup.py does, for one module.
BUILD = """
import runpy, sys
from setuptools import Distribution
from setuptools.command.build_ext import build_ext
extension = runpy.run_path(sys.argv[1])["ffi"].distutils_extension("build")
build = build_ext(Distribution({"ext_modules": [extension]}))
build.inplace = True
build.ensure_finalized()
build.run()
"""


class BrokenFault(AssertionError):
    """A fault, or the sweep itself, proves nothing: the tests did not run as they should."""


def planted(fault: Fault, root: Path = ROOT) -> str:
    """The faulty source.

    Raises:
        BrokenFault: its code is not there exactly once.
    """
    source = (root / fault.path).read_text(encoding="utf-8")
    places = source.count(fault.old)
    if places != 1:
        raise BrokenFault(f"'{fault.what}': {fault.path} holds its code {places} times, not once: {fault.old!r}")
    return source.replace(fault.old, fault.new)


def run_tests(tests: Sequence[str], fault: Fault | None = None) -> int | None:
    """Run test files, from `tests/`, over a copy of the checkout; returns pytest's status, None when time was up."""
    with tempfile.TemporaryDirectory(prefix="rockpage-sweep-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name)  # what Python has compiled of it, too
            else:
                shutil.copy(ROOT / name, copy / name)
        with (copy / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(CONFTEST)
        if fault is not None:
            source = copy / fault.path
            source.write_text(planted(fault), encoding="utf-8")
            for compiled in source.parent.glob(f"__pycache__/{source.stem}.*"):
                compiled.unlink()
            if source.suffix != ".py":
                _build(copy, fault.path)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)]
        # Other packages' plugins take longer to import than most faults take to show.
        alone = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment = {**os.environ, "PYTHONPATH": folder, **alone}
        try:
            return subprocess.run(
                command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, timeout=SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def _build(copy: Path, path: str) -> None:
    """Compile the modules that say that they are made of a file.

    Raises:
        BrokenFault: they cannot be compiled.
    """
    for build in copy.glob("*/_*_build.py"):
        if f'"{path}"' in build.read_text(encoding="utf-8"):
            done = subprocess.run(
                [sys.executable, "-c", BUILD, str(build)], cwd=copy, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise BrokenFault(f"{path} cannot be compiled:\n{done.stderr}")


def survivors(faults: Sequence[Fault], workers: int) -> list[Fault]:
    """The faults that no test noticed.

    Raises:
        BrokenFault: the tests do not pass without a fault, or could not run with one.
    """
    files = sorted({test for fault in faults for test in fault.tests})
    if status := run_tests(files):
        raise BrokenFault(f"without any fault the tests end with status {status}")
    with ThreadPoolExecutor(workers) as pool:
        statuses = list(pool.map(lambda fault: run_tests(fault.tests, fault), faults))
    for fault, status in zip(faults, statuses, strict=True):
        if status is not None and status > FAILED:
            raise BrokenFault(f"'{fault.what}': its tests could not run, pytest ended with {status}")
    return [fault for fault, status in zip(faults, statuses, strict=True) if status == 0]

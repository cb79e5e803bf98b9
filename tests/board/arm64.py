"""`make test-arm64`: the vendor's real Python runtime and our C parts, on emulated arm64 over a stub of its library.

The checkout is copied, its C parts are compiled for arm64 in the copy, and one pytest process runs there. Nothing of
this says what a board's library or NPU would do.
"""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.board.arm64_root import CROSS_COMPILER, KEYRING, Arm64Root, arm64_root
from tests.board.host import JobError, require_packages, run
from tests.kernels import KERNEL_TESTS

__all__ = ["main"]

CHECKOUT = Path(__file__).parents[2]
COPIED = ("hostcache", "staging", "npu", "tools", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")

QEMU = "qemu-aarch64-static"

PACKAGES = {
    f"/usr/bin/{QEMU}": "qemu-user-static",
    f"/usr/bin/{CROSS_COMPILER}": "gcc-aarch64-linux-gnu",
    "/usr/aarch64-linux-gnu/include/stdio.h": "libc6-dev-arm64-cross",
    KEYRING: "debian-archive-keyring",
}
"""What must be there, and the Debian package that brings it."""

TESTS = (
    "tests/board/test_arm64_wheel.py",
    "tests/board/test_arm64_start.py",
    "tests/board/test_arm64_faults.py",
    "tests/board/test_arm64_engine.py",
    "tests/board/test_arm64_rknnrt.py",
    *KERNEL_TESTS,
)
MARKS = "not (wheel or long or vendor or vm)"

SECONDS = 1200  # four minutes are usual


def main() -> int:
    """Run the tests, or those that the arguments name, and print what they print.

    Returns:
        pytest's status; 3 if it was not run to its end.
    """
    try:
        require_packages(PACKAGES)
        root = arm64_root()
        with tempfile.TemporaryDirectory(prefix="rockpage-arm64-") as name:
            tree = copy_checkout(Path(name) / "rockpage")
            compile_parts(tree, root)
            return run_tests(tree, root, sys.argv[1:] or TESTS)
    except JobError as error:
        print(f"test-arm64: {error}", file=sys.stderr)
        return 3


def copy_checkout(tree: Path) -> Path:
    """Copy what tests import, without what was compiled for this machine."""
    tree.mkdir()
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tree)
    return tree


def compile_parts(tree: Path, root: Arm64Root) -> None:
    """Build the C parts as for this machine, but by another compiler, and against another Python."""
    includes = " ".join(f"-I{folder}" for folder in root.includes)
    environment = {"CC": CROSS_COMPILER, "LDSHARED": f"{CROSS_COMPILER} -shared", "CPPFLAGS": includes}
    assignments = [f"{name}={value}" for name, value in environment.items()]
    run(["env", *assignments, sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], tree)


def run_tests(tree: Path, root: Arm64Root, tests: Sequence[str]) -> int:
    """One process for all of them: each start of an emulated Python takes seconds."""
    scratch = tree.parent / "scratch"
    scratch.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PYTHONPATH": str(root.site),
        "QEMU_CPU": "cortex-a76",  # as in an RK3588; OpenBLAS warns of overflows on QEMU's own "max"
        "CI": "1",  # Hypothesis then sets no deadlines
    }
    pytest = ["-m", "pytest", "-m", MARKS, "-p", "no:cacheprovider", "--durations=5", *tests]
    command = [QEMU, "-L", str(root.root), str(root.python), *pytest]
    try:
        return subprocess.run(command, cwd=tree, env=environment, timeout=SECONDS, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise JobError(f"the tests were ended after {SECONDS} seconds: they hung where the last line is") from error


if __name__ == "__main__":
    sys.exit(main())

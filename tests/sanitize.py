"""`make sanitize`: the kernels' tests, with the C parts built to check every access and every operation.

AddressSanitizer sees reads and writes beside what was allocated, or after it was freed; UndefinedBehaviorSanitizer
overflows, shifts, misaligned and null pointers. The checkout is copied, its C parts are compiled in the copy, and one
pytest process runs there. Python itself is not built so: the sanitizer is loaded before it, and Python is told to take
every object from malloc, so that each has its own bounds.

Leaks are not looked for: at its end CPython leaves thousands of blocks that nothing refers to any more, and what they
are depends on its version and on each library that was imported; a list of those to pass over would hide ours. What
our C allocates are two objects, an attention runtime and a dense one, whose closing has tests of its own.
"""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.board.arm64 import copy_checkout
from tests.board.host import JobError, run
from tests.kernels import KERNEL_TESTS, MODEL_TESTS

__all__ = ["main"]

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"

ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",
    "CI": "1",  # Hypothesis then sets no deadlines
}

SECONDS = 1200  # two minutes are usual


def main() -> int:
    """Run the tests, or those that the arguments name, and print what they print.

    Returns:
        pytest's status, or the sanitizer's; 3 if they were not run to their end.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rockpage-sanitize-") as name:
            tree = copy_checkout(Path(name) / "rockpage")
            flags = [f"CFLAGS={FLAGS}", f"LDFLAGS={FLAGS}"]
            run(
                ["env", *flags, sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
                tree,
            )
            check_modules(tree)
            return run_tests(tree, sys.argv[1:] or (*KERNEL_TESTS, *MODEL_TESTS))
    except JobError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 3


def check_modules(tree: Path) -> None:
    """See that what was compiled calls the sanitizers: without them every test would pass as well.

    Raises:
        JobError: a module does not.
    """
    modules = list(tree.glob("*/*.so"))
    missing = [path.name for path in modules if not {b"__asan_init", b"__ubsan_handle"} <= _sanitizers(path)]
    if missing or not modules:
        raise JobError(f"compiled without sanitizers: {', '.join(missing) or 'everything'}")


def _sanitizers(path: Path) -> set[bytes]:
    return {name for name in (b"__asan_init", b"__ubsan_handle") if name in path.read_bytes()}


def run_tests(tree: Path, tests: Sequence[str]) -> int:
    """Run tests of the copy with the sanitizer loaded before Python."""
    library = run(["gcc", "-print-file-name=libasan.so"]).strip()
    # What the sanitizer writes before it ends the process would be lost with what pytest captures of the descriptors.
    options = ["-q", "-p", "no:cacheprovider", "--capture=sys", "--durations=5"]
    pytest = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, **ENVIRONMENT, "LD_PRELOAD": library, "PYTHONPATH": str(tree)}
    try:
        return subprocess.run(pytest, cwd=tree, env=environment, timeout=SECONDS, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise JobError(f"the tests were ended after {SECONDS} seconds: they hung where the last line is") from error


if __name__ == "__main__":
    sys.exit(main())

"""Keeps numpy's BLAS to one thread for a while.

OpenBLAS shares every larger product among threads that spin while they wait for each other. Where another process has
one of their cores, each product waits for the scheduler: 170 ms instead of 0.6 ms for 2044 x 64 x 64 on two busy cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["one_blas_thread"]

NAMES = [(prefix, suffix) for prefix in ("scipy_", "") for suffix in ("64_", "")]
"""Around the name of a function: those of the library in numpy's wheels, and those of distributions."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS share no product of this process among threads; another BLAS stays as it is."""
    found = [(get, put, get()) for get, put in _thread_counts()]
    for _, put, _ in found:
        put(1)
    try:
        yield
    finally:
        for _, put, before in found:
            put(before)


def _thread_counts() -> Iterator[tuple[Any, Any]]:
    """What gets and what sets the count of threads, of each OpenBLAS that is loaded."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for path in sorted({line.split(maxsplit=5)[5] for line in mapped if "openblas" in line}):
        try:
            library = ctypes.CDLL(path)  # it is loaded: no code of it runs
        except OSError:  # another file has its place since
            continue
        for prefix, suffix in NAMES:
            names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library, name) for name in names):
                yield library[names[0]], library[names[1]]

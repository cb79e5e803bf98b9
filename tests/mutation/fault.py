"""A seeded fault: a mistake as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Fault", "group"]


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        what: what goes wrong.
        path: the file, from the root of the checkout.
        old: code that occurs in it exactly once.
        new: what stands there instead.
        tests: test files that must fail, from `tests/`.
    """

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def group(path: str, tests: str, *entries: tuple[str, str, str]) -> Iterator[Fault]:
    """Faults of one file that the same test files, separated by spaces, must notice."""
    for what, old, new in entries:
        yield Fault(what, path, old, new, tuple(tests.split()))

"""What `rockpage bench` can measure, as it is registered."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .command import Parser

if TYPE_CHECKING:
    from .bench_rows import Figure, Row

__all__ = ["Kind", "Measured", "require_at_least"]


@dataclass(frozen=True)
class Measured:
    """What came out.

    Attributes:
        rows: in the order in which they are shown.
        notes: a sentence for each peer that is missing, with the way to get it.
    """

    rows: Sequence[Row | Figure]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Kind:
    """Something to measure. Made in a module that imports nothing heavy at its top: `--help` must answer at once.

    Attributes:
        name: what the user types.
        summary: completes "Measure ...".
        add_options: adds its options to its parser.
        measure: does it; raises UsageError for options that make no sense, MissingExtra where nothing at all can be
            measured. A peer that is missing is a note.
        grows: some rows have a `Point`, so that there is something to draw.
        run: prints in a form of its own and returns the exit status; None: as all kinds do.
    """

    name: str
    summary: str
    add_options: Callable[[Parser], None]
    measure: Callable[[argparse.Namespace], Measured]
    grows: bool = False
    run: Callable[[argparse.Namespace], int] | None = None


def require_at_least(args: argparse.Namespace, least: int, *options: str) -> None:
    """Refuse numbers that are too small.

    Args:
        args: as they were parsed; an option that it does not have is passed over.
        least: what each must be.
        options: as they are named in `args`.

    Raises:
        UsageError: one is less.
    """
    from hostcache.errors import UsageError

    for option in options:
        value = vars(args).get(option, least)
        if value < least:
            raise UsageError(f"--{option.replace('_', '-')} must be {least} or more, got {value}")

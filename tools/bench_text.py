"""The rows of a benchmark as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from npu.sizes import format_size

from .bench_rows import Better, Figure, Row, Timing

__all__ = ["amounts", "as_text", "bound", "format_ratio", "format_seconds"]

HEADING = ("case", "ours", "(median)", "peer", "its", "(median)", "ratio", "target")


def as_text(rows: Sequence[Row | Figure]) -> list[str]:
    """A heading, and a line for each row: ours and the peer's, minimum and median, and the ratio."""
    table = [HEADING, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(_aligned(line, widths)).rstrip() for line in table]


def amounts(row: Row | Figure) -> tuple[str, str, str, str]:
    """Ours and its median, the peer's and its median; a figure has one number, a missing peer none."""
    if isinstance(row, Figure):
        return f"{row.value:.4g} {row.unit}", "", "", ""
    return (*_pair(row.ours, row.unit), *(("missing", "") if row.theirs is None else _pair(row.theirs, row.unit)))


def format_ratio(row: Row | Figure) -> str:
    """Three digits; empty where there is nothing to compare."""
    return "" if row.ratio is None else f"{row.ratio:.3g}"


def bound(limit: float | None, better: Better) -> str:
    """A target as it is read: `>= 0.75`; empty where there is none."""
    return "" if limit is None else f"{'<=' if better == 'lower' else '>='} {limit:g}"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `12.3 us`."""
    for unit, factor in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _cells(row: Row | Figure) -> tuple[str, ...]:
    ours, our_median, theirs, their_median = amounts(row)
    verdict = "" if row.verdict in (None, "met") else f" {row.verdict}"
    target = bound(row.target, row.better) + verdict
    return row.case, ours, our_median, row.peer, theirs, their_median, format_ratio(row), target


def _pair(timing: Timing, unit: str) -> tuple[str, str]:
    if unit == "bytes":
        return format_size(int(timing.minimum)), f"({format_size(int(timing.median))})"
    return format_seconds(timing.minimum), f"({format_seconds(timing.median)})"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    words = (0, 3, 7)
    return [
        cell.ljust(width) if index in words else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]

"""All benchmarks as one Markdown file: first what each target came to, then every row."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from .bench_kind import Measured
from .bench_rows import Figure, Row
from .bench_text import amounts, bound, format_ratio

__all__ = ["SUMMARY", "machine", "report", "summarise"]

SUMMARY = ("| kind | what | against | ratio | target | stretch | |", "|---|---|---|---|---|---|---|")
"""Heading of the first table, which the README quotes."""

ROWS = ("| case | ours | median | peer | its | median | ratio | target |", "|---|---|---|---|---|---|---|---|")


def report(results: Mapping[str, Measured], about: str) -> str:
    """The file's text.

    Args:
        results: of each kind, by its name.
        about: what it was measured on.
    """
    parts = [[f"Measured on {about}. Times are minima; a ratio is ours by the peer's where <= is asked for, and a"]]
    parts[0].append("speed, the peer's time by ours, where >= is.")
    parts.append([*SUMMARY, *summarise(results)])
    for name, measured in results.items():
        parts.append([f"## {name}"])
        if measured.rows:
            parts.append([*ROWS, *map(_row, measured.rows)])
        if measured.notes:
            parts.append([f"- {note}" for note in measured.notes])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def summarise(results: Mapping[str, Measured]) -> list[str]:
    """A line for each target and peer: the ratios of the rows that it is for, from the worst to the best."""
    goals: dict[tuple[str, str, str], list[Row | Figure]] = {}
    for kind, measured in results.items():
        for row in measured.rows:
            if row.target is not None:
                goals.setdefault((kind, row.goal or row.case, row.peer), []).append(row)
    return [_goal(*key, rows) for key, rows in goals.items()]


def machine() -> str:
    """What this machine is: the processor's name, how many cores, and which Python."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def _goal(kind: str, what: str, peer: str, rows: Sequence[Row | Figure]) -> str:
    first = rows[0]
    found = sorted((row for row in rows if row.ratio is not None), key=lambda row: row.ratio or 0.0)
    ends = dict.fromkeys(map(format_ratio, (found[0], found[-1]) if found else ()))
    ratios = " to ".join(reversed(ends) if first.better == "lower" else ends)
    verdicts = [row.verdict for row in found if row.verdict is not None]
    # What was missed comes first, and what could not be asked for is not told as if it had been met.
    verdict = "missed" if "missed" in verdicts else next((one for one in verdicts if one != "met"), "met")
    limits = (bound(limit, first.better) for limit in (first.target, first.stretch))
    return _line(kind, what, peer, ratios, *limits, verdict if found else "not measured")


def _row(row: Row | Figure) -> str:
    ours, our_median, theirs, their_median = amounts(row)
    medians = our_median.strip("()"), their_median.strip("()")
    target = bound(row.target, row.better)
    return _line(row.case, ours, medians[0], row.peer, theirs, medians[1], format_ratio(row), target)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"

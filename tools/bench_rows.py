"""What a benchmark is made of: cases, each measured beside a peer that does the same work in the same process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Case", "Make", "Row", "Timing", "Work", "as_text", "compare"]

WARM_UP = 5
"""Times that the work of a round is done before it is timed: what was just made is in no cache."""

Work: TypeAlias = Callable[[], float]
"""Does some of the work; returns the seconds that one unit of it took."""

Make: TypeAlias = Callable[[int], Work]
"""Makes work ready that is to be done so many times."""


@dataclass(frozen=True)
class Case:
    """Equal work, ours and a peer's.

    Attributes:
        name: what is done, with its size.
        ours: makes ours ready.
        theirs: makes the peer's ready; None: there is no peer.
        target: most that ours may take of the peer's time; None: no more than a figure is wanted.
    """

    name: str
    ours: Make
    theirs: Make | None
    target: float | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of one unit. A round does the same as the one before, so each time is compared with those in its place.

    Attributes:
        minimum: of all rounds, for each place; the mean over the places.
        median: the same.
    """

    minimum: float
    median: float


@dataclass(frozen=True)
class Row:
    """What came out.

    Attributes:
        case: its name.
        ours: our time.
        theirs: the peer's; None: there was none.
        target: as in `Case`.
    """

    case: str
    ours: Timing
    theirs: Timing | None
    target: float | None

    @property
    def ratio(self) -> float | None:
        """Our time by the peer's, where they were disturbed least; None: there was no peer."""
        return None if self.theirs is None else self.ours.minimum / self.theirs.minimum

    @property
    def misses_target(self) -> bool:
        """Whether ours takes more of the peer's time than it may."""
        return self.ratio is not None and self.target is not None and self.ratio > self.target

    def as_json(self, peer: str) -> dict[str, object]:
        """The row for `--json`; times in seconds. `ours_s` and `peer_s` are minima, which `ratio` compares."""
        return {
            "case": self.case,
            "peer": peer,
            "ours_s": self.ours.minimum,
            "peer_s": self.theirs and self.theirs.minimum,
            "ours_median_s": self.ours.median,
            "peer_median_s": self.theirs and self.theirs.median,
            "ratio": self.ratio,
            "target": self.target,
            "better": "lower",
        }


def compare(case: Case, rounds: int, times: int) -> Row:
    """Measure a case in so many rounds, each of which begins anew and does the work of both in turn so many times.

    In turn, a busy neighbour disturbs both alike; what it disturbed in one round, it leaves alone in another.
    """
    makers = [case.ours] if case.theirs is None else [case.ours, case.theirs]
    seconds: list[list[list[float]]] = [[] for _ in makers]  # by side, round and place
    for _ in range(rounds):
        works = [make(WARM_UP + times) for make in makers]
        for work in works * WARM_UP:
            work()
        places = [[work() for work in works] for _ in range(times)]
        for side, column in zip(seconds, zip(*places, strict=True), strict=True):
            side.append(list(column))
    ours, *theirs = map(_timing, seconds)
    return Row(case.name, ours, theirs[0] if theirs else None, case.target)


def as_text(rows: Sequence[Row], peer: str) -> list[str]:
    """A heading, and a line for each row: microseconds, minimum and median of either, and the ratio of the minima."""
    width = max(len(row.case) for row in rows)
    lines = [f"{'microseconds':{width}}      ours  (median)  {peer:>10}  (median)   ratio  target"]
    for row in rows:
        line = f"{row.case:{width}}  {_pair(row.ours)}"
        if row.theirs is not None:
            line += f"  {_pair(row.theirs):>20}  {row.ratio:6.3f}"
            if row.target is not None:
                line += f"  {'>' if row.misses_target else '<='}{row.target:5.2f}"
        lines.append(line)
    return lines


def _timing(rounds: list[list[float]]) -> Timing:
    places = list(zip(*rounds, strict=True))
    return Timing(statistics.fmean(map(min, places)), statistics.fmean(map(statistics.median, places)))


def _pair(timing: Timing) -> str:
    return f"{timing.minimum * 1e6:8.2f}  {f'({timing.median * 1e6:.2f})':>8}"

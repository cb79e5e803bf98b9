"""What a benchmark is made of: equal work, ours and a peer's, done in turn in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Better", "Case", "Figure", "Make", "Point", "Row", "Timing", "Work", "compare", "take_turns", "timed"]

WARM_UP = 5
"""Times that work is done before it is timed: what was just made is in no cache."""

Work: TypeAlias = Callable[[], float]
"""Does some of the work; returns the seconds that one unit of it took."""

Make: TypeAlias = Callable[[int], Work]
"""Makes work ready that is to be done so many times."""

Better: TypeAlias = Literal["lower", "higher"]
"""Which ratio is the better one: a cost is to be low, a speed high."""


@dataclass(frozen=True)
class Case:
    """Equal work, ours and a peer's, that grows: no time is like the one before.

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
    """Seconds of one unit, or bytes of one process.

    Attributes:
        minimum: where nothing disturbed it; of work that grows, the mean over the places of each one's minimum.
        median: the same.
    """

    minimum: float
    median: float


@dataclass(frozen=True)
class Point:
    """Where a row stands in a chart.

    Attributes:
        axis: what grows, such as "context".
        at: how much of it.
        line: that the row is a point of.
    """

    axis: str
    at: float
    line: str


@dataclass(frozen=True)
class Row:
    """Ours beside a peer's.

    Attributes:
        case: what is done, with its size.
        peer: who did the same.
        ours: our time, or memory.
        theirs: the peer's; None: the peer is missing.
        target: what the ratio must be at most, or at least; None: no more than a figure is wanted.
        stretch: what it ought to be.
        better: `"lower"`: the ratio is ours by theirs; `"higher"`: it is a speed, theirs by ours.
        by: what the ratio compares.
        unit: `"s"` or `"bytes"`.
        goal: the target's name, under which the rows that it is for are summed up; None: the case.
        point: where growth is shown.
        excuse: why the target cannot be asked for here, with the figure that shows it; None: it is.
    """

    case: str
    peer: str
    ours: Timing
    theirs: Timing | None
    target: float | None = None
    stretch: float | None = None
    better: Better = "lower"
    by: Literal["minimum", "median"] = "minimum"
    unit: Literal["s", "bytes"] = "s"
    goal: str | None = None
    point: Point | None = None
    excuse: str | None = None

    @property
    def ratio(self) -> float | None:
        """Ours to the peer's; None: there was no peer."""
        if self.theirs is None:
            return None
        ours, theirs = (getattr(timing, self.by) for timing in (self.ours, self.theirs))
        ratio: float = ours / theirs if self.better == "lower" else theirs / ours
        return ratio

    @property
    def misses_target(self) -> bool:
        """Whether the ratio is on the wrong side of a target that is asked for."""
        return self.excuse is None and _misses(self.ratio, self.target, self.better)

    @property
    def verdict(self) -> str | None:
        """`"met"`, `"missed"`, or the excuse for that; None: nothing was asked or nothing was measured."""
        return _verdict(self.ratio, self.target, self.better, self.excuse)

    def as_json(self) -> dict[str, object]:
        """The row for `--json`; `ours_s` and `peer_s` are minima, in seconds, or in bytes where `unit` says so."""
        return {
            "case": self.case,
            "peer": self.peer,
            "ours_s": self.ours.minimum,
            "peer_s": self.theirs and self.theirs.minimum,
            "ours_median_s": self.ours.median,
            "peer_median_s": self.theirs and self.theirs.median,
            "ratio": self.ratio,
            "target": self.target,
            "stretch": self.stretch,
            "better": self.better,
            "by": self.by,
            "unit": self.unit,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Figure:
    """What is compared by its own measure: how far a codec's answers are from the exact ones, for instance.

    Attributes:
        case: what was measured.
        peer: what it is measured from.
        value: the figure.
        unit: of it.
        target: as in `Row`, as the following are.
        stretch: as in `Row`.
        better: as in `Row`.
        goal: as in `Row`.
    """

    case: str
    peer: str
    value: float
    unit: str
    target: float | None = None
    stretch: float | None = None
    better: Better = "lower"
    goal: str | None = None

    @property
    def ratio(self) -> float:
        """The figure itself: it says by itself how far ours is from the peer's."""
        return self.value

    @property
    def misses_target(self) -> bool:
        """Whether the figure is on the wrong side of its target."""
        return _misses(self.value, self.target, self.better)

    @property
    def verdict(self) -> str | None:
        """`"met"` or `"missed"`; None: nothing was asked."""
        return _verdict(self.value, self.target, self.better, None)

    def as_json(self) -> dict[str, object]:
        """The figure for `--json`, as `ratio`; there are no times."""
        return {
            "case": self.case,
            "peer": self.peer,
            "ours_s": None,
            "peer_s": None,
            "ratio": self.value,
            "target": self.target,
            "stretch": self.stretch,
            "better": self.better,
            "unit": self.unit,
            "verdict": self.verdict,
        }


def timed(work: Callable[[], object]) -> Work:
    """A call as work: one unit of it."""

    def once() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return once


def take_turns(works: Sequence[Work], times: int, warm_up: int = WARM_UP) -> list[Timing]:
    """Measure work that is the same each time, so many times; a `Timing` for each.

    In turn, a busy neighbour disturbs all alike. Every other time the order is reversed, so that none always comes
    behind the same other, and finds its data in the cache, or thrown out of it.
    """
    for _ in range(warm_up):
        for work in works:
            work()
    seconds: list[list[float]] = [[] for _ in works]
    sides = list(zip(works, seconds, strict=True))
    for number in range(times):
        for work, column in reversed(sides) if number % 2 else sides:
            column.append(work())
    return [Timing(min(column), statistics.median(column)) for column in seconds]


def compare(case: Case, peer: str, rounds: int, times: int) -> Row:
    """Measure a case in so many rounds, each of which begins anew and does the work of both in turn so many times.

    A round does the same as the one before, so each time is compared with those in its place: what a busy neighbour
    disturbed in one round, it leaves alone in another.
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
    ours, *theirs = map(_by_place, seconds)
    return Row(case.name, peer, ours, theirs[0] if theirs else None, case.target)


def _by_place(rounds: list[list[float]]) -> Timing:
    places = list(zip(*rounds, strict=True))
    return Timing(statistics.fmean(map(min, places)), statistics.fmean(map(statistics.median, places)))


def _misses(ratio: float | None, target: float | None, better: Better) -> bool:
    if ratio is None or target is None:
        return False
    return ratio > target if better == "lower" else ratio < target


def _verdict(ratio: float | None, target: float | None, better: Better, excuse: str | None) -> str | None:
    if ratio is None or target is None:
        return None
    return (excuse or "missed") if _misses(ratio, target, better) else "met"

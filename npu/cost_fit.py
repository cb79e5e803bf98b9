"""From timings of a few launches to the figures of a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostcache.errors import UsageError

from .cost_model import CostModel, Work

__all__ = ["Timing", "Timings", "fit"]


@dataclass(frozen=True)
class Timing:
    """How long one layer of a launch took, in seconds."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Timings:
    """Of launches of one sequence, each list with two sizes at least.

    A single query row costs bytes, a tile of a prompt costs arithmetic.

    Attributes:
        gather: of single rows: only filling a staging buffer.
        device_row: single rows on one core of the device, from gathering to the result.
        device_tile: likewise tiles.
        host_row: single rows on the host.
        host_tile: likewise tiles.
    """

    gather: Sequence[Timing]
    device_row: Sequence[Timing]
    device_tile: Sequence[Timing]
    host_row: Sequence[Timing]
    host_tile: Sequence[Timing]


def fit(timings: Timings, cores: int, source: str) -> CostModel:
    """The model that gives these times, by least squares.

    What a byte takes is read off what larger launches take more than the smallest, and what a launch takes beside its
    bytes off the smallest. At least half of its time is taken to be that: where memory that no cache holds makes the
    larger ones slow out of proportion, they would leave it nothing.

    Args:
        timings: of one machine.
        cores: of its device.
        source: where the figures come from.

    Raises:
        UsageError: the times do not grow with the work, as those of a machine that was busy with something else.
    """
    gather = _growth("gathering", timings.gather, lambda work: work.gathered_bytes)
    row = [_without(timing, timing.work.gathered_bytes / gather) for timing in timings.device_row]
    device_bytes = _growth("the device's reading", row, lambda work: work.staged_bytes)
    smallest = min(row, key=lambda timing: timing.work.staged_bytes)
    if smallest.seconds <= 0:
        raise _contradiction("the smallest launch", "took less than gathering for it")
    launch = max(smallest.seconds - smallest.work.staged_bytes / device_bytes, smallest.seconds / 2)
    tile = [_without(timing, timing.work.gathered_bytes / gather + launch) for timing in timings.device_tile]
    return CostModel(
        launch_seconds=launch,
        gather_bytes_per_second=gather,
        device_bytes_per_second=device_bytes,
        device_multiply_adds_per_second=_rate("the device's arithmetic", tile, lambda work: work.multiply_adds),
        host_bytes_per_second=_rate("the host's reading", timings.host_row, lambda work: work.kv_bytes),
        host_multiply_adds_per_second=_rate(
            "the host's arithmetic", timings.host_tile, lambda work: work.multiply_adds
        ),
        cores=cores,
        source=source,
    )


def _without(timing: Timing, seconds: float) -> Timing:
    return Timing(timing.work, timing.seconds - seconds)


def _rate(what: str, timings: Sequence[Timing], amount: Callable[[Work], int]) -> float:
    """Work a second, where no work takes no time. The largest weigh most: there a constant matters least."""
    return _slope(what, [(amount(timing.work), timing.seconds) for timing in timings])


def _growth(what: str, timings: Sequence[Timing], amount: Callable[[Work], int]) -> float:
    """Work a second, of what is more than in the smallest timing."""
    smallest = min(timings, key=lambda timing: amount(timing.work))
    more = [(amount(timing.work) - amount(smallest.work), timing.seconds - smallest.seconds) for timing in timings]
    return _slope(what, more)


def _slope(what: str, points: Sequence[tuple[float, float]]) -> float:
    """Work a second, of pairs of work and seconds: the line through the origin with the least squares."""
    squares = sum(work * work for work, _ in points)
    products = sum(work * seconds for work, seconds in points)
    if squares <= 0 or products <= 0:
        raise _contradiction(what, "does not take longer for more work")
    return squares / products


def _contradiction(what: str, how: str) -> UsageError:
    return UsageError(f"{what} {how}: end what else runs on this machine, and calibrate again", what=what)

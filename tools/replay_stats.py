"""Statistics of a stream in memory that does not grow with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

__all__ = ["Histogram", "Trend"]

GROWTH = 1.02
"""Ratio of a bucket's bounds: a percentile is off by at most one per cent."""

LOG_GROWTH = math.log(GROWTH)

SMALLEST = 1e-9
"""What is smaller counts as 0: nothing here is timed to the nanosecond."""

SLOTS = 512
"""Most slots of a trend; a chart has about as many columns."""


class Histogram:
    """Counts values from 0 up in buckets whose bounds grow by two per cent.

    `count`, `total`, `smallest` and `largest` are exact; percentiles are within one per cent.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0
        self._buckets: Counter[int | None] = Counter()  # None: the bucket of 0

    def add(self, value: float, count: int = 1) -> None:
        """The value was seen `count` times."""
        bucket = math.floor(math.log(value) / LOG_GROWTH) if value > SMALLEST else None
        self._buckets[bucket] += count
        self.count += count
        self.total += value * count
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def merge(self, other: Histogram) -> None:
        """Count what another histogram has counted, too."""
        self._buckets.update(other._buckets)
        self.count += other.count
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        """Mean of all values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest value that `percent` of all do not exceed, within one per cent; 0 if there are none."""
        wanted = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for bucket in sorted(self._buckets, key=lambda bucket: -math.inf if bucket is None else bucket):
            seen += self._buckets[bucket]
            if seen >= wanted:
                middle = 0.0 if bucket is None else GROWTH ** (bucket + 0.5)
                return min(max(middle, self.smallest), self.largest)
        return 0.0


class Trend:
    """A quantity over time, as its mean in slots of equal length; when time outgrows the slots, pairs become one."""

    def __init__(self, slot_seconds: float = 1.0) -> None:
        self.slot_seconds = slot_seconds
        self._weights = [0.0] * SLOTS
        self._sums = [0.0] * SLOTS

    def hold(self, start: float, end: float, value: float) -> None:
        """The quantity was `value` from `start` to `end`."""
        first, last = int(start / self.slot_seconds), int(end / self.slot_seconds)
        if first == last < SLOTS:
            self._add(first, end - start, value)
            return
        while end > SLOTS * self.slot_seconds:
            self._merge_pairs()
        first = int(start / self.slot_seconds)
        while start < end:
            edge = min((first + 1) * self.slot_seconds, end)
            self._add(first, edge - start, value)
            start, first = edge, first + 1

    def point(self, time: float, value: float) -> None:
        """The quantity was seen to be `value` at `time`; every such value weighs the same."""
        while time >= SLOTS * self.slot_seconds:
            self._merge_pairs()
        self._add(int(time / self.slot_seconds), 1.0, value)

    def means(self) -> Sequence[tuple[float, float]]:
        """When each slot begins, and its mean; slots of which nothing is known are left out."""
        return [
            (index * self.slot_seconds, total / weight)
            for index, (weight, total) in enumerate(zip(self._weights, self._sums, strict=True))
            if weight > 0
        ]

    def _add(self, slot: int, weight: float, value: float) -> None:
        self._weights[slot] += weight
        self._sums[slot] += weight * value

    def _merge_pairs(self) -> None:
        for values in (self._weights, self._sums):
            values[:] = [left + right for left, right in zip(values[::2], values[1::2], strict=True)] + [0.0] * (
                SLOTS // 2
            )
        self.slot_seconds *= 2

"""Streaming statistics against the whole list of values."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.replay_stats import SLOTS, Histogram, Trend

VALUES = st.lists(st.floats(1e-6, 1e6) | st.just(0.0), min_size=1, max_size=60)


@given(VALUES, st.integers(1, 100))
def test_a_percentile_is_within_one_per_cent_of_the_sorted_lists(values: list[float], percent: int) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.01)
    assert (histogram.count, histogram.smallest, histogram.largest) == (len(values), min(values), max(values))
    assert histogram.mean == pytest.approx(math.fsum(values) / len(values))


def test_a_value_may_be_counted_many_times() -> None:
    one, many = Histogram(), Histogram()
    for _ in range(90):
        one.add(2.0)
    many.add(2.0, 90)
    for histogram in (one, many):
        histogram.add(5.0, 10)
        assert histogram.percentile(90) == pytest.approx(2.0, rel=0.01)
        assert histogram.percentile(91) == 5.0
        assert histogram.mean == pytest.approx(2.3)


def test_nothing_is_0() -> None:
    assert (Histogram().percentile(95), Histogram().mean, list(Trend().means())) == (0.0, 0.0, [])


def test_memory_does_not_grow_with_the_values() -> None:
    histogram = Histogram()
    for step in range(20_000):
        histogram.add(0.001 * 1.001**step)  # from a millisecond to half a million seconds
    assert sys.getsizeof(histogram._buckets) < 100_000


@given(st.lists(st.tuples(st.floats(0.01, 300), st.floats(0, 9)), min_size=1, max_size=30))
def test_a_timeline_keeps_the_integral(spans: list[tuple[float, float]]) -> None:
    line, now = Trend(slot_seconds=0.5), 0.0
    for seconds, value in spans:
        line.hold(now, now + seconds, value)
        now += seconds
    means = line.means()
    starts = [start for start, _ in means]
    assert len(starts) <= SLOTS
    assert starts == [index * line.slot_seconds for index in range(len(starts))]  # no hole
    widths = [line.slot_seconds] * (len(means) - 1) + [now - starts[-1]]
    held = sum(width * mean for width, (_, mean) in zip(widths, means, strict=True))
    assert held == pytest.approx(sum(seconds * value for seconds, value in spans), abs=1e-6)


def test_slots_double_when_time_outgrows_them() -> None:
    line = Trend(slot_seconds=1.0)
    line.hold(0.0, 1.0, 6.0)
    line.hold(1.0, SLOTS, 2.0)
    assert (line.slot_seconds, line.means()[0]) == (1.0, (0.0, 6.0))
    line.hold(SLOTS, SLOTS + 0.5, 8.0)
    assert line.slot_seconds == 2.0
    assert line.means()[0] == (0.0, 4.0)  # the mean of 6 and 2
    assert line.means()[-1] == (SLOTS, 8.0)


def test_points_of_a_slot_weigh_the_same() -> None:
    line = Trend(slot_seconds=10.0)
    for time, value in ((1.0, 1.0), (9.0, 2.0), (9.5, 6.0), (10 * SLOTS, 5.0)):
        line.point(time, value)
    assert line.slot_seconds == 20.0
    assert line.means() == [(0.0, 3.0), (10 * SLOTS, 5.0)]

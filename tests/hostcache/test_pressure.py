"""The ladder by itself: made-up readings at made-up times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import UsageError
from hostcache.pressure import PressureLadder, PressureLevel, PressureLimits, PressureReading

CALM, GIVE_BACK, PAUSE, SHED, REFUSE = PressureLevel

LIMITS = PressureLimits(low_bytes=100, high_bytes=200, settle_seconds=1, calm_seconds=5)
SHORT = PressureReading(99)
WELL = PressureReading(100)
STALLED = PressureReading(1000, stalled="tasks waited")
URGENT = PressureReading(49)


def levels(*readings: tuple[float, PressureReading]) -> list[PressureLevel]:
    ladder = PressureLadder(LIMITS)
    return [ladder.update(now, reading) for now, reading in readings]


@pytest.mark.parametrize("pressure", [SHORT, STALLED])
def test_it_climbs_in_order_while_pressure_lasts(pressure: PressureReading) -> None:
    times = (10, 10.9, 11, 11.9, 12, 13, 14, 20)
    expected = [GIVE_BACK, GIVE_BACK, PAUSE, PAUSE, SHED, REFUSE, REFUSE, REFUSE]
    assert levels((0, WELL), *((now, pressure) for now in times)) == [CALM, *expected]


def test_with_little_left_it_does_not_wait() -> None:
    assert levels(*((0, URGENT) for _ in range(5))) == [GIVE_BACK, PAUSE, SHED, REFUSE, REFUSE]
    assert levels((0, PressureReading(50)), (0, PressureReading(50))) == [GIVE_BACK, GIVE_BACK]


def test_it_descends_a_level_at_a_time() -> None:
    up = [(now, SHORT) for now in (0, 1, 2, 3)]
    down = [(7.9, WELL), (8, WELL), (12.9, WELL), (13, WELL), (18, WELL), (23, WELL), (99, WELL)]
    assert levels(*up, *down)[4:] == [REFUSE, SHED, SHED, PAUSE, GIVE_BACK, CALM, CALM]


def test_whoever_did_not_look_for_long_finds_it_calm() -> None:
    assert levels((0, SHORT), (1, SHORT), (12, WELL)) == [GIVE_BACK, PAUSE, CALM]


def test_pressure_that_returns_climbs_from_where_it_stands() -> None:
    up = [(0, SHORT), (1, SHORT), (2, SHORT)]
    assert levels(*up, (7, WELL), (7.5, SHORT), (12.4, WELL), (12.5, WELL))[3:] == [PAUSE, SHED, SHED, PAUSE]


def test_what_is_given_and_taken() -> None:
    ladder = PressureLadder(LIMITS)
    assert (ladder.wanted(SHORT), ladder.takeable(PressureReading(260))) == (0, 60)  # calm
    ladder.update(0, SHORT)
    assert ladder.wanted(SHORT) == 101
    assert ladder.wanted(PressureReading(150)) == 50  # not short, and not well either
    assert ladder.wanted(PressureReading(200)) == 0
    assert ladder.wanted(PressureReading(199, stalled="yes")) == 1
    assert ladder.wanted(STALLED) == 100
    assert ladder.takeable(PressureReading(260)) == 0
    ladder.update(5, WELL)
    assert ladder.takeable(PressureReading(199)) == 0


def test_the_reason_is_told() -> None:
    ladder = PressureLadder(PressureLimits(64 << 20, 128 << 20))
    ladder.update(0, PressureReading(3 << 19, "cgroup /a"))
    assert ladder.reason == "cgroup /a has 1.5 MiB left, and 64.0 MiB are to stay"
    ladder.update(0, PressureReading(1 << 30, stalled="tasks waited for memory"))
    assert ladder.reason == "tasks waited for memory"
    ladder.update(1, PressureReading(1 << 30))
    assert ladder.reason == "tasks waited for memory"  # the last one there was


@pytest.mark.parametrize(
    ("budget", "low"), [(4 << 30, 128), (64 << 30, 128), (1 << 30, 32), (512 << 20, 16), (64 << 20, 16)]
)
def test_usual_limits(budget: int, low: int) -> None:
    limits = PressureLimits.of(budget)
    assert (limits.low_bytes, limits.high_bytes) == (low << 20, 2 * low << 20)


@pytest.mark.parametrize(
    "limits", [(0, 1), (-1, 1), (5, 5), (6, 5), (1, 2, 0.0), (1, 2, 1.0, -1.0), (1, 2, float("nan"))]
)
def test_limits_that_make_no_sense_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        PressureLimits(*limits)


readings = st.builds(PressureReading, st.integers(0, 300), stalled=st.sampled_from(["", "", "yes"]))
steps = st.tuples(st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.0, 5.0, 11.0]), readings)


@given(st.lists(steps, max_size=60))
def test_whatever_comes_the_rules_hold(steps: list[tuple[float, PressureReading]]) -> None:
    """Against the same rules, told backwards in time from each climb and each descent."""
    ladder, now, level = PressureLadder(LIMITS), 0.0, CALM
    climbs: list[float] = []
    pressed = -1e9  # when it was short last
    for seconds, reading in steps:
        now += seconds
        short = bool(reading.stalled) or reading.headroom < LIMITS.low_bytes
        after = ladder.update(now, reading)
        if after > level:
            assert short
            assert after == level + 1
            assert level is CALM or reading.headroom < 50 or now - climbs[-1] >= LIMITS.settle_seconds
            climbs.append(now)
        if after < level:
            assert not short
            assert now - pressed >= LIMITS.calm_seconds * (level - after)
        if short:
            pressed = now
            assert after is not CALM
        if now - pressed >= LIMITS.calm_seconds * len(PressureLevel):
            assert after is CALM
        assert 0 <= ladder.wanted(reading) <= LIMITS.high_bytes
        assert ladder.wanted(reading) == 0 or ladder.takeable(reading) == 0
        assert reading.headroom - ladder.takeable(reading) >= min(reading.headroom, LIMITS.high_bytes)
        level = after

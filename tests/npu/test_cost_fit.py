"""Figures that are known, timings that follow from them, and what the fit makes of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import UsageError
from npu.cost_fit import Timing, Timings, fit
from npu.cost_model import CostModel, Work

CONTEXTS = (62, 254, 1022, 4094)
TILE_CONTEXTS = (254, 1022, 4094)


def row(context: int) -> Work:
    """One row of 12 heads of 128 over 2 KV heads: 1024 bytes a token, padded to the next bucket, and 3072 products."""
    staged = (context + 2) * 1056 + 8192
    return Work(context * 1024, staged, context * 3072, staged)


def tile(context: int) -> Work:
    staged = (context + 2) * (1024 + 2 * 392) + 400_000
    return Work(context * 1024, staged, 64 * context * 3072, staged)


def timings(model: CostModel, noise: Callable[[float], float] = lambda seconds: seconds) -> Timings:
    """As that machine would take them: rows wait for bytes, tiles for arithmetic, on the device and on the host."""

    def device(work: Work, seconds: float) -> Timing:
        gather = work.gathered_bytes / model.gather_bytes_per_second
        return Timing(work, noise(gather + model.launch_seconds + seconds))

    rows, tiles = [row(context) for context in CONTEXTS], [tile(context) for context in TILE_CONTEXTS]
    return Timings(
        gather=[Timing(work, noise(10e-6 + work.gathered_bytes / model.gather_bytes_per_second)) for work in rows],
        device_row=[device(work, work.staged_bytes / model.device_bytes_per_second) for work in rows],
        device_tile=[device(work, work.multiply_adds / model.device_multiply_adds_per_second) for work in tiles],
        host_row=[Timing(work, noise(work.kv_bytes / model.host_bytes_per_second)) for work in rows],
        host_tile=[Timing(work, noise(work.multiply_adds / model.host_multiply_adds_per_second)) for work in tiles],
    )


speeds = st.floats(1e8, 1e12)


@given(
    st.builds(
        CostModel,
        launch_seconds=st.floats(1e-3, 1e-1),
        gather_bytes_per_second=speeds,
        device_bytes_per_second=speeds,
        device_multiply_adds_per_second=speeds,
        host_bytes_per_second=speeds,
        host_multiply_adds_per_second=speeds,
        cores=st.sampled_from([1, 3]),
        source=st.just("made up"),
    )
)
def test_known_figures_come_out_as_they_went_in(known: CostModel) -> None:
    """Where a launch takes more than the 75,776 bytes of the smallest, which take 0.76 ms at the slowest here."""
    assert fit(timings(known), known.cores, "made up").figures() == pytest.approx(dict(known.figures()), rel=1e-6)


BOARD = CostModel(0.4e-3, 10e9, 9.4e9, 200e9, 5e9, 20e9, cores=3, source="made up")


def test_disturbed_timings_give_figures_that_are_disturbed_as_much() -> None:
    """Each timing is 5 % off at most. The figure that suffers most is the device's reading: of the 1.29 ms of the
    longest row it is 0.46, and the total, the gather and the launch that are subtracted are 0.11 off together."""
    random = np.random.default_rng(4)
    for _ in range(50):
        noisy = timings(BOARD, lambda seconds: seconds * (1 + random.uniform(-0.05, 0.05)))
        assert fit(noisy, 3, "made up").figures() == pytest.approx(dict(BOARD.figures()), rel=0.11 / (0.46 - 0.11))


def test_where_the_source_is_named_it_is_kept() -> None:
    assert fit(timings(BOARD), 3, "measured today").source == "measured today"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gather", "gathering does not take longer for more work"),
        ("device_row", "the device's reading does not take longer"),
        ("host_row", "the host's reading does not take longer"),
        ("host_tile", "the host's arithmetic does not take longer"),
        ("device_tile", "the device's arithmetic does not take longer"),
    ],
)
def test_times_that_do_not_grow_are_refused(name: str, words: str) -> None:
    taken = timings(BOARD)
    none = [Timing(timing.work, 0.0) for timing in getattr(taken, name)]
    with pytest.raises(UsageError, match=f"{words}.*: end what else runs on this machine, and calibrate again"):
        fit(replace(taken, **{name: none}), 3, "made up")


def test_one_size_alone_says_nothing() -> None:
    taken = timings(BOARD)
    with pytest.raises(UsageError, match="gathering does not take longer for more work"):
        fit(replace(taken, gather=taken.gather[:1]), 3, "made up")


def test_a_smallest_launch_that_was_faster_than_gathering_is_refused() -> None:
    taken = timings(BOARD)
    first, *others = taken.device_row
    fast = Timing(first.work, first.work.gathered_bytes / 10e9 - 1e-9)
    with pytest.raises(UsageError, match="the smallest launch took less than gathering for it"):
        fit(replace(taken, device_row=[fast, *others]), 3, "made up")


def test_a_launch_is_left_half_of_the_smallest_time_where_larger_ones_are_slow_out_of_proportion() -> None:
    """0.4 ms and 75,776 bytes at 9.4 GB/s; the longest row takes 100 ms more, which makes 1.7 ms for such bytes."""
    taken = timings(BOARD)
    *others, longest = taken.device_row
    slow = Timing(longest.work, longest.seconds + 100e-3)
    expected = (0.4e-3 + ((62 + 2) * 1056 + 8192) / 9.4e9) / 2
    assert fit(replace(taken, device_row=[*others, slow]), 3, "made up").launch_seconds == pytest.approx(expected)

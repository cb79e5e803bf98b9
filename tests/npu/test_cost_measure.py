"""What is timed, how often, and that a device which fails is not."""

from __future__ import annotations

import numpy as np
import pytest

from hostcache import KVGeometry
from hostcache.errors import DeviceError, UsageError
from npu import cost_measure
from npu.cost_fit import Timings, fit
from npu.cost_measure import measure, scratch_cache
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.emulated_device import Faults

GEOMETRY = KVGeometry(layers=24, kv_heads=2, head_dim=16)
HEADS = 6


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measure, "_SECONDS", 0.0)  # the fewest runs, then


def take(buckets: tuple[int, ...] = (64, 1024), faults: Faults | None = None, tokens: int = 1024) -> Timings:
    cache = scratch_cache(GEOMETRY, tokens)
    host = CpuAttention(cache, HEADS)
    staged = EmulatedAttention(cache, HEADS, buckets=buckets, host=CpuAttention(cache, HEADS), faults=faults, cores=2)
    try:
        return measure(staged, host, cache, HEADS)
    finally:
        staged.close()
        host.close()
        cache.close()


def test_rows_and_tiles_are_timed_up_to_the_longest_context() -> None:
    """A token has 2 * 2 * 16 * 2 = 128 bytes a layer; scores and values take 2 * 6 * 16 products a row and token."""
    taken = take()
    rows, tiles = (1022, 254, 62), (1022, 254, 62)  # the next, 14, would be shorter than a tile
    for name in ("gather", "device_row", "host_row"):
        assert [timing.work.kv_bytes for timing in getattr(taken, name)] == [128 * context for context in rows]
    for name in ("device_tile", "host_tile"):
        found = [timing.work.multiply_adds for timing in getattr(taken, name)]
        assert found == [min(64, context) * context * 192 for context in tiles]
    assert all(timing.seconds > 0 for timings in vars(taken).values() for timing in timings)


def test_what_was_taken_makes_a_model() -> None:
    """A long context takes longer by far, so that even a busy machine cannot turn it round."""
    assert fit(take((64, 4096), tokens=4096), cores=2, source="here").cores == 2


@pytest.mark.parametrize(("buckets", "contexts"), [((64,), "62"), ((1024,), "1022, 254, 62"), ((8,), "so few")])
def test_one_bucket_does_not_tell_how_costs_grow(buckets: tuple[int, ...], contexts: str) -> None:
    with pytest.raises(UsageError, match=f"contexts of {contexts} tokens are all staged alike, .*--buckets far apart"):
        take(buckets)


def test_a_scratch_cache_has_few_layers_and_finite_numbers() -> None:
    cache = scratch_cache(GEOMETRY, 100)
    assert (cache.geometry.layers, cache.blocks) == (4, 7)
    keys, values = cache.read(3, range(7), 100)
    for operand in (keys, values):
        assert np.isfinite(operand).all()
        assert 0 <= operand.min() < operand.max() < 1
    assert scratch_cache(KVGeometry(2, 1, 8), 1).geometry.layers == 2


def test_a_device_that_fails_is_not_measured() -> None:
    with pytest.raises(DeviceError, match="launches failed, so their times mean nothing"):
        take(faults=Faults(failing={3}))


def test_the_median_of_a_run_for_each_layer_in_turn_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run sets things up; five are enough when they took the time that there is."""
    seconds = iter([100.0, 0.01, 0.09, 0.02, 0.03, 0.02, 1000.0])
    now = [0.0]
    layers = []

    def run(layer: int) -> None:
        layers.append(layer)
        now[0] += next(seconds)

    monkeypatch.setattr(cost_measure, "_SECONDS", 0.17)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert cost_measure._median_seconds(run, layers=3) == pytest.approx(0.02)
    assert layers == [0, 0, 1, 2, 0, 1]


def test_quick_runs_are_repeated_a_hundred_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []
    monkeypatch.setattr(cost_measure, "_SECONDS", 1e9)
    cost_measure._median_seconds(layers.append, layers=1)
    assert len(layers) == 1 + 100

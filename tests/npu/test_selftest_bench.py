"""The bench of the self-test: its launches are those it says, its exact attention is exact, a hang ends it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry
from hostcache.errors import DeviceError
from npu.emulated_device import EmulatedDevice, Faults
from npu.selftest_bench import Bench
from npu.selftest_oracle import LARGEST_ERROR, exact_attention
from tests.npu.test_emulated_attention import World

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=16)
HEADS = 6


def bench_of(faults: Faults | None = None, **options: object) -> Bench:
    sizes = {"buckets": (64, 128, 256), "batches": (1, 2, 4), "cores": 2, **options}
    return Bench(GEOMETRY, HEADS, lambda memory: EmulatedDevice(memory, cores=2, faults=faults), **sizes)  # type: ignore[arg-type] # as given


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = bench_of()
    yield bench
    bench.close()


def test_exact_attention_is_what_one_row_and_head_at_a_time_give() -> None:
    """The reference knows no scaling in fp16; these queries are exact in it."""
    world = World([5, 130, 64], [1, 20, 64])
    out = exact_attention(world.cache, world.batch, world.q)
    assert np.abs(out - world.expected(0)).max() < 1e-12


def test_exact_attention_takes_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of one row, of three heads over 130 tokens, take 3120 bytes."""
    monkeypatch.setattr("npu.selftest_oracle._SCORE_BYTES", 3120 * 3)
    world = World([130], [20])
    assert np.abs(exact_attention(world.cache, world.batch, world.q) - world.expected(0)).max() < 1e-12


@pytest.mark.parametrize("buckets", [(64, 128, 256), (16, 20, 64), (4, 68)])
def test_every_shape_is_cut_to_what_it_says(buckets: tuple[int, ...]) -> None:
    bench = bench_of(buckets=buckets)
    assert {shape.tokens for shape in bench.shapes} == set(buckets)
    for shape in bench.shapes:
        batch = bench.batch(shape)
        layout = bench.cut(batch).layout
        group = HEADS // GEOMETRY.kv_heads
        assert (layout.batch, layout.tokens, bool(layout.mask_rows)) == (shape.batch, shape.tokens, shape.tile > 1)
        assert shape.tile * group < layout.rows <= shape.tile * group + 4  # one more for the canary, padded to 4
        assert int(batch.context_lens[0]) == shape.tokens - 2  # the longest that fits
    bench.close()


def test_a_tile_that_no_context_of_a_bucket_needs_is_left_out() -> None:
    bench = bench_of(buckets=(16, 64))
    assert [str(shape) for shape in bench.shapes if shape.tile > 1] == [
        "prefill16 1 x 16",  # of 14 tokens
        "prefill16 1 x 64",
        "prefill64 1 x 64",
    ]
    bench.close()


def test_a_launch_is_right_on_every_core_and_timed(bench: Bench) -> None:
    for shape in bench.shapes:
        batch = bench.batch(shape)
        q = bench.query(batch)
        outs, seconds = bench.run(bench.launch(bench.cut(batch)), {0: q, 1: -q})
        for out, sign in zip(outs, (1, -1), strict=True):
            assert not isinstance(out, DeviceError)
            assert np.abs(out - exact_attention(bench.cache, batch, sign * q)).max() < LARGEST_ERROR
        assert seconds > 0


def test_a_failed_run_is_an_answer_and_its_buffer_comes_back(bench: Bench) -> None:
    device = bench.device
    assert isinstance(device, EmulatedDevice)
    batch = bench.batch(bench.shapes[0])
    launch, q = bench.launch(bench.cut(batch)), bench.query(batch)
    device.faults = Faults(dead_cores=(1,))
    for _ in range(3):  # more than there are buffers
        outs, _ = bench.run(launch, {0: q, 1: q})
        assert not isinstance(outs[0], DeviceError)
        assert "injected fault" in str(outs[1])


def test_after_a_run_that_never_ends_there_are_no_more() -> None:
    bench = bench_of(Faults(hanging=(1,)))
    batch = bench.batch(bench.shapes[0])
    launch, q = bench.launch(bench.cut(batch)), bench.query(batch)
    outs, _ = bench.run(launch, {0: q, 1: q})
    assert not isinstance(outs[0], DeviceError)
    assert "did not end" in str(outs[1])
    assert bench.stuck
    ((refused,), _) = bench.run(launch, {0: q})
    assert "an earlier job never ended" in str(refused)
    bench.close()  # what the run still uses stays


def test_why_a_device_does_not_open_is_not_hidden_by_the_memory_it_was_shown() -> None:
    def refuse(memory: NDArray[np.uint8]) -> EmulatedDevice:
        raise DeviceError(f"no, though {len(memory)} bytes are there")

    with pytest.raises(DeviceError, match="no, though"):
        Bench(GEOMETRY, HEADS, refuse, buckets=(64,), batches=(1,), cores=1)

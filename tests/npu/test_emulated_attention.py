"""The emulated runtime from block tables to float32 rows: numbers, batching, memory, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache
from hostcache.errors import DeviceError, DimensionTooLarge, NoBucket, UsageError
from npu.attention import AttentionBatch, AttentionRuntime
from npu.cores import QUARANTINE_AFTER
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.emulated_device import Faults
from npu.fp16 import Rounding
from npu.staged import arena_bytes
from tests.npu.paged import PagedMemory, batch_of, reference

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16)
HEADS = 6
BUCKETS = (64, 128, 256)


def paged_cache(geometry: KVGeometry, blocks: int) -> tuple[PagedKVCache, PagedMemory]:
    """A cache whose blocks are all in use and full of NaN, and a test's view of the same bytes."""
    cache = PagedKVCache.create(geometry, blocks * geometry.block_bytes)
    cache.pool.allocate(blocks)
    memory = PagedMemory(geometry, blocks)
    memory.buffer = cache.buffer
    memory.view[...] = np.nan
    return cache, memory


class World:
    """Some sequences over one cache, their blocks shuffled."""

    def __init__(
        self, lengths: Sequence[int], rows: Sequence[int], geometry: KVGeometry = GEOMETRY, heads: int = HEADS
    ) -> None:
        rng = np.random.default_rng(sum(lengths) + 1000 * len(rows))
        needed = [geometry.blocks_for(length) for length in lengths]
        self.cache, self.memory = paged_cache(geometry, sum(needed) + 1)
        order = rng.permutation(sum(needed) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        for table, length in zip(self.tables, lengths, strict=True):
            self.memory.fill(table, length, rng)
        self.batch = batch_of(self.tables, list(lengths), list(rows))
        # Multiples of 1/256 below 16: exact in fp16, and so are they divided by 4 or 8, the root of the head dim.
        wide = rng.standard_normal((self.batch.rows, heads, geometry.head_dim)).clip(-8, 8)
        self.q = (np.round(wide * 256) / 256).astype(np.float32)

    def attend(self, runtime: AttentionRuntime, layer: int = 1, only: int | None = None) -> NDArray[np.float32]:
        """One step of all sequences, or of one of them."""
        batch, q = self.batch, self.q
        if only is not None:
            start, end = (int(row) for row in batch.query_starts[only : only + 2])
            q = q[start:end]
            one = slice(only, only + 1)
            batch = AttentionBatch(
                np.array([0, end - start], np.int32), batch.context_lens[one], np.ascontiguousarray(batch.tables[one])
            )
        out = np.full_like(q, np.nan)
        runtime.begin_step(batch)
        try:
            runtime.attend(layer, q, out)
        finally:
            runtime.end_step()
        return out

    def expected(self, layer: int = 1) -> NDArray[np.float64]:
        return reference(self.memory, layer, self.batch, self.q)

    def bound(self, rounding: Rounding, layer: int = 1) -> float:
        """What rounding may cost, from the size of the scores and values and nothing else.

        With u = 2^-11, one rounding to fp16 changes a number by a share of u, and a small one by 2^-25 at most.
        `output`: the result is rounded once; float32 adds its own 2^-24 per term of a sum.
        `op`: a score is rounded after the product, its maximum too, and their difference (twice as large) again, so
        that an exponent is off by 4u times the largest score, and its exponential by a factor. Sum and quotient are
        rounded once each. Weights below fp16 add 2^-25 each, twice, against a sum that is at least 1.
        """
        u = 2.0**-11
        geometry = self.memory.geometry
        largest_score = largest_value = 0.0
        for i, length in enumerate(self.batch.context_lens.tolist()):
            k, v = self.memory.sequence(layer, self.batch.tables[i], length)
            rows = self.q[self.batch.query_starts[i] : self.batch.query_starts[i + 1]].astype(np.float64)
            by_kv_head = rows.reshape(len(rows), geometry.kv_heads, -1, geometry.head_dim)
            scores = np.einsum("rhgd,htd->rhgt", by_kv_head, k) / np.sqrt(geometry.head_dim)
            largest_score = max(largest_score, float(np.abs(scores).max(initial=0)))
            largest_value = max(largest_value, float(np.abs(v).max()))
        tokens = int(self.batch.context_lens.max())
        in_float32 = (tokens + 4 * geometry.head_dim * largest_score) * 2.0**-23 + u
        if rounding == "output":
            return largest_value * in_float32 + 2.0**-25
        weight = np.exp(4 * u * largest_score) * (1 + u) - 1
        quotient = (1 + weight) * (1 + u) / (1 - weight - u - tokens * 2.0**-25) - 1
        return float(largest_value * (quotient + tokens * 2.0**-24 + in_float32) + 2.0**-25)


# --- numbers ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(), rounding=st.sampled_from(get_args(Rounding)), group=st.sampled_from([1, 3, 4]), tiled=st.booleans()
)
def test_attention_equals_float64_within_what_rounding_costs(
    data: st.DataObject, rounding: Rounding, group: int, tiled: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    rows = [data.draw(st.integers(1, min(length, 140)) | st.just(1)) for length in lengths]
    world = World(lengths, rows, heads=group * GEOMETRY.kv_heads)
    runtime = EmulatedAttention(world.cache, group * GEOMETRY.kv_heads, rounding, cores=1, buckets=BUCKETS, tiled=tiled)
    np.testing.assert_allclose(world.attend(runtime), world.expected(), rtol=0, atol=world.bound(rounding))
    runtime.close()


def test_the_bounds_are_worth_something() -> None:
    # Values are about 4 at most: an output is off by 4 * 2^-11 = 0.002, and op by op by some percent of 4.
    world = World([200, 100], [3, 1])
    assert world.bound("output") < 0.004
    assert world.bound("op") < 0.15


def test_op_by_op_rounding_is_coarser_than_rounding_the_output() -> None:
    world = World([200, 100, 50], [1, 1, 1])
    expected = world.expected()
    error = {}
    for rounding in get_args(Rounding):
        runtime = EmulatedAttention(world.cache, HEADS, rounding, cores=1, buckets=BUCKETS)
        error[rounding] = float(np.sqrt(np.mean((world.attend(runtime) - expected) ** 2)))
        runtime.close()
    assert error["op"] > 1.5 * error["output"] > 0


def test_the_result_is_fp16() -> None:
    world = World([40, 90], [1, 20])
    with EmulatedRuntime(world) as runtime:
        out = world.attend(runtime)
    np.testing.assert_array_equal(out, out.astype(np.float16).astype(np.float32))


def test_a_score_beyond_fp16_shows_as_it_would_on_the_device() -> None:
    world = World([5], [1])
    world.q[...] = 60000.0  # K is about 1, so that 16 products of 15000 exceed 65504
    world.memory.view[world.tables[0][0], 1, 0, :, 0] = 1.0  # token 0: the score is 240000
    with EmulatedRuntime(world, rounding="op") as runtime:
        assert np.isnan(world.attend(runtime)).all()


# --- cutting a step ---------------------------------------------------------------------------------------------------


class EmulatedRuntime:
    """A runtime over a world, closed at the end; proves that no buffer is left behind."""

    def __init__(
        self,
        world: World,
        rounding: Rounding = "output",
        cores: int = 1,
        host: CpuAttention | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._runtime = EmulatedAttention(
            world.cache, HEADS, rounding, cores=cores, buckets=BUCKETS, host=host, faults=faults
        )

    def __enter__(self) -> EmulatedAttention:
        return self._runtime

    def __exit__(self, *_: object) -> None:
        arena = self._runtime._arena
        assert arena.free == len(arena.buffers)
        self._runtime.close()


def test_a_ragged_decode_batch_equals_its_sequences_one_by_one_bit_for_bit() -> None:
    lengths = [1, 15, 16, 17, 62, 63, 64, 126, 127, 128, 200, 254]
    world = World(lengths, [1] * len(lengths))
    with EmulatedRuntime(world) as runtime:
        together = world.attend(runtime)
        for i in range(len(lengths)):
            np.testing.assert_array_equal(world.attend(runtime, only=i), together[i : i + 1])


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 128, 129, 250])
def test_a_chunk_of_any_size_sees_exactly_what_is_before_each_of_its_rows(rows: int) -> None:
    world = World([250], [rows])
    with EmulatedRuntime(world) as runtime:
        np.testing.assert_allclose(world.attend(runtime), world.expected(), rtol=0, atol=world.bound("output"))


def test_layers_share_a_plan_but_not_their_bytes() -> None:
    world = World([100, 30], [1, 7])
    out = np.empty_like(world.q)
    with EmulatedRuntime(world) as runtime:
        runtime.begin_step(world.batch)
        for layer in range(2):
            runtime.attend(layer, world.q, out)
            np.testing.assert_allclose(out, world.expected(layer), rtol=0, atol=world.bound("output", layer))
        runtime.end_step()


def test_a_step_keeps_its_plan_when_the_caller_reuses_the_arrays() -> None:
    world = World([100, 30], [1, 7])
    expected = world.expected()
    out = np.empty_like(world.q)
    with EmulatedRuntime(world) as runtime:
        runtime.begin_step(world.batch)
        for array in (world.batch.tables, world.batch.context_lens, world.batch.query_starts):
            array[...] = 0
        runtime.attend(1, world.q, out)
        runtime.end_step()
    assert float(np.abs(out - expected).max()) < 0.004


def test_sequences_without_rows_are_left_alone() -> None:
    world = World([100, 30, 9], [0, 2, 0])
    with EmulatedRuntime(world) as runtime:
        np.testing.assert_allclose(world.attend(runtime), world.expected(), rtol=0, atol=0.004)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_arena_of_a_small_model_worked_out_by_hand() -> None:
    # 3 KV heads of 64, 9 query heads. At 4096 tokens K and V take 2 * 3 * 4096 * 64 * 2 = 3145728 bytes; a tile has
    # 64 * 3 + 1 rows, padded to 196: query and out 2 * 3 * 196 * 64 * 2 = 150528, the mask 4096 * 196 * 2 = 1605632.
    # That is 1196.75 pages, so 1197 for each of 2 * 3 buffers.
    assert arena_bytes(KVGeometry(30, 3, 64), 9) == 6 * 1197 * 4096


def test_staging_memory_does_not_grow_with_the_sessions() -> None:
    geometry = KVGeometry(layers=1, kv_heads=2, head_dim=16)
    sizes = []
    for sessions in (1, 8, 64):
        lengths = [1 + 7 * i % 64 for i in range(sessions)]
        world = World(lengths, [1] * sessions, geometry)
        runtime = EmulatedAttention(world.cache, HEADS, cores=1, buckets=BUCKETS)
        before = [buffer.memory.__array_interface__["data"] for buffer in runtime._arena.buffers]
        np.testing.assert_allclose(world.attend(runtime, 0), world.expected(0), rtol=0, atol=0.004)
        assert [buffer.memory.__array_interface__["data"] for buffer in runtime._arena.buffers] == before
        sizes.append(runtime.staging_bytes)
        runtime.close()
    assert sizes == [arena_bytes(geometry, HEADS, cores=1, buckets=BUCKETS)] * 3


def test_more_launches_than_buffers_take_turns() -> None:
    world = World([254, 250, 30, 100, 200], [254, 200, 1, 1, 1])  # 4 + 4 tiles and one launch per bucket
    with EmulatedRuntime(world, cores=1) as runtime:
        assert len(runtime._arena.buffers) == 2
        np.testing.assert_allclose(world.attend(runtime), world.expected(), rtol=0, atol=world.bound("output"))


# --- the host -----------------------------------------------------------------------------------------------------


def test_a_context_beyond_the_largest_bucket_goes_to_the_host_and_nothing_else_does() -> None:
    world = World([255, 254, 17, 700], [5, 2, 1, 1])
    cpu = CpuAttention(world.cache, HEADS)
    by_cpu = world.attend(cpu)
    with EmulatedRuntime(world, host=cpu) as runtime:
        for _ in range(2):  # the second step finds the host ready again
            out = world.attend(runtime)
            np.testing.assert_array_equal(out[:5], by_cpu[:5])
            np.testing.assert_array_equal(out[8:], by_cpu[8:])
            np.testing.assert_array_equal(out[5:8], out[5:8].astype(np.float16))
            np.testing.assert_allclose(out, world.expected(), rtol=0, atol=world.bound("output"))
    with pytest.raises(UsageError, match="closed"):
        cpu.begin_step(world.batch)


def test_without_a_host_such_a_context_is_refused_before_the_step() -> None:
    world = World([255, 20], [1, 1])
    with EmulatedRuntime(world) as runtime:
        with pytest.raises(NoBucket, match="255 tokens is longer than the 254 that the largest bucket holds"):
            runtime.begin_step(world.batch)
        np.testing.assert_allclose(world.attend(runtime, only=1), world.expected()[1:], rtol=0, atol=0.004)


def test_a_host_that_refuses_leaves_no_step_behind() -> None:
    world = World([300, 20], [1, 1])
    cpu = CpuAttention(world.cache, HEADS)
    cpu.begin_step(world.batch)  # somebody else's step
    with EmulatedRuntime(world, host=cpu) as runtime:
        with pytest.raises(UsageError, match="end_step"):
            runtime.begin_step(world.batch)
        cpu.end_step()
        world.attend(runtime)


# --- faults -----------------------------------------------------------------------------------------------------------

# The step of `five` makes as many launches: 4 tiles and a decode row.
LAUNCHES = 5


@pytest.fixture(scope="module")
def five() -> tuple[World, NDArray[np.float64]]:
    world = World([254, 100], [254, 1])
    return world, world.expected()


FAULTS: dict[str, tuple[Callable[[int], Faults], str]] = {
    "failing": (lambda run: Faults(failing={run}), "returned -1: an injected fault"),
    "stale": (lambda run: Faults(stale={run}), "heads do not answer this launch"),
    "torn": (lambda run: Faults(torn={run}), "1 of 2 heads do not answer this launch"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("run", range(LAUNCHES))
def test_a_run_that_goes_wrong_is_run_again_on_another_core(
    five: tuple[World, NDArray[np.float64]], run: int, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, expected = five
    inject, message = FAULTS[fault]
    with EmulatedRuntime(world, cores=3, faults=inject(run)) as runtime:
        np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
        assert (runtime.cores.launches, runtime.cores.failures, runtime.cores.on_host) == (LAUNCHES, 1, 0)
        assert runtime.cores.quarantined == []
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert message in record.getMessage()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("run", range(LAUNCHES))
def test_without_another_core_the_host_computes_it(
    five: tuple[World, NDArray[np.float64]], run: int, fault: str
) -> None:
    world, expected = five
    with EmulatedRuntime(
        world, cores=1, host=CpuAttention(world.cache, HEADS), faults=FAULTS[fault][0](run)
    ) as runtime:
        np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
        assert (runtime.cores.launches, runtime.cores.failures, runtime.cores.on_host) == (LAUNCHES - 1, 1, 1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("run", range(LAUNCHES))
def test_without_a_host_either_it_is_an_error_and_the_next_step_is_right(
    five: tuple[World, NDArray[np.float64]], run: int, fault: str
) -> None:
    world, expected = five
    inject, message = FAULTS[fault]
    with EmulatedRuntime(world, cores=1, faults=inject(run)) as runtime:
        out = np.empty_like(world.q)
        runtime.begin_step(world.batch)
        with pytest.raises(DeviceError, match=message):
            runtime.attend(1, world.q, out)
        assert runtime._arena.free == 2
        runtime.end_step()
        np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)


def test_the_host_steps_in_beside_its_own_share(caplog: pytest.LogCaptureFixture) -> None:
    world = World([300, 200, 700], [3, 2, 1])  # the second one is the device's
    host = CpuAttention(world.cache, HEADS)
    with EmulatedRuntime(world, cores=1, host=host, faults=Faults(failing={0})) as runtime:
        out = np.empty_like(world.q)
        runtime.begin_step(world.batch)
        for layer in range(2):
            runtime.attend(layer, world.q, out)
            np.testing.assert_allclose(out, world.expected(layer), rtol=0, atol=world.bound("output", layer))
        runtime.end_step()
        assert (runtime.cores.launches, runtime.cores.on_host) == (1, 1)
        host.begin_step(world.batch)  # nothing was left begun
        host.end_step()


def test_a_dead_core_is_quarantined_and_the_others_go_on(
    five: tuple[World, NDArray[np.float64]], caplog: pytest.LogCaptureFixture
) -> None:
    world, expected = five
    with EmulatedRuntime(world, cores=3, faults=Faults(dead_cores={1})) as runtime:
        for _ in range(4):
            np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
        assert runtime.cores.quarantined == [1]
        # Two of a step's launches are in flight on core 1 at once: the second of them fails after its quarantine.
        assert QUARANTINE_AFTER <= runtime.cores.failures <= QUARANTINE_AFTER + 1
        assert runtime.cores.launches == 4 * LAUNCHES
    [verdict] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "NPU core 1 gets no more jobs, after 3 failures in a row; 2 cores are left." in verdict


def test_when_every_core_is_dead_the_host_does_it_all(
    five: tuple[World, NDArray[np.float64]], caplog: pytest.LogCaptureFixture
) -> None:
    world, expected = five
    faults = Faults(dead_cores={0, 1, 2})
    with EmulatedRuntime(world, cores=3, host=CpuAttention(world.cache, HEADS), faults=faults) as runtime:
        for _ in range(4):
            np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
        assert runtime.cores.quarantined == [0, 1, 2]
        # In flight jobs of a core fail after its quarantine, too: 2 buffers a core and 5 launches at once.
        assert 3 * QUARANTINE_AFTER <= runtime.cores.failures <= 3 * QUARANTINE_AFTER + LAUNCHES
        assert (runtime.cores.launches, runtime.cores.on_host) == (0, 4 * LAUNCHES)
    assert "0 cores are left, so attention runs on the CPU" in caplog.text


def test_a_failure_now_and_then_quarantines_nothing(five: tuple[World, NDArray[np.float64]]) -> None:
    world, expected = five
    every_other = Faults(failing=range(0, 1000, 2))
    with EmulatedRuntime(world, cores=1, host=CpuAttention(world.cache, HEADS), faults=every_other) as runtime:
        for _ in range(4):
            np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
        assert runtime.cores.quarantined == []
        assert runtime.cores.failures == runtime.cores.on_host == 4 * LAUNCHES / 2


def test_a_run_that_hangs_costs_its_core_and_its_buffer_and_nothing_else(
    five: tuple[World, NDArray[np.float64]],
) -> None:
    world, expected = five
    cpu = CpuAttention(world.cache, HEADS)
    runtime = EmulatedAttention(world.cache, HEADS, cores=2, buckets=BUCKETS, host=cpu, faults=Faults(hanging={1}))
    for _ in range(3):
        np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
    assert runtime.cores.quarantined == [1]
    assert runtime._arena.free == 3  # the device may still write to the fourth
    [stuck] = runtime._stuck
    stuck.run.ended = True  # type: ignore[misc]  # a device sets it
    del stuck  # it holds views of the arena
    np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=0.004)
    assert runtime._arena.free == 4
    runtime.close()


def test_memory_that_the_device_may_still_write_to_is_not_given_back(
    five: tuple[World, NDArray[np.float64]],
) -> None:
    world, _ = five
    cpu = CpuAttention(world.cache, HEADS)
    runtime = EmulatedAttention(world.cache, HEADS, cores=1, buckets=BUCKETS, host=cpu, faults=Faults(hanging={0}))
    world.attend(runtime)
    memory = runtime._stuck[0].buffer.memory
    runtime.close()
    memory[...] = 1  # still mapped


def test_several_faults_in_one_step_are_one_error(five: tuple[World, NDArray[np.float64]]) -> None:
    with (
        EmulatedRuntime(five[0], cores=1, faults=Faults(failing=range(LAUNCHES))) as runtime,
        pytest.raises(DeviceError, match="run 0"),
    ):
        five[0].attend(runtime)


def test_a_sync_that_never_comes_back_is_noticed(
    five: tuple[World, NDArray[np.float64]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmulatedRuntime(five[0]) as runtime:
        monkeypatch.setattr(runtime._device, "sync_from_device", lambda _offset, _nbytes: None)
        with pytest.raises(DeviceError, match="heads do not answer this launch"):
            five[0].attend(runtime)


# --- use against the rules --------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[tuple[World, EmulatedAttention]]:
    world = World([20], [2])
    with EmulatedRuntime(world) as runtime:
        yield world, runtime


def test_attend_needs_a_step(small: tuple[World, EmulatedAttention]) -> None:
    world, runtime = small
    with pytest.raises(UsageError, match="call begin_step first"):
        runtime.attend(0, world.q, np.empty_like(world.q))
    world.attend(runtime)
    with pytest.raises(UsageError, match="call begin_step first"):
        runtime.attend(0, world.q, np.empty_like(world.q))


def test_a_step_must_end_before_the_next_begins(small: tuple[World, EmulatedAttention]) -> None:
    world, runtime = small
    runtime.begin_step(world.batch)
    with pytest.raises(UsageError, match="call end_step first"):
        runtime.begin_step(world.batch)
    runtime.end_step()
    runtime.end_step()


def test_wrong_operands_are_refused_and_the_step_goes_on(small: tuple[World, EmulatedAttention]) -> None:
    world, runtime = small
    out = np.empty_like(world.q)
    runtime.begin_step(world.batch)
    wide: NDArray[Any] = world.q.astype(np.float64)
    for q in (world.q[:1], wide, world.q[..., :8]):
        with pytest.raises(UsageError, match="q must be"):
            runtime.attend(0, q, out)
    with pytest.raises(UsageError, match="out must be"):
        runtime.attend(0, world.q, out[:1])
    for layer in (-1, 2):
        with pytest.raises(UsageError, match=f"layer {layer} is not in 0..1"):
            runtime.attend(layer, world.q, out)
    runtime.attend(1, world.q, out)
    runtime.end_step()
    np.testing.assert_allclose(out, world.expected(), rtol=0, atol=0.004)


def test_a_batch_that_contradicts_itself_is_refused(small: tuple[World, EmulatedAttention]) -> None:
    world, runtime = small
    for tables, lengths in (([[0, 99]], [20]), ([[0]], [20]), ([[0, 1]], [1])):
        with pytest.raises(UsageError):
            runtime.begin_step(batch_of(tables, lengths, [2]))
    world.attend(runtime)


def test_a_closed_runtime_refuses_everything_but_close() -> None:
    world = World([20], [2])
    runtime = EmulatedAttention(world.cache, HEADS, cores=1, buckets=BUCKETS)
    runtime.close()
    runtime.close()
    calls: list[Callable[[], None]] = [
        lambda: runtime.begin_step(world.batch),
        lambda: runtime.attend(0, world.q, world.q.copy()),
        runtime.end_step,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()


def test_what_cannot_work_is_refused_at_the_start() -> None:
    cache, _ = paged_cache(GEOMETRY, 1)
    for heads in (0, 3):
        with pytest.raises(UsageError, match=f"{heads} query heads are not a multiple of 2"):
            EmulatedAttention(cache, heads)
    with pytest.raises(UsageError, match="ascending positive multiples"):
        EmulatedAttention(cache, 2, buckets=[100, 50])
    with pytest.raises(UsageError, match="at least one buffer, got 0"):
        EmulatedAttention(cache, 2, cores=0)
    with pytest.raises(UsageError, match="rounding must be one of"):
        EmulatedAttention(cache, 2, "never")  # type: ignore[arg-type]  # the value under test
    with pytest.raises(DimensionTooLarge, match="a bucket of 8192 tokens"):
        EmulatedAttention(cache, 2, buckets=[8192])
    with pytest.raises(DimensionTooLarge, match="a tile of 8196 rows"):
        EmulatedAttention(cache, 256, buckets=[64])  # 128 query heads per KV head, 64 tokens
    eight_bit, _ = paged_cache(GEOMETRY, 1)
    eight_bit.geometry = KVGeometry(2, 2, 16, itemsize=1)
    with pytest.raises(UsageError, match="the NPU reads fp16, got itemsize 1"):
        EmulatedAttention(eight_bit, 2)

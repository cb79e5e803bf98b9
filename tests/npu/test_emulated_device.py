"""The strict device: each breach of its contract by name, what it sees, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache import KVGeometry, Region
from hostcache.errors import (
    DeviceError,
    DimensionTooLarge,
    DirtyTail,
    Misaligned,
    NotContiguous,
    NotSynced,
    OutsideArena,
    StagingError,
    UsageError,
    WrongState,
)
from npu.canary import Canary
from npu.device import AttentionJob
from npu.emulated_device import EmulatedDevice, Faults
from npu.fp16 import Rounding, attention, widen
from staging import MASKED, StagingArena, StagingBuffer, StagingLayout
from tests.staging.flat import noisy_cache, plan_of

GEOMETRY = KVGeometry(layers=1, kv_heads=2, head_dim=8)
CACHE = noisy_cache(GEOMETRY, blocks=4)
CACHE.buffer.view(np.float16)[:] = np.random.default_rng(1).standard_normal(CACHE.buffer.nbytes // 2)
LENGTHS = (20, 33)
TOKENS = 64


@dataclass
class Bench:
    """A device with an arena, and one job of two sequences: some decode rows each, or rows that see the same."""

    device: EmulatedDevice
    arena: StagingArena
    masked_by: str = "keys"

    @property
    def asking(self) -> int:
        """Rows of the canary."""
        return 4 if self.masked_by == "operand" else 1

    def filled(self, tokens: int = TOKENS, rows: int | None = None) -> StagingBuffer:
        """A buffer with everything in place but not synced; with three rows that are not the canary's, or four."""
        buffer = self.arena.acquire()
        rows = rows or (8 if self.masked_by == "operand" else 4)
        mask_rows = rows if self.masked_by == "operand" else 0
        tables = [[0, 1], [2, 3, 1]]
        plan = plan_of(CACHE, tables, LENGTHS, tokens, rows, mask_rows=mask_rows, tiled=self.device.tiled)
        buffer.fill(CACHE, plan, 0)
        head_dim = GEOMETRY.head_dim
        buffer.query[...] = 0
        buffer.query[:, :, :head_dim] = np.random.default_rng(2).standard_normal((4, rows, head_dim))
        buffer.query[:, :, head_dim : head_dim + 1] = 1
        if mask_rows:
            for sequence, length in enumerate(LENGTHS):
                buffer.mask[sequence, :, :length] = 0
                buffer.mask[sequence, :, length:] = MASKED
        self.canary = Canary(plan.layout)
        self.canary.write(buffer)
        return buffer

    def ready(self) -> AttentionJob:
        """A job that runs."""
        buffer = self.filled()
        buffer.sync_to_device()
        return AttentionJob.over(buffer)

    def run(self, job: AttentionJob) -> None:
        """Run a job to its end."""
        self.device.submit(job, core=0).wait()

    def result(self) -> NDArray[np.float16]:
        """Run a good job from start to end; without the canary's rows, which differ every time."""
        job = self.ready()
        self.run(job)
        job.buffer.sync_from_device()
        self.canary.check(job.out)
        out = job.out[:, : -self.asking].copy()
        job.buffer.release()
        return out


def bench_with(
    faults: Faults | None = None,
    buffers: int = 2,
    cores: int = 3,
    nbytes: int = 1 << 20,
    masked_by: str = "keys",
    *,
    tiled: bool = False,
) -> Bench:
    region = Region.anonymous(buffers * nbytes)
    device = EmulatedDevice(region.buffer, "output", cores, faults, tiled=tiled)
    return Bench(device, StagingArena(region, buffers, device), masked_by)


@pytest.fixture(params=["keys", "operand"])
def masked_by(request: pytest.FixtureRequest) -> str:
    """Where a job's mask is."""
    return str(request.param)


@pytest.fixture
def bench(masked_by: str) -> Iterator[Bench]:
    """Checks after each test that a breach leaves the arena usable."""
    bench = bench_with(masked_by=masked_by)
    before = bench.result()
    yield bench
    for buffer in bench.arena.buffers:
        if buffer.state.value != "free":
            buffer.release()
    np.testing.assert_array_equal(bench.result(), before)


# --- the contract -----------------------------------------------------------------------------------------------------


def test_a_buffer_that_was_not_synced_is_in_the_wrong_state(bench: Bench) -> None:
    buffer = bench.filled()
    with pytest.raises(WrongState, match="staging buffer 0 is filling, this needs it ready"):
        bench.run(AttentionJob.over(buffer))


def test_a_job_runs_once(bench: Bench) -> None:
    job = bench.ready()
    bench.run(job)
    with pytest.raises(WrongState, match="staging buffer 0 is in flight, this needs it ready"):
        bench.run(job)


def test_a_buffer_released_while_its_job_is_in_flight_is_noticed(bench: Bench) -> None:
    job = bench.ready()
    run = bench.device.submit(job, core=0)
    job.buffer.release()
    with pytest.raises(WrongState, match="staging buffer 0 is free, this needs it in flight"):
        run.wait()


@pytest.mark.parametrize("operand", ["query", "keys", "values", "out"])
def test_a_write_after_the_sync_is_noticed_whatever_it_hits(bench: Bench, operand: str) -> None:
    job = bench.ready()
    last = getattr(job, operand)[-1, -1, -1:].view(np.uint16)
    last ^= 1
    with pytest.raises(NotSynced, match=f"the host wrote to {operand} after the last sync"):
        bench.run(job)


def test_a_device_that_was_never_synced_takes_not_even_zeros_for_granted() -> None:
    class Deaf:
        def sync_to_device(self, offset: int, nbytes: int) -> None: ...
        def sync_from_device(self, offset: int, nbytes: int) -> None: ...

    region = Region.anonymous(1 << 20)  # zeros, as a query of zeros is
    device = EmulatedDevice(region.buffer)
    buffer = Bench(device, StagingArena(region, 1, Deaf())).filled()
    buffer.query[...] = 0
    buffer.sync_to_device()
    with pytest.raises(NotSynced, match="the host wrote to query"):
        device.submit(AttentionJob.over(buffer), core=0)


def spread(job: AttentionJob, operand: str) -> NDArray[np.float16]:
    """An operand's shape, over memory of its buffer that has gaps."""
    array: NDArray[np.float16] = getattr(job, operand)
    strides = (array.strides[0] * 2, *array.strides[1:])
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


@pytest.mark.parametrize("operand", ["query", "keys", "values"])
def test_rows_with_gaps_are_refused(bench: Bench, operand: str) -> None:
    job = bench.ready()
    gaps: dict[str, Any] = {operand: spread(job, operand)}
    with pytest.raises(NotContiguous, match=f"{operand} has strides"):
        bench.run(replace(job, **gaps))


@pytest.mark.parametrize("operand", ["query", "keys", "values", "out"])
def test_memory_of_somebody_else_is_refused(bench: Bench, operand: str) -> None:
    job = bench.ready()
    with pytest.raises(OutsideArena, match=f"{operand} lies at .* not inside the job's staging buffer"):
        bench.run(replace(job, **{operand: getattr(job, operand).copy()}))


def test_another_buffer_of_the_arena_is_somebody_else(bench: Bench) -> None:
    job, other = bench.ready(), bench.ready()
    with pytest.raises(OutsideArena):
        bench.run(replace(job, out=other.out))


def test_an_address_off_its_cache_line_is_refused(bench: Bench) -> None:
    job = bench.ready()
    start = job.buffer.layout.query_offset + 2
    shifted = job.buffer.memory[start : start + job.query.nbytes].view(np.float16).reshape(job.query.shape)
    with pytest.raises(Misaligned, match=r"query lies at .* not on 64 bytes"):
        bench.run(replace(job, query=shifted))


@pytest.mark.parametrize(("tokens", "rows"), [(66, 4), (64, 7), (64, 5)])
def test_tokens_and_rows_that_are_not_padded_are_refused(bench: Bench, tokens: int, rows: int) -> None:
    buffer = bench.filled(tokens, rows)
    buffer.sync_to_device()
    with pytest.raises(Misaligned, match=f"{rows} rows and {tokens} tokens must be padded to multiples of 4 and 4"):
        bench.run(AttentionJob.over(buffer))


@pytest.mark.parametrize(
    ("tokens", "rows", "operand"), [(8188, 4, None), (8192, 4, "keys"), (64, 8188, None), (64, 8192, "query")]
)
def test_a_dimension_beyond_thirteen_bits_is_refused(tokens: int, rows: int, operand: str | None) -> None:
    bench = bench_with(buffers=1, nbytes=4 << 20)
    buffer = bench.filled(tokens, rows)
    buffer.sync_to_device()
    job = AttentionJob.over(buffer)
    if operand is None:
        bench.run(job)
        buffer.sync_from_device()
        bench.canary.check(buffer.out)
    else:
        with pytest.raises(DimensionTooLarge, match=f"{operand} has a dimension of 8192"):
            bench.run(job)


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0x0001, 0x8000])  # NaN, infinity, the least subnormal, minus zero
@pytest.mark.parametrize("operand", ["keys", "values"])
@pytest.mark.parametrize(("sequence", "token"), [(0, 20), (1, 61)])
def test_any_byte_in_a_tail_is_refused(bench: Bench, bits: int, operand: str, sequence: int, token: int) -> None:
    buffer = bench.filled()
    head = sequence * GEOMETRY.kv_heads + 1
    getattr(buffer, operand).view(np.uint16)[head, token, 5] = bits
    buffer.sync_to_device()
    expected = f"{operand} of sequence {sequence} hold bytes behind its {LENGTHS[sequence]} tokens"
    with pytest.raises(DirtyTail, match=expected):
        bench.run(AttentionJob.over(buffer))


def hide(bench: Bench, buffer: StagingBuffer, sequence: int, token: int | slice, value: float) -> None:
    """Set the mask of some tokens of a sequence, for every row but the canary's."""
    if bench.masked_by == "operand":
        buffer.mask[sequence, :-4, token] = value
    else:
        heads = slice(sequence * GEOMETRY.kv_heads, (sequence + 1) * GEOMETRY.kv_heads)
        buffer.keys[heads, token, GEOMETRY.head_dim] = value


@pytest.mark.parametrize("value", [-np.inf, np.nan, -65504.0, 1.0])
def test_a_mask_of_other_values_is_refused(bench: Bench, value: float) -> None:
    buffer = bench.filled()
    hide(bench, buffer, 1, 40, value)
    buffer.sync_to_device()
    with pytest.raises(StagingError, match=f"the mask holds {value}, it may hold 0 and -10000.0 only"):
        bench.run(AttentionJob.over(buffer))


def test_a_row_that_sees_nothing_is_refused(bench: Bench) -> None:
    buffer = bench.filled()
    hide(bench, buffer, 1, slice(0, -2), float(MASKED))
    buffer.sync_to_device()
    with pytest.raises(StagingError, match="row 0 of sequence 1 sees no token"):
        bench.run(AttentionJob.over(buffer))


def test_heads_of_a_sequence_share_a_mask_and_marks_hold_nothing_else() -> None:
    for head, token, channel in ((1, 19, 0), (0, 5, 1), (3, 40, 7), (2, 61, 2)):
        bench = bench_with()
        buffer = bench.filled()
        buffer.keys[head, token, GEOMETRY.head_dim + channel] = MASKED
        buffer.sync_to_device()
        with pytest.raises(StagingError, match="mark channels differ between the heads"):
            bench.run(AttentionJob.over(buffer))


@pytest.mark.parametrize(("row", "channel", "value"), [(0, 0, 0), (2, 1, 1), (0, 3, 0.125), (1, 5, 1)])
def test_a_query_that_does_not_ask_for_the_mask_is_refused(row: int, channel: int, value: float) -> None:
    bench = bench_with()
    buffer = bench.filled()
    buffer.query[2, row, GEOMETRY.head_dim + channel] = value
    buffer.sync_to_device()
    with pytest.raises(StagingError, match="padding would be attended"):
        bench.run(AttentionJob.over(buffer))


DIM = GEOMETRY.head_dim
SPOILT: dict[str, tuple[str, tuple[int, ...], float]] = {
    "a value that is no nonce": ("values", (3, -1, 2), 0),
    "K that is more than its shift": ("keys", (1, -2, 5), 1),
    "a query that is more than its shift": ("query", (1, -1, 5), 1),
}
SPOILT_KEYS = {
    "hidden by no mark": ("keys", (1, -2, DIM), 0.0),
    "a score of no more than any token's": ("keys", (1, -1, DIM + 1), 0.0),
    "a shift of K that is none": ("keys", (0, -1, DIM + 2), 0.25),
    "K without the query's shift": ("keys", (2, -1, DIM + 3), 0.0),
    "a query that asks for the mask": ("query", (2, -1, DIM), 1.0),
    "a query that asks for no score": ("query", (2, -1, DIM + 1), 0.0),
    "a query without K's shift": ("query", (3, -1, DIM + 2), 0.0),
    "a shift of the query that is none": ("query", (0, -1, DIM + 3), 0.0),
}
SPOILT_MASK = {
    "a shift of K that is none": ("keys", (0, -1, 0), 0.25),
    "K without the query's shift": ("keys", (2, -1, 1), 0.0),
    "a query without K's shift": ("query", (3, -4, 0), 0.0),
    "a shift of the query that is none": ("query", (0, -1, 1), 0.0),
    "a shift of the mask that is none": ("mask", (1, -3, -1), 0.0),
    "the first not seen": ("mask", (0, -2, -2), float(MASKED)),
    "the second not seen": ("mask", (0, -1, -1), float(MASKED)),
    "others seen": ("mask", (1, -4, 3), 0.0),
    "seen by others": ("mask", (0, -5, -1), 0.0),
}


@pytest.mark.parametrize(
    ("masked_by", "spoilt"),
    [
        *(("keys", spoilt) for spoilt in (SPOILT | SPOILT_KEYS).values()),
        *(("operand", spoilt) for spoilt in (SPOILT | SPOILT_MASK).values()),
    ],
)
def test_a_job_whose_staleness_could_not_be_seen_is_refused(
    bench: Bench, spoilt: tuple[str, tuple[int, ...], float]
) -> None:
    operand, place, value = spoilt
    buffer = bench.filled()
    getattr(buffer, operand)[place] = value
    if operand == "keys" and place[2] == DIM:  # of both heads, which share a mask
        buffer.keys[0, place[1], DIM] = value
    buffer.sync_to_device()
    with pytest.raises(StagingError, match="the last two tokens are not a canary"):
        bench.run(AttentionJob.over(buffer))


def test_a_canary_with_two_values_that_are_one_is_refused(bench: Bench) -> None:
    buffer = bench.filled()
    buffer.values[2, -1] = buffer.values[2, -2]
    buffer.sync_to_device()
    with pytest.raises(StagingError, match="the last two tokens are not a canary"):
        bench.run(AttentionJob.over(buffer))


def test_another_dtype_is_refused(bench: Bench) -> None:
    job = bench.ready()
    keys: NDArray[np.uint16] = job.keys.view(np.uint16)
    with pytest.raises(StagingError, match="keys is uint16, the device computes in float16"):
        bench.run(replace(job, keys=keys))  # type: ignore[arg-type]  # the breach under test


@pytest.mark.parametrize(
    "change",
    [
        lambda job: replace(job, values=job.values[:2]),
        lambda job: replace(job, out=job.out[:3]),
        lambda job: replace(job, mask=job.mask[:1]),
        lambda job: replace(job, keys=job.keys[:2], values=job.values[:2]),
        lambda job: replace(job, query=job.query[0]),
        lambda job: replace(job, query=job.query[:0]),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(
    bench: Bench, change: Callable[[AttentionJob], AttentionJob]
) -> None:
    job = bench.ready()
    with pytest.raises(StagingError, match="shape"):
        bench.run(change(job))


def test_a_device_without_cores_or_with_an_unknown_rounding_is_refused() -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(UsageError, match="at least one core, got 0"):
        EmulatedDevice(memory, cores=0)
    with pytest.raises(UsageError, match=r"rounding must be one of .*, got 'fp32'"):
        EmulatedDevice(memory, "fp32")  # type: ignore[arg-type]  # the value under test


# --- what the device sees, and when the host does ---------------------------------------------------------------------


def test_the_result_is_the_devices_until_it_is_synced(bench: Bench) -> None:
    job = bench.ready()
    before = job.out.copy().view(np.uint16)
    bench.run(job)
    np.testing.assert_array_equal(job.out.view(np.uint16), before)
    with pytest.raises(DeviceError, match="4 of 4 heads do not answer this launch"):
        bench.canary.check(job.out)
    job.buffer.sync_from_device()
    bench.canary.check(job.out)


def test_a_stale_run_is_detected_though_it_reports_success() -> None:
    bench = bench_with(Faults(stale={1}))
    bench.result()  # leaves a good result in the buffer
    with pytest.raises(DeviceError, match="4 of 4 heads do not answer this launch") as caught:
        bench.result()
    assert caught.value.values == {"stale": 4, "heads": 4}


def test_a_torn_run_is_detected_by_the_heads_it_left() -> None:
    bench = bench_with(Faults(torn={0}))
    with pytest.raises(DeviceError, match="3 of 4 heads do not answer"):  # one of four heads was written
        bench.result()


def test_not_a_number_is_no_answer() -> None:
    canary = Canary(StagingLayout(1, 3, TOKENS, 4, GEOMETRY.head_dim, 0))
    out = np.zeros((3, 4, GEOMETRY.head_dim), np.float16)
    out[:, -1:] = canary.answer
    canary.check(out)
    out[1, -1, 4] = np.nan
    with pytest.raises(DeviceError, match="1 of 3 heads do not answer"):
        canary.check(out)


def test_a_run_that_hangs_keeps_its_buffer() -> None:
    bench = bench_with(Faults(hanging={0}))
    run = bench.device.submit(bench.ready(), core=0)
    with pytest.raises(DeviceError, match="run 0 did not end"):
        run.wait()
    assert not run.ended


def test_a_dead_core_fails_whatever_it_is_given() -> None:
    bench = bench_with(Faults(dead_cores={1}), buffers=3)
    for core in (0, 1, 2):
        run = bench.device.submit(bench.ready(), core)
        if core == 1:
            with pytest.raises(DeviceError, match="run 1 returned -1"):
                run.wait()
        else:
            run.wait()
        assert run.ended


def test_a_failing_run_names_its_number_and_the_next_one_works() -> None:
    bench = bench_with(Faults(failing={1}))
    good = bench.result()
    with pytest.raises(DeviceError, match="run 1 returned -1"):
        bench.result()
    np.testing.assert_array_equal(bench.result(), good)


@pytest.mark.parametrize(("cores", "seconds"), [(1, 6.0), (2, 3.0), (3, 2.0), (4, 2.0)])
def test_cores_work_side_by_side_and_each_one_in_order(
    monkeypatch: pytest.MonkeyPatch, cores: int, seconds: float
) -> None:
    now = 100.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

        @staticmethod
        def sleep(duration: float) -> None:
            nonlocal now
            now += duration

    monkeypatch.setattr("npu.emulated_device.time", Clock)
    bench = bench_with(Faults(latency=1.0), buffers=6, cores=cores)
    runs = [bench.device.submit(bench.ready(), number % cores) for number in range(6)]
    assert [run.number for run in runs] == list(range(6))
    for run in runs:
        run.wait()
    assert now == 100.0 + seconds  # six runs of a second each


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_widening_is_exact_for_every_finite_fp16_and_right_for_the_others() -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    np.testing.assert_array_equal(widen(finite).view(np.uint32), finite.astype(np.float32).view(np.uint32))
    np.testing.assert_array_equal(widen(every), every.astype(np.float32))


class Case(NamedTuple):
    """Attention of one query number over tokens of one number each; the scores are `q * keys + mask`."""

    q: float
    keys: list[float]
    values: list[float]
    expected: float
    mask: list[float] | None = None

    def result(self, rounding: Rounding) -> float:
        def column(numbers: list[float]) -> NDArray[np.float16]:
            return np.array(numbers, np.float16).reshape(1, -1, 1)

        mask = column(self.mask or [0] * len(self.keys)).swapaxes(1, 2)
        return float(attention(column([self.q]), column(self.keys), column(self.values), mask, rounding)[0, 0, 0])


def half(number: float) -> float:
    return float(np.float16(number))


NEAR_ONE = 1 + 77 / 1024
WEIGHT = half(np.exp(-half(4 - NEAR_ONE)))


# Each expectation is worked out by hand.
@pytest.mark.parametrize(
    ("rounding", "case"),
    [
        # Scores 2049 and 2047.5 are both ties of fp16 and become 2048, so that the two tokens weigh the same.
        ("op", Case(1.5, [1366, 1365], [1, 0], 0.5)),
        ("output", Case(1.5, [1366, 1365], [1, 0], 1 / (1 + np.exp(-1.5)))),
        # A score beyond 65504 is infinite, and infinity less itself is NaN. To float32 it is just a large score.
        ("op", Case(300.0, [300, 1], [1, 0], np.nan)),
        ("output", Case(300.0, [300, 1], [1, 0], 1.0)),
        # A masked token loses, unless its score beats the mask: why a tail must be zero.
        ("op", Case(1.0, [1, 0], [0, 7], 0.0, mask=[0, -1e4])),
        ("output", Case(1.0, [1, 30000], [0, 7], 7.0, mask=[0, -1e4])),
        # The difference of the scores is a tie; it, the exponential, the sum, the quotient and the product are rounded
        # one after the other. The numbers are chosen such that leaving out any of these changes the result.
        ("op", Case(1.0, [4, NEAR_ONE], [0, 3], half(3 * half(WEIGHT / half(1 + WEIGHT))))),
        ("output", Case(1.0, [4, NEAR_ONE], [0, 3], 3 / (1 + np.exp(4 - NEAR_ONE)))),
        # exp(-18) = 1.5e-8 is less than half of the least fp16, 6.0e-8: its token vanishes.
        ("op", Case(1.0, [18, 0], [0, 65504], 0.0)),
        ("output", Case(1.0, [18, 0], [0, 65504], 65504 * np.exp(-18.0))),
        # The largest fp16 survives its weights of 1/2, and infinity is not clamped to it.
        ("op", Case(0.0, [0, 0], [65504, 65504], 65504.0)),
        ("op", Case(0.0, [0, 0], [np.inf, 1], np.inf)),
        ("output", Case(0.0, [0, 0], [np.inf, -np.inf], np.nan)),
    ],
)
def test_each_operation_rounds_as_its_mode_says(rounding: Rounding, case: Case) -> None:
    np.testing.assert_equal(case.result(rounding), half(case.expected))


@given(seed=st.integers(0, 2**32 - 1), rounding=st.sampled_from(get_args(Rounding)))
def test_a_sequences_result_does_not_depend_on_its_neighbours(seed: int, rounding: Rounding) -> None:
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> NDArray[np.float16]:
        return rng.standard_normal(shape).astype(np.float16)

    batch, heads, rows, tokens, head_dim = 3, 2, 4, 16, 8
    q, k, v = noise(batch * heads, rows, head_dim), noise(batch * heads, tokens, head_dim), noise(6, tokens, head_dim)
    mask = np.where(rng.random((batch, rows, tokens)) < 0.5, MASKED, np.float16(0))
    mask[:, :, 0] = 0
    together = attention(q, k, v, mask, rounding)
    for i in range(batch):
        own = slice(i * heads, (i + 1) * heads)
        alone = attention(q[own], k[own], v[own], mask[i : i + 1], rounding)
        np.testing.assert_array_equal(together[own], alone)

"""The C attention kernel through its runtime: numbers, identity of bits, and what it must never read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry
from npu.attention import AttentionBatch
from npu.cpu import CpuAttention
from tests.npu.paged import PagedMemory, batch_of, reference


def runs_here(isa: str) -> bool:
    """Whether this machine runs the kernel for `isa`."""
    try:
        CpuAttention(PagedMemory(KVGeometry(1, 1, 16), 1), 1, isa=isa).close()
    except UsageError:
        return False
    return True


ISAS = [isa for isa in ("plain", "avx2", "avx512", "neon") if runs_here(isa)]

# With K and V of standard deviation 1 a score is off by about |score| * 2^-23 * a few, so are the weights, and
# so is a weighted mean of V: some 1e-6 at the |score| and |V| of 5 that such data reaches.
TOLERANCE = 5e-6


def attend(
    memory: PagedMemory,
    batch: AttentionBatch,
    q: NDArray[np.float32],
    *,
    layer: int = 0,
    threads: int = 1,
    isa: str = "auto",
) -> NDArray[np.float32]:
    if isa == "avx512" and q.shape[2] % 16:
        isa = "auto"  # it takes whole vectors alone
    runtime = CpuAttention(memory, q.shape[1], threads, isa=isa)
    out = np.full_like(q, np.nan)
    runtime.begin_step(batch)
    runtime.attend(layer, q, out)
    runtime.end_step()
    runtime.close()
    return out


@st.composite
def scenes(draw: st.DrawFn) -> tuple[PagedMemory, int, AttentionBatch, NDArray[np.float32]]:
    """A cache, a layer, a batch with contexts around block edges that may share a prefix, and queries."""
    geometry = KVGeometry(
        layers=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 16, 24, 40, 64, 72, 128, 256])),
        block_tokens=draw(st.sampled_from([16, 16, 16, 1, 5, 40])),
    )
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 9, 25]))
    edges = st.builds(lambda blocks, delta: max(0, 16 * blocks + delta), st.integers(0, 4), st.integers(-1, 1))
    context_lens = draw(st.lists(edges, min_size=1, max_size=4))
    rows = [draw(st.integers(0, min(context, 20))) for context in context_lens]

    blocks = 3 + sum(map(geometry.blocks_for, context_lens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = rng.permutation(blocks).tolist()
    memory = PagedMemory(geometry, blocks)
    tables: list[list[int]] = []
    for context in context_lens:
        table = [ids.pop() for _ in range(geometry.blocks_for(context))]
        memory.fill(table, context, rng)
        if draw(st.booleans()) and tables:
            shared = min(context, context_lens[0]) // geometry.block_tokens
            table = tables[0][:shared] + table[shared:]
        tables.append(table)
    batch = batch_of(tables, context_lens, rows)
    q = rng.standard_normal((batch.rows, geometry.kv_heads * group, geometry.head_dim)).astype(np.float32)
    return memory, draw(st.integers(0, geometry.layers - 1)), batch, q


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=60)
@given(scene=scenes())
def test_matches_float64_over_any_shape_and_table(
    isa: str, scene: tuple[PagedMemory, int, AttentionBatch, NDArray[np.float32]]
) -> None:
    memory, layer, batch, q = scene
    # Every slot nobody wrote holds NaN, and padding ids are -1: reading either could not pass.
    out = attend(memory, batch, q, layer=layer, isa=isa)
    np.testing.assert_allclose(out, reference(memory, layer, batch, q), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def prompt() -> tuple[PagedMemory, list[int], NDArray[np.float32]]:
    """A prompt of 150 tokens in scattered blocks, and its queries: 2 KV heads, groups of 3."""
    rng = np.random.default_rng(11)
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=2, head_dim=64), 16)
    table = rng.permutation(16)[:10].tolist()
    memory.fill(table, 150, rng)
    return memory, table, rng.standard_normal((150, 6, 64)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_do_not_change_a_bit(
    prompt: tuple[PagedMemory, list[int], NDArray[np.float32]], chunk: int, isa: str
) -> None:
    memory, table, q = prompt
    whole = attend(memory, batch_of([table], [150], [150]), q, isa=isa)
    for start in range(0, 150, chunk):
        end = min(start + chunk, 150)
        part = attend(memory, batch_of([table], [end], [end - start]), q[start:end], isa=isa)
        np.testing.assert_array_equal(part, whole[start:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_company_and_threads_do_not_change_a_bit(
    prompt: tuple[PagedMemory, list[int], NDArray[np.float32]], threads: int, isa: str
) -> None:
    memory, table, q = prompt
    whole = attend(memory, batch_of([table], [150], [150]), q, isa=isa)
    # Decode, a prefill chunk, an idle sequence and a short one, over the same blocks.
    context_lens, rows = [150, 70, 33, 5], [1, 40, 0, 5]
    picked = [q[context - count : context] for context, count in zip(context_lens, rows, strict=True)]
    expected = [whole[context - count : context] for context, count in zip(context_lens, rows, strict=True)]
    batch = batch_of([table] * 4, context_lens, rows)
    together = attend(memory, batch, np.concatenate(picked), threads=threads, isa=isa)
    np.testing.assert_array_equal(together, np.concatenate(expected))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_slots_that_a_row_may_not_see_do_not_matter(poison: float, isa: str) -> None:
    rng = np.random.default_rng(5)
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=16), 4)
    memory.fill([2, 0], 21, rng)
    batch = batch_of([[2, 0]], [21], [21])
    q = rng.standard_normal((21, 4, 16)).astype(np.float32)

    memory.view[np.isnan(memory.view)] = 0
    clean = attend(memory, batch, q, isa=isa)
    memory.view[[1, 3]] = poison  # blocks of nobody
    memory.view[0, :, :, :, 5:] = poison  # behind the context
    np.testing.assert_array_equal(attend(memory, batch, q, isa=isa), clean)

    memory.view[0, :, :, :, 4] = poison  # the last token: only the last row sees it
    seen = attend(memory, batch, q, isa=isa)
    np.testing.assert_array_equal(seen[:20], clean[:20])
    assert not np.isfinite(seen[20]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_equal_scores_give_the_mean_of_the_values(isa: str) -> None:
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=8), 3)
    memory.view[:, 0, 0] = 1
    memory.view[:, 0, 1, 0] = np.arange(48, dtype=np.float16).reshape(3, 16, 1)
    for query in (0.0, 3e5, -3e5):  # every score is 8 * query / sqrt(8): e to that would overflow or vanish
        q = np.full((40, 1, 8), query, np.float32)
        out = attend(memory, batch_of([[0, 1, 2]], [40], [40]), q, isa=isa)
        np.testing.assert_allclose(out[:, 0, 0], np.arange(40) / 2, rtol=3e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("order", [1, -1])
def test_a_score_far_above_the_others_takes_all(order: int, isa: str) -> None:
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=8), 3)
    tokens = np.arange(48, dtype=np.float16)[::order].reshape(3, 16, 1)  # rising: the highest changes at every token
    memory.view[:, 0, 0, 0] = tokens * 1000
    memory.view[:, 0, 1, 0] = tokens
    out = attend(memory, batch_of([[0, 1, 2]], [48], [48]), np.full((48, 1, 8), 1e6, np.float32), isa=isa)
    expected = np.arange(48) if order == 1 else np.full(48, 47)
    np.testing.assert_array_equal(out[:, 0], np.repeat(expected[:, np.newaxis], 8, 1))


@pytest.mark.parametrize("isa", ISAS)
def test_the_exponential_is_accurate_down_to_nothing(isa: str) -> None:
    # Two tokens with scores 0 and x and values 0 and 1: the result is e^x / (1 + e^x).
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=8), 1)
    memory.view[...] = 0
    memory.view[0, 0, 0, 0, 1, 0] = 1
    memory.view[0, 0, 1, 0, 1] = 1
    q = np.zeros((2, 500, 8), np.float32)
    q[1, :, 0] = np.linspace(-86, 0, 500) * np.sqrt(8)
    out = attend(memory, batch_of([[0]], [2], [2]), q, isa=isa)[1, :, 0]

    x = q[1, :, 0].astype(np.float64) / np.sqrt(8)
    expected = np.exp(x) / (1 + np.exp(x))
    # The scale, log2(e) and their product with x round three times, which moves e^x by |x| * 3 * 2^-24.
    allowed = expected * (3e-7 + np.abs(x) * 3 * 2**-24)
    assert (np.abs(out - expected) <= allowed).all()

    q[1, :, 0] = -1e30
    assert not attend(memory, batch_of([[0]], [2], [2]), q, isa=isa)[1].any()


def test_what_begin_step_was_given_may_change_afterwards(
    prompt: tuple[PagedMemory, list[int], NDArray[np.float32]],
) -> None:
    memory, table, q = prompt
    batch = batch_of([table], [150], [150])
    expected = attend(memory, batch, q)
    runtime, out = CpuAttention(memory, 6), np.empty_like(q)
    runtime.begin_step(batch)
    for array in (batch.query_starts, batch.context_lens, batch.tables):
        array[...] = 1 << 30
    runtime.attend(0, q, out)
    np.testing.assert_array_equal(out, expected)
    runtime.close()


def test_runtimes_over_one_cache_run_side_by_side(prompt: tuple[PagedMemory, list[int], NDArray[np.float32]]) -> None:
    memory, table, q = prompt
    expected = attend(memory, batch_of([table], [150], [150]), q)

    def agrees(_: int) -> bool:
        return np.array_equal(attend(memory, batch_of([table], [150], [150]), q, threads=2), expected)

    with ThreadPoolExecutor(3) as workers:
        assert list(workers.map(agrees, range(30))) == [True] * 30


def test_helpers_sleep_between_calls_and_leave_at_close(
    prompt: tuple[PagedMemory, list[int], NDArray[np.float32]],
) -> None:
    memory, table, q = prompt
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    runtime = CpuAttention(memory, 6, threads=3)
    helpers = set(tasks.iterdir()) - before
    assert len(helpers) == 2
    runtime.begin_step(batch_of([table], [150], [150]))
    runtime.attend(0, q, np.empty_like(q))
    used = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - used < 0.05  # one spinning helper alone would use 0.1
    runtime.close()
    deadline = time.monotonic() + 5  # the kernel may list a joined thread for a moment longer
    while helpers & set(tasks.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not helpers & set(tasks.iterdir())


GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16)
GOOD = batch_of([[0, 1], [2]], [17, 3], [2, 3])


@pytest.fixture
def runtime() -> CpuAttention:
    return CpuAttention(PagedMemory(GEOMETRY, 4), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": np.array([[0, 4], [2, -1]], np.int32)}, "block 4 at position 1"),
        ({"tables": np.array([[0, -1], [2, -1]], np.int32)}, "block -1 at position 1"),
        ({"tables": np.array([[0], [2]], np.int32)}, "sequence 0 needs 2 blocks for 17 tokens"),
        ({"tables": np.array([[0, 1]], np.int32)}, "got 3 and 1"),
        ({"tables": np.array([0, 1], np.int32)}, "tables must be int32 with 2 dimension"),
        ({"tables": np.array([[0, 1], [2, 0]])}, "tables must be int32.*got int64"),
        ({"query_starts": np.array([0, 2], np.int32)}, "got 2 and 2"),
        ({"query_starts": np.array([1, 2, 5], np.int32)}, "rise from 0"),
        ({"query_starts": np.array([0, 5, 3], np.int32)}, "rise from 0"),
        ({"query_starts": np.array([0, 2, 6], np.int32)}, "sequence 1 has 4 query rows but a context of 3"),
        ({"context_lens": np.array([17, -3], np.int32)}, "sequence 1 has 3 query rows but a context of -3"),
        ({"context_lens": np.array([17, 49], np.int32)}, "sequence 1 needs 4 blocks"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(runtime: CpuAttention, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runtime.begin_step(replace(GOOD, **change))
    runtime.begin_step(GOOD)  # nothing of the refused step stuck
    runtime.close()


@pytest.mark.parametrize(
    "operand",
    [
        np.zeros((4, 4, 16), np.float32),
        np.zeros((5, 2, 16), np.float32),
        np.zeros((5, 64), np.float32),
        np.zeros((5, 4, 16), np.float64),
        np.zeros((5, 4, 32), np.float32)[:, :, ::2],
    ],
    ids=["rows", "heads", "flat", "dtype", "strided"],
)
def test_an_operand_that_does_not_fit_is_refused(runtime: CpuAttention, operand: NDArray[np.float32]) -> None:
    good = np.zeros((5, 4, 16), np.float32)
    runtime.begin_step(GOOD)
    with pytest.raises(UsageError, match=r"q must be C-contiguous float32 \(5, 4, 16\)") as error:
        runtime.attend(0, operand, good)
    assert error.value.values["expected"] == (5, 4, 16)
    with pytest.raises(UsageError, match="out must be"):
        runtime.attend(0, good, operand)
    runtime.end_step()
    runtime.close()


def test_an_output_that_is_read_only_is_refused(runtime: CpuAttention) -> None:
    q = np.zeros((5, 4, 16), np.float32)
    frozen = q.copy()
    frozen.flags.writeable = False
    runtime.begin_step(GOOD)
    with pytest.raises(UsageError, match="out is read-only"):
        runtime.attend(0, q, frozen)
    runtime.close()


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_the_model_is_refused(runtime: CpuAttention, layer: int) -> None:
    q = np.zeros((5, 4, 16), np.float32)
    runtime.begin_step(GOOD)
    with pytest.raises(UsageError, match=rf"layer {layer} is not in 0\.\.1"):
        runtime.attend(layer, q, q)
    runtime.close()


def test_calls_out_of_order_are_refused(runtime: CpuAttention) -> None:
    q = np.zeros((5, 4, 16), np.float32)
    with pytest.raises(UsageError, match="call begin_step first"):
        runtime.attend(0, q, q)
    runtime.begin_step(GOOD)
    with pytest.raises(UsageError, match="call end_step first"):
        runtime.begin_step(GOOD)
    runtime.end_step()
    runtime.end_step()
    with pytest.raises(UsageError, match="call begin_step first"):
        runtime.attend(0, q, q)

    runtime.close()
    runtime.close()
    with pytest.raises(UsageError, match="closed"):
        runtime.begin_step(GOOD)
    with pytest.raises(UsageError, match="closed"):
        runtime.attend(0, q, q)
    with pytest.raises(UsageError, match="closed"):
        runtime.end_step()


@pytest.mark.parametrize(
    ("geometry", "heads", "message"),
    [
        (KVGeometry(1, 2, 16), 3, "3 query heads are not a multiple of 2"),
        (KVGeometry(1, 2, 16), 0, "0 query heads"),
        (KVGeometry(1, 1, 12), 1, "head_dim 12"),
        (KVGeometry(1, 1, 264), 1, "head_dim 264"),
        (KVGeometry(1, 1, 16, itemsize=1), 1, "itemsize 1"),
    ],
)
def test_a_geometry_without_a_kernel_is_refused(geometry: KVGeometry, heads: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CpuAttention(PagedMemory(geometry, 1), heads)


def test_threads_and_isa_that_the_machine_cannot_give_are_refused() -> None:
    memory = PagedMemory(GEOMETRY, 1)
    for threads in (0, -1, 1 << 40):
        with pytest.raises(UsageError, match=f"got {threads}"):
            CpuAttention(memory, 4, threads)
    with pytest.raises(UsageError, match='isa "avx9" does not run on this machine'):
        CpuAttention(memory, 4, isa="avx9")


def test_an_empty_batch_is_a_step_of_nothing() -> None:
    memory = PagedMemory(GEOMETRY, 4)
    memory.fill([0, 1], 17, np.random.default_rng(1))
    nothing, out = np.zeros((0, 4, 16), np.float32), np.empty((1, 4, 16), np.float32)
    runtime = CpuAttention(memory, 4)
    for batch, target in ((batch_of([], [], []), nothing), (batch_of([[0, 1]], [17], [1]), out)):
        runtime.begin_step(batch)
        runtime.attend(0, np.ones_like(target), target)
        runtime.end_step()
    runtime.close()
    expected = reference(memory, 0, batch_of([[0, 1]], [17], [1]), np.ones_like(out))
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE)

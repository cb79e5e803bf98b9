"""Windows and sinks in the C attention kernel: exact by token, whatever is hidden, dropped, or beside them."""

from __future__ import annotations

import time
from dataclasses import replace
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
from tests.npu.paged import PagedMemory, batch_of, reference, seen_by
from tests.npu.test_cpu_attention import ISAS, TOLERANCE, attend

GEOMETRY = KVGeometry(layers=1, kv_heads=2, head_dim=16)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[PagedMemory, AttentionBatch, NDArray[np.float32]]:
    """Sequences with windows and sinks around block edges; what no row sees holds NaN or infinity."""
    geometry = KVGeometry(
        layers=1,
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([8, 24, 64])),
        block_tokens=draw(st.sampled_from([16, 16, 16, 1, 5, 40])),
    )
    edges = st.builds(lambda blocks, delta: max(0, 16 * blocks + delta), st.integers(0, 5), st.integers(-1, 1))
    lengths = draw(st.lists(edges, min_size=1, max_size=3))
    rows = [draw(st.integers(0, min(length, 40))) for length in lengths]
    windows = [draw(st.one_of(edges, st.integers(0, 100), st.just(2**31 - 1))) for _ in lengths]
    sinks = [draw(st.one_of(edges, st.integers(0, 100), st.just(2**31 - 1))) for _ in lengths]

    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    poison = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    blocks = 1 + sum(map(geometry.blocks_for, lengths))
    ids = rng.permutation(blocks).tolist()
    memory = PagedMemory(geometry, blocks)
    tables: list[list[int]] = []
    for length, count, window, sink in zip(lengths, rows, windows, sinks, strict=True):
        table = [ids.pop() for _ in range(geometry.blocks_for(length))]
        memory.fill(table, length, rng)
        seen = {token for row in range(length - count, length) for token in seen_by(row, window, sink)}
        for token in set(range(length)) - seen:
            memory.view[table[token // geometry.block_tokens], ..., token % geometry.block_tokens, :] = poison
        tables.append(table)
    batch = batch_of(tables, lengths, rows, windows=windows, sinks=sinks)
    heads = geometry.kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7]))
    return memory, batch, rng.standard_normal((batch.rows, heads, geometry.head_dim)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=100)
@given(scene=scenes())
def test_matches_float64_over_any_window(
    isa: str, scene: tuple[PagedMemory, AttentionBatch, NDArray[np.float32]]
) -> None:
    memory, batch, q = scene
    with np.errstate(invalid="ignore"):  # the oracle computes with what is hidden, and drops it
        expected = reference(memory, 0, batch, q)
    np.testing.assert_allclose(attend(memory, batch, q, isa=isa), expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def prompt() -> tuple[PagedMemory, list[int], NDArray[np.float32]]:
    """150 tokens in scattered blocks, and their queries: 2 KV heads, groups of 3."""
    rng = np.random.default_rng(11)
    memory = PagedMemory(GEOMETRY, 16)
    table = rng.permutation(16)[:10].tolist()
    memory.fill(table, 150, rng)
    return memory, table, rng.standard_normal((150, 6, 16)).astype(np.float32)


Prompt = tuple[PagedMemory, list[int], NDArray[np.float32]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (16, 0), (33, 4), (40, 21), (64, 16)])
def test_rows_that_see_everything_have_the_bits_they_have_without_a_window(
    prompt: Prompt, window: int, sinks: int, isa: str
) -> None:
    memory, table, q = prompt
    everything = attend(memory, batch_of([table], [150], [150]), q, isa=isa)
    windowed = attend(memory, batch_of([table], [150], [150], windows=[window], sinks=[sinks]), q, isa=isa)
    same = (windowed == everything).all(axis=(1, 2))
    # The row at p sees all of 0..p where its window begins at the sinks' end or before.
    np.testing.assert_array_equal(same, np.arange(150) - window + 1 <= sinks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_company_and_threads_do_not_change_a_bit(prompt: Prompt, chunk: int, isa: str) -> None:
    memory, table, q = prompt
    whole = attend(memory, batch_of([table], [150], [150], windows=[37], sinks=[5]), q, isa=isa)
    for start in range(0, 150, chunk):
        end = min(start + chunk, 150)
        batch = batch_of([table] * 2, [end] * 2, [end - start] * 2, windows=[0, 37], sinks=[3, 5])
        part = attend(memory, batch, np.concatenate([q[start:end]] * 2), threads=3, isa=isa)
        np.testing.assert_array_equal(part[end - start :], whole[start:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "sinks"), [(37, 0), (37, 5), (32, 16), (20, 33)])
def test_a_table_that_let_go_of_hidden_blocks_gives_the_same_bits(
    prompt: Prompt, window: int, sinks: int, isa: str
) -> None:
    memory, table, q = prompt
    for position in (99, 127, 128, 149):
        whole = batch_of([table], [position + 1], [1], windows=[window], sinks=[sinks])
        kept, gone = -(-sinks // 16), (position - window + 1) // 16
        gap = 16 * (gone - kept)
        shorter = batch_of([table[:kept] + table[gone:]], [position + 1 - gap], [1], windows=[window], sinks=[sinks])
        assert gap > 0
        row = q[position : position + 1]
        np.testing.assert_array_equal(attend(memory, shorter, row, isa=isa), attend(memory, whole, row, isa=isa))


def test_a_row_costs_what_it_sees_and_not_what_its_context_holds() -> None:
    """A window of 512 over 4096 tokens against 512 tokens: reading all would take eight times as long."""
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=2, head_dim=64), 256)
    memory.view[...] = 1
    table, q = list(range(256)), np.ones((1, 6, 64), np.float32)
    batches = batch_of([table], [4096], [1], windows=[512], sinks=[4]), batch_of([table], [512], [1])
    out, best = np.empty_like(q), [float("inf")] * 2
    runtime = CpuAttention(memory, 6)
    for _ in range(50):  # in turn, so that other work on the machine slows both
        for which, batch in enumerate(batches):
            runtime.begin_step(batch)
            started = time.perf_counter()
            runtime.attend(0, q, out)
            best[which] = min(best[which], time.perf_counter() - started)
            runtime.end_step()
    runtime.close()
    assert best[0] < 2 * best[1]


def test_each_layer_has_the_narrower_of_its_window_and_the_sequences() -> None:
    rng = np.random.default_rng(3)
    geometry = KVGeometry(layers=3, kv_heads=1, head_dim=16)
    memory = PagedMemory(geometry, 8)
    tables = [[0, 1, 2], [3, 4, 5]]
    for table in tables:
        memory.fill(table, 48, rng)
    q = rng.standard_normal((4, 2, 16)).astype(np.float32)
    batch = batch_of(tables, [48, 48], [2, 2], windows=[0, 20], sinks=[0, 3])
    runtime = CpuAttention(memory, 2, windows=(0, 16, 30))
    runtime.begin_step(batch)
    for layer, windows in enumerate(([0, 20], [16, 16], [30, 20])):
        out = np.empty_like(q)
        runtime.attend(layer, q, out)
        expected = reference(memory, layer, replace(batch, windows=np.array(windows, np.int32)), q)
        np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE)
    runtime.end_step()
    runtime.close()


def test_windows_may_change_behind_a_step_that_has_begun(prompt: Prompt) -> None:
    memory, table, q = prompt
    batch = batch_of([table], [150], [150], windows=[37], sinks=[5])
    expected = attend(memory, batch, q)
    runtime, out = CpuAttention(memory, 6), np.empty_like(q)
    runtime.begin_step(batch)
    assert batch.windows is not None
    assert batch.sinks is not None
    batch.windows[:], batch.sinks[:] = 1, 0
    runtime.attend(0, q, out)
    np.testing.assert_array_equal(out, expected)
    runtime.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": np.array([16, -1], np.int32)}, r"windows\[1\] is -1: it counts tokens"),
        ({"sinks": np.array([-4, 0], np.int32)}, r"sinks\[0\] is -4"),
        ({"windows": np.array([16], np.int32)}, "2 sequences want as many windows, got 1"),
        ({"sinks": np.array([1, 2, 3], np.int32)}, "2 sequences want as many sinks, got 3"),
        ({"windows": np.array([16, 16])}, "windows must be int32.*got int64"),
        ({"sinks": np.zeros((2, 1), np.int32)}, "sinks must be int32 with 1 dimension"),
    ],
)
def test_windows_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    runtime = CpuAttention(PagedMemory(GEOMETRY, 4), 2)
    batch = batch_of([[0, 1], [2]], [17, 3], [2, 3])
    with pytest.raises(UsageError, match=message):
        runtime.begin_step(replace(batch, **change))
    runtime.begin_step(batch)  # nothing of the refused step stuck
    runtime.close()


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((16, 16), "2 windows for 1 layers"),
        ((-1,), "layer 0 has a window of -1"),
        ((1 << 31,), "layer 0 has a window of 2147483648"),
    ],
)
def test_layers_windows_that_do_not_fit_are_refused(windows: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CpuAttention(PagedMemory(GEOMETRY, 4), 2, windows=windows)

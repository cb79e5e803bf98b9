"""int8 and int4 blocks in the C attention kernel: beside float64, beside each other, and what it must never read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry
from npu._attention import ffi, lib
from npu.attention import AttentionBatch
from npu.cpu import CpuAttention
from tests.npu.paged import PagedMemory, batch_of, reference
from tests.npu.test_cpu_attention import ISAS, attend

# K and V have a standard deviation of about 1 and queries up to 4.5. As int16 a query is off by 4.5 / 65534, so a score
# by the root of head_dim times that, by sqrt(head_dim): some 1e-4 where all 256 err alike; and a weight by 1 / 65534 of
# the largest of its 16, of a V of at most 2.5.
TOLERANCE = 5e-4

SCALED = (INT8, INT4)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[PagedMemory, int, AttentionBatch, NDArray[np.float32]]:
    """A cache, a layer, sequences of any codecs, with contexts around block edges, windows and sinks, and queries."""
    geometry = KVGeometry(
        layers=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 16, 24, 32, 64, 80, 96, 128, 256])),
        block_tokens=draw(st.sampled_from([16, 16, 16, 5, 40])),
    )
    edges = st.builds(lambda blocks, delta: max(0, 16 * blocks + delta), st.integers(0, 5), st.integers(-1, 1))
    lengths = draw(st.lists(edges, min_size=1, max_size=4))
    rows = [draw(st.integers(0, min(length, 20))) for length in lengths]
    codecs = [draw(st.sampled_from(list(CODECS.values()))) for _ in lengths]
    windowed = draw(st.booleans())
    windows, sinks = ([draw(edges) for _ in lengths] if windowed else None for _ in range(2))

    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    extents = 1 + sum(map(geometry.blocks_for, lengths))
    memory = PagedMemory(geometry, 4 * extents, INT4)
    starts = [4 * extent for extent in rng.permutation(extents).tolist()]
    tables = []
    for length, codec in zip(lengths, codecs, strict=True):
        places = [
            starts.pop() + memory.span(codec) * int(rng.integers(codec.blocks_per_extent))
            for _ in range(geometry.blocks_for(length))
        ]
        memory.fill(places, length, rng, codec)
        tables.append(places)
    batch = batch_of(tables, lengths, rows, windows=windows, sinks=sinks, codecs=codecs)
    heads = geometry.kv_heads * draw(st.sampled_from([1, 2, 3, 6, 7, 25]))
    q = rng.standard_normal((batch.rows, heads, geometry.head_dim)).astype(np.float32)
    return memory, draw(st.integers(0, geometry.layers - 1)), batch, q


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=60)
@given(scene=scenes())
def test_matches_float64_over_any_codecs_and_windows(
    isa: str, scene: tuple[PagedMemory, int, AttentionBatch, NDArray[np.float32]]
) -> None:
    memory, layer, batch, q = scene
    # Scales that nobody wrote are NaN, and so are codes as fp16.
    out = attend(memory, batch, q, layer=layer, isa=isa)
    np.testing.assert_allclose(out, reference(memory, layer, batch, q), rtol=0, atol=TOLERANCE)


LONG = 1300
"""Tokens: two segments and a part of one."""


def prompt(codec: Codec, kv_heads: int = 2, group: int = 3) -> tuple[PagedMemory, list[int], NDArray[np.float32]]:
    """Tokens in scattered blocks, and the queries of the last 40."""
    rng = np.random.default_rng(11)
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=kv_heads, head_dim=32), 4 * 90, INT4)
    table = (rng.permutation(90)[: -(-LONG // 16)] * 4).tolist()
    memory.fill(table, LONG, rng, codec)
    return memory, table, rng.standard_normal((40, kv_heads * group, 32)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (1100, 20), (700, 0)])
def test_chunks_company_and_threads_do_not_change_a_bit(isa: str, codec: Codec, window: int, sinks: int) -> None:
    """Alone and on several threads each segment of a single token is a unit of work of its own."""
    memory, table, q = prompt(codec)
    more: dict[str, Any] = {"windows": [window], "sinks": [sinks], "codecs": [codec]}
    whole = attend(memory, batch_of([table], [LONG], [40], **more), q, isa=isa)
    expected = reference(memory, 0, batch_of([table], [LONG], [40], **more), q)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=TOLERANCE)
    several = 3  # sequences: enough work that all threads are woken
    for row in range(40):
        end = LONG - 39 + row
        batch = batch_of(
            [table] * several, [end, 20, end], [1] * several, **{key: value * several for key, value in more.items()}
        )
        rows = np.concatenate([q[row : row + 1], q[:1], q[row : row + 1]])
        for threads in (1, 2, 3) if row in (0, 39) else (1,):
            out = attend(memory, batch, rows, threads=threads, isa=isa)
            np.testing.assert_array_equal(out[[0, 2]], whole[[row, row]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize(("kv_heads", "group"), [(7, 4), (5, 9), (1, 25), (26, 1)])
def test_heads_that_go_together_are_as_they_are_apart(isa: str, codec: Codec, kv_heads: int, group: int) -> None:
    """Of a single token a unit of work takes up to 24 rows of several KV heads; of two tokens, one head's."""
    memory, table, q = prompt(codec, kv_heads, group)
    apart = attend(memory, batch_of([table], [LONG], [2], codecs=[codec]), q[:2], isa=isa)
    for threads in (1, 2):  # the latter for each segment
        batch = batch_of([table] * 3, [LONG, LONG - 1, LONG], [1] * 3, codecs=[codec] * 3)
        together = attend(memory, batch, q[[1, 0, 1]], threads=threads, isa=isa)
        np.testing.assert_array_equal(together, apart[[1, 0, 1]])


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_a_runtime_merges_segments_as_often_as_it_is_asked(codec: Codec) -> None:
    memory, table, q = prompt(codec)
    batch = batch_of([table] * 3, [LONG] * 3, [1] * 3, codecs=[codec] * 3)
    expected = attend(memory, batch, q[:3])
    runtime, out = CpuAttention(memory, 6, threads=3), np.empty_like(q[:3])
    runtime.begin_step(batch)
    for _ in range(20):
        out[...] = np.nan
        runtime.attend(0, q[:3], out)
        np.testing.assert_array_equal(out, expected)
    runtime.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_segments_do_not_move_when_hidden_blocks_are_dropped(isa: str, codec: Codec, threads: int) -> None:
    memory, table, q = prompt(codec)
    window, sinks = 1000, 20
    kept, gone = 2, (LONG - window) // 16
    gap = 16 * (gone - kept)
    more: dict[str, Any] = {"windows": [window], "sinks": [sinks], "codecs": [codec]}
    more = {key: value * 3 for key, value in more.items()}  # enough work that all threads are woken
    last = np.repeat(q[-1:], 3, axis=0)
    whole = attend(memory, batch_of([table] * 3, [LONG] * 3, [1] * 3, **more), last, threads=threads, isa=isa)
    shorter = batch_of([table[:kept] + table[gone:]] * 3, [LONG - gap] * 3, [1] * 3, **more)
    np.testing.assert_array_equal(attend(memory, shorter, last, isa=isa), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", SCALED, ids=["int8", "int4"])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_scales_that_a_row_may_not_see_do_not_matter(isa: str, codec: Codec, head_dim: int, poison: float) -> None:
    rng = np.random.default_rng(5)
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=head_dim), 4, INT4)
    step = memory.span(codec)
    table = [0, step]
    memory.fill(table, 21, rng, codec)
    batch = batch_of([table], [21], [21], codecs=[codec])
    q = rng.standard_normal((21, 4, head_dim)).astype(np.float32)

    codes, scales = memory.rows(step, codec)
    codes[..., 5:, :], scales[..., 5:, :] = 0, 0
    clean = attend(memory, batch, q, isa=isa)
    codes[..., 5:, :], scales[..., 5:, :] = 0xFF, poison  # behind the context
    np.testing.assert_array_equal(attend(memory, batch, q, isa=isa), clean)

    for side in (0, 1):  # the last token's K, then its V: only the last row sees it
        kept = scales[:, side, :, 4].copy()
        scales[:, side, :, 4] = poison
        seen = attend(memory, batch, q, isa=isa)
        np.testing.assert_array_equal(seen[:20], clean[:20])
        assert not np.isfinite(seen[20]).any()
        scales[:, side, :, 4] = kept


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", SCALED, ids=["int8", "int4"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_query_breaks_its_own_row_alone(isa: str, codec: Codec, poison: float) -> None:
    rng = np.random.default_rng(6)
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=64), 8, INT4)
    memory.fill([0, 4], 30, rng, codec)
    batch = batch_of([[0, 4]], [30], [3], codecs=[codec])
    q = rng.standard_normal((3, 2, 64)).astype(np.float32)
    clean = attend(memory, batch, q, isa=isa)
    q[1, 0, 7] = poison
    broken = attend(memory, batch, q, isa=isa)
    assert not np.isfinite(broken[1, 0]).any()
    broken[1, 0] = clean[1, 0]
    np.testing.assert_array_equal(broken, clean)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", SCALED, ids=["int8", "int4"])
def test_queries_and_scales_of_zero_give_the_mean_and_zero(isa: str, codec: Codec) -> None:
    memory = PagedMemory(KVGeometry(layers=1, kv_heads=1, head_dim=32), 4, INT4)
    memory.fill([0], 16, np.random.default_rng(7), codec)
    batch = batch_of([[0]], [16], [1], codecs=[codec])
    q = np.zeros((1, 1, 32), np.float32)
    mean = memory.sequence(0, np.array([0], np.int32), 16, codec)[1, 0].mean(axis=0)
    np.testing.assert_allclose(attend(memory, batch, q, isa=isa)[0, 0], mean, rtol=0, atol=TOLERANCE)
    memory.rows(0, codec)[1][:, 1] = 0
    assert not attend(memory, batch, q, isa=isa).any()


GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codecs": np.array([2], np.int64)}, r"codecs must be uint8 \(1,\), got int64"),
        ({"codecs": np.array([2, 2], np.uint8)}, r"codecs must be uint8 \(1,\), got uint8 \(2,\)"),
        ({"codecs": np.array([3], np.uint8)}, r"codec number 3.*numbers \[0, 1, 2\]"),
        ({"codecs": np.array([1], np.uint8), "tables": np.array([[3]], np.int32)}, r"block 3.*0\.\.6 in steps of 2"),
        ({"codecs": None, "tables": np.array([[2]], np.int32)}, r"block 2.*0\.\.4 in steps of 4"),
        ({"tables": np.array([[8]], np.int32)}, r"block 8 .*0\.\.7$"),
        ({"tables": np.array([[-4]], np.int32)}, "block -4"),
    ],
)
def test_blocks_that_no_codec_has_are_refused(change: dict[str, Any], message: str) -> None:
    good = batch_of([[7]], [16], [1], codecs=[INT4])
    runtime = CpuAttention(PagedMemory(GEOMETRY, 8, INT4), 1)
    with pytest.raises(UsageError, match=message):
        runtime.begin_step(replace(good, **change))
    runtime.begin_step(good)
    runtime.close()


def test_a_block_that_sticks_out_of_the_pool_is_refused() -> None:
    runtime = CpuAttention(PagedMemory(GEOMETRY, 6, INT4), 1)
    with pytest.raises(UsageError, match=r"block 4 .*0\.\.2 in steps of 4"):
        runtime.begin_step(batch_of([[4]], [16], [1], codecs=[FP16]))
    runtime.begin_step(batch_of([[5]], [16], [1], codecs=[INT4]))
    runtime.close()


def test_a_codec_that_the_pool_does_not_serve_is_refused() -> None:
    runtime = CpuAttention(PagedMemory(GEOMETRY, 8, INT8), 1)
    with pytest.raises(UsageError, match=r"codec number 2, but the pool was opened for int8"):
        runtime.begin_step(batch_of([[0]], [16], [1], codecs=[INT4]))
    runtime.begin_step(batch_of([[1]], [16], [1], codecs=[INT8]))
    runtime.close()
    with pytest.raises(UsageError, match=r"block 7 .*0\.\.6 in steps of 2"):
        CpuAttention(PagedMemory(GEOMETRY, 8, INT8), 1).begin_step(batch_of([[7]], [16], [1], codecs=[FP16]))


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    shift=st.integers(-200, 200),
    spread=st.sampled_from([0.1, 5.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_merged_sums_are_those_over_all_tokens(counts: list[int], shift: int, spread: float, seed: int) -> None:
    """Log-sum-exp: parts of any maxima and sizes, even of nothing, against one softmax in float64."""
    head_dim, rng = 7, np.random.default_rng(seed)
    merged = np.zeros(head_dim + 2, np.float32)
    merged[-1] = -(2.0**100)
    scores, values = [], []
    for count in counts:
        s, v = rng.normal(shift, spread, count), rng.normal(0, 1, (count, head_dim))
        part = np.zeros(head_dim + 2, np.float32)
        part[-1] = np.rint(s.max()) if count else -(2.0**100)
        weights = 2.0 ** (s - part[-1])
        part[:head_dim], part[head_dim] = weights @ v, weights.sum()
        lib.rp_merge(ffi.from_buffer("float[]", merged), ffi.from_buffer("float[]", part), head_dim)
        scores.append(s)
        values.append(v)
    if not sum(counts):
        assert not merged[:-1].any()
        return
    s, v = np.concatenate(scores), np.concatenate(values)
    weights = 2.0 ** (s - s.max())
    assert merged[-1] == np.rint(s.max())
    np.testing.assert_allclose(merged[:-2] / merged[-2], weights @ v / weights.sum(), rtol=0, atol=3e-6)

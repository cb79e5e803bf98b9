"""What is staged of quantised sequences is what the cache reads of them, bit for bit, whole and grown by a token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache import BlockTable, KVGeometry, PagedKVCache
from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.errors import UsageError
from staging import GatherPlan, Residency, StagingLayout
from tests.staging.flat import PAGE, MemoryLog, arena_of, marked, tiles

TOKENS = 64
LAYERS = 2


class Sequence(NamedTuple):
    """A table and its codec."""

    table: BlockTable
    codec: Codec


class World:
    """A pool for all codecs, and sequences that are written a chunk at a time."""

    def __init__(self, kv_heads: int = 2, head_dim: int = 32) -> None:
        self.geometry = KVGeometry(LAYERS, kv_heads, head_dim)
        self.cache = PagedKVCache.create(self.geometry, 64 * self.geometry.block_bytes, INT4)
        self.random = np.random.default_rng(4)

    def sequence(self, codec: Codec, tokens: int) -> Sequence:
        sequence = Sequence(self.cache.table(codec), codec)
        self.grow(sequence, tokens)
        return sequence

    def grow(self, sequence: Sequence, tokens: int) -> None:
        table = sequence.table
        table.append(tokens)
        slots = table.slots(table.length - tokens, table.length)
        codecs = np.full(tokens, sequence.codec.code, np.uint8)
        for layer in range(LAYERS):
            shape = (2, tokens, self.geometry.kv_heads, self.geometry.head_dim)
            keys, values = self.random.standard_normal(shape, np.float32)
            self.cache.write(layer, slots, keys, values, codecs)

    def plan(self, sequences: list[Sequence], *, mask_rows: int = 0, tiled: bool = False) -> GatherPlan:
        width = max(len(sequence.table.blocks) for sequence in sequences)
        tables = [[*s.table.blocks, *[-1] * (width - len(s.table.blocks))] for s in sequences]
        geometry = self.geometry
        return GatherPlan.build(
            geometry,
            self.cache.units,
            np.array(tables, np.int32),
            np.array([s.table.length for s in sequences], np.int32),
            StagingLayout(len(sequences), geometry.kv_heads, TOKENS, 4, geometry.head_dim, mask_rows, tiled),
            unit_bytes=self.cache.unit_bytes,
            codecs=np.array([s.codec.code for s in sequences], np.uint8),
        )

    def expected(self, sequences: list[Sequence], layer: int) -> NDArray[np.uint16]:
        """Bits of `[k|v, batch * kv_heads, tokens, head_dim]`, without marks, as the cache reads them."""
        geometry = self.geometry
        result = np.zeros((2, len(sequences), geometry.kv_heads, TOKENS, geometry.head_dim), np.uint16)
        for i, (table, codec) in enumerate(sequences):
            for kv, rows in enumerate(self.cache.read(layer, table.blocks, table.length, codec)):
                result[kv, i, :, : table.length] = rows.view(np.uint16).swapaxes(0, 1)
        return result.reshape(2, -1, TOKENS, geometry.head_dim)


@settings(deadline=None, max_examples=60)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from(list(CODECS.values())), st.integers(1, TOKENS)), min_size=1, max_size=4
    ),
    head_dim=st.sampled_from([8, 32, 64, 80, 96, 128]),
    kv_heads=st.integers(1, 3),
    layer=st.integers(0, LAYERS - 1),
    mask_rows=st.sampled_from([0, 4]),
    tiled=st.booleans(),
)
def test_what_is_staged_is_what_the_cache_reads(
    sequences: list[tuple[Codec, int]], head_dim: int, kv_heads: int, layer: int, mask_rows: int, *, tiled: bool
) -> None:
    world = World(kv_heads, head_dim)
    written = [world.sequence(codec, tokens) for codec, tokens in sequences]
    buffer = arena_of(buffers=1, pages=200).acquire()
    buffer.fill(world.cache, world.plan(written, mask_rows=mask_rows, tiled=tiled), layer)
    keys, values = world.expected(written, layer)
    if not mask_rows:
        keys = marked(keys, [sequence.table.length for sequence in written])
    if tiled:
        keys, values = tiles(keys), tiles(values)
    np.testing.assert_array_equal(buffer.keys.view(np.uint16), keys)
    np.testing.assert_array_equal(buffer.values.view(np.uint16), values)


def test_a_staged_copy_grows_by_tokens_of_each_codec() -> None:
    """Over a block's border and past a sequence that is taken back and written anew."""
    world = World()
    sequences = [world.sequence(codec, tokens) for codec, tokens in ((INT8, 14), (INT4, 30), (FP16, 5))]
    residency = Residency(world.cache, np.zeros(64 * PAGE, np.uint8), 0, MemoryLog(), own_tokens=1)
    for step in range(6):
        if step == 4:
            sequences[1].table.truncate(20)
            world.grow(sequences[1], 3)
        residency.begin_step()
        plan = world.plan(sequences)
        lengths = np.array([sequence.table.length for sequence in sequences], np.int32)
        copy = residency.lend(plan, lengths, lengths - 1)
        assert copy is not None
        for layer in range(LAYERS):
            buffer = copy.acquire(layer)
            assert buffer is not None
            buffer.fill(world.cache, plan, layer)
            buffer.sync_to_device()
            keys, values = world.expected(sequences, layer)
            head_dim = world.geometry.head_dim
            np.testing.assert_array_equal(buffer.keys[:, :-1, :head_dim].view(np.uint16), keys[:, :-1])
            np.testing.assert_array_equal(buffer.values[:, :-1].view(np.uint16), values[:, :-1])
            buffer.release()
        for sequence in sequences:
            world.grow(sequence, 1)
    assert (residency.counts.grown, residency.counts.whole) == (5 * LAYERS, LAYERS)


def test_runs_of_a_small_plan_worked_out_by_hand() -> None:
    """One layer's row of 16 tokens of a head of 32: 1024 bytes in fp16; int8 512 and 32 of scales; int4 256 and 32."""
    geometry = KVGeometry(1, 1, 32)
    cache = PagedKVCache.create(geometry, 8 * geometry.block_bytes, INT4)
    # Of an extent's four units: fp16 asks for 2048 / 4, int8 for 2 * 1088 / 4, int4 for 576; rounded up to 64.
    assert cache.unit_bytes == 576
    plan = GatherPlan.build(
        geometry,
        cache.units,
        np.array([[4, 0], [8, 10], [5, 7]], np.int32),
        np.array([10, 20, 17], np.int32),
        StagingLayout(3, 1, TOKENS, 4, 32, 0),
        unit_bytes=cache.unit_bytes,
        codecs=np.array([FP16.code, INT8.code, INT4.code], np.uint8),
    )
    assert [part.rows.codec for part in plan.parts] == [FP16, INT8, INT4]
    assert [part.runs.tolist() for part in plan.parts] == [
        [[4 * 576, 0, 0, 10]],
        [[8 * 576, 1, 0, 16], [10 * 576, 1, 16, 4]],
        [[5 * 576, 2, 0, 16], [7 * 576, 2, 16, 1]],
    ]
    assert [part.blocks for part in plan.parts] == [[4], [8, 10], [5, 7]]


@pytest.mark.parametrize(("codec", "block"), [(FP16, 29), (INT8, 31), (INT4, 32)])
def test_a_block_that_reaches_behind_the_pool_is_refused(codec: Codec, block: int) -> None:
    """A block of fp16 takes 4 of 32 units, of int8 2, of int4 1; the one before it is the last that fits."""
    geometry = KVGeometry(1, 1, 32)

    def build(first: int) -> GatherPlan:
        return GatherPlan.build(
            geometry,
            32,
            np.array([[first]], np.int32),
            np.array([1], np.int32),
            StagingLayout(1, 1, TOKENS, 4, 32, 0),
            unit_bytes=576,
            codecs=np.array([codec.code], np.uint8),
        )

    assert build(block - 1).parts[0].blocks == [block - 1]
    with pytest.raises(UsageError, match="outside a pool of 32"):
        build(block)


@pytest.mark.parametrize("codecs", [[0], [0, 3], [[0, 1]]])
def test_codecs_are_one_known_code_for_each_sequence(codecs: list[int]) -> None:
    layout = StagingLayout(2, 1, TOKENS, 4, 32, 0)
    tables, lengths = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    with pytest.raises(UsageError, match="2 sequences need as many codes"):
        GatherPlan.build(KVGeometry(1, 1, 32), 8, tables, lengths, layout, codecs=np.array(codecs, np.uint8))

"""Sequences of different codecs in one step: staged, kept staged, and attended by the host, they are what they hold."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import BlockTable, KVGeometry, PagedKVCache
from hostcache.codec import FP16, INT4, INT8, Codec
from npu.attention import AttentionBatch
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.launch import LaunchPlanner
from staging import Buckets

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=32)
GROUP = 2
HEADS = GROUP * GEOMETRY.kv_heads
BUCKETS = (64, 128)
CODECS = (INT4, FP16, INT8, INT8)
LENGTHS = (40, 70, 17, 300)  # the last one fits no bucket
ROWS = (1, 20, 1, 1)


class World:
    """A sequence of each codec, and one that the host must attend."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(8)
        self.cache = PagedKVCache.create(GEOMETRY, 64 * GEOMETRY.block_bytes, INT4)
        self.tables = [self.cache.table(codec) for codec in CODECS]
        for table, codec, length in zip(self.tables, CODECS, LENGTHS, strict=True):
            self.grow(table, codec, length)

    def grow(self, table: BlockTable, codec: Codec, tokens: int) -> None:
        table.append(tokens)
        slots = table.slots(table.length - tokens, table.length)
        for layer in range(GEOMETRY.layers):
            keys, values = self.random.standard_normal((2, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim), np.float32)
            self.cache.write(layer, slots, keys, values, np.full(tokens, codec.code, np.uint8))

    @property
    def batch(self) -> AttentionBatch:
        width = max(len(table.blocks) for table in self.tables)
        return AttentionBatch(
            np.cumsum([0, *ROWS], dtype=np.int32),
            np.array([table.length for table in self.tables], np.int32),
            np.array([[*table.blocks, *[0] * (width - len(table.blocks))] for table in self.tables], np.int32),
            codecs=np.array([codec.code for codec in CODECS], np.uint8),
        )

    def expected(self, layer: int, q: NDArray[np.float32]) -> NDArray[np.float64]:
        """Over what the cache reads, in float64, a row and a head at a time."""
        out = np.empty(q.shape)
        row = 0
        for table, codec, rows in zip(self.tables, CODECS, ROWS, strict=True):
            keys, values = (a.astype(np.float64) for a in self.cache.read(layer, table.blocks, table.length, codec))
            for seen in range(table.length - rows + 1, table.length + 1):
                for head in range(HEADS):
                    scores = keys[:seen, head // GROUP] @ q[row, head].astype(np.float64) / np.sqrt(GEOMETRY.head_dim)
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ values[:seen, head // GROUP] / weights.sum()
                row += 1
        return out


@pytest.mark.parametrize("resident_bytes", [0, 1 << 22])
def test_a_step_of_all_codecs_attends_what_each_holds(resident_bytes: int) -> None:
    """q is rounded to fp16 on the device, to 16 bits on the host: scores below 8 are off by 2^-9, means by 0.01."""
    world = World()
    host = CpuAttention(world.cache, HEADS)
    runtime = EmulatedAttention(world.cache, HEADS, cores=1, buckets=BUCKETS, host=host, resident_bytes=resident_bytes)
    with closing(runtime):
        for _ in range(3):  # the later ones over what stayed staged
            q = world.random.standard_normal((sum(ROWS), HEADS, GEOMETRY.head_dim), np.float32)
            runtime.begin_step(world.batch)
            for layer in range(GEOMETRY.layers):
                out = np.full_like(q, np.nan)
                runtime.attend(layer, q, out)
                np.testing.assert_allclose(out, world.expected(layer, q), atol=0.01)
            runtime.end_step()
            for table, codec in zip(world.tables, CODECS, strict=True):
                world.grow(table, codec, 1)
        if resident_bytes:
            assert runtime.residency is not None
            assert runtime.residency.counts.grown > 0


def test_a_launch_costs_what_its_codecs_read() -> None:
    """A token of a head of 32 takes 64 bytes in fp16, 34 in int8, 18 in int4; here of two heads, K and V."""
    world = World()
    planner = LaunchPlanner(GEOMETRY, world.cache.units, HEADS, Buckets(BUCKETS), unit_bytes=world.cache.unit_bytes)
    cuts = planner.cut(world.batch, np.arange(3))
    by_length = {tuple(cut.share.batch.context_lens.tolist()): cut.work.kv_bytes for cut in cuts}
    assert by_length == {(70,): 70 * 4 * 64, (40, 17): 4 * (40 * 18 + 17 * 34)}

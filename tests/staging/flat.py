"""A cache full of noise, and what staging it must give, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache, Region
from staging import GatherPlan, StagingArena, StagingLayout

PAGE = 4096


class MemoryLog:
    """A device whose caches are coherent: it only remembers what was synced."""

    def __init__(self) -> None:
        self.synced: list[tuple[str, int, int]] = []

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        self.synced.append(("to", offset, nbytes))

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        self.synced.append(("from", offset, nbytes))


def noisy_cache(geometry: KVGeometry, blocks: int, seed: int = 0) -> PagedKVCache:
    """Every block in use, every byte random."""
    cache = PagedKVCache.create(geometry, blocks * geometry.block_bytes)
    cache.pool.allocate(blocks)
    cache.buffer[:] = np.random.default_rng(seed).integers(0, 256, cache.buffer.nbytes, np.uint8)
    return cache


def arena_of(buffers: int, pages: int, device: MemoryLog | None = None) -> StagingArena:
    """Buffers full of old bytes."""
    region = Region.anonymous(buffers * pages * PAGE)
    region.buffer[:] = 0xEE
    return StagingArena(region, buffers, device or MemoryLog())


def plan_of(
    cache: PagedKVCache,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    tokens: int,
    rows: int = 4,
    *,
    mask_rows: int = 0,
    tiled: bool = False,
) -> GatherPlan:
    """Plan rows over `tables`; what a table lacks to the widest is -1, which nobody may follow."""
    geometry = cache.geometry
    width = max(map(len, tables))
    padded = np.array([[*table, *[-1] * (width - len(table))] for table in tables], np.int32).reshape(len(tables), -1)
    layout = StagingLayout(len(tables), geometry.kv_heads, tokens, rows, geometry.head_dim, mask_rows, tiled)
    return GatherPlan.build(geometry, cache.blocks, padded, np.array(lengths, np.int32), layout)


def flat(
    cache: PagedKVCache, tables: Sequence[Sequence[int]], lengths: Sequence[int], tokens: int, layer: int
) -> NDArray[np.uint16]:
    """Bits of `[k|v, batch * kv_heads, tokens, head_dim]`, without marks."""
    g = cache.geometry
    blocks = cache.buffer.view(np.uint16).reshape(cache.blocks, g.layers, 2, g.kv_heads, g.block_tokens, g.head_dim)
    result = np.zeros((2, len(tables) * g.kv_heads, tokens, g.head_dim), np.uint16)
    for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        for position in range(length):
            block, slot = table[position // g.block_tokens], position % g.block_tokens
            for head in range(g.kv_heads):
                result[:, sequence * g.kv_heads + head, position] = blocks[block, layer, :, head, slot]
    return result


def marked(keys: NDArray[np.uint16], lengths: Sequence[int]) -> NDArray[np.uint16]:
    """Keys with the channels that carry their mask: `[batch * kv_heads, tokens, head_dim + 8]`."""
    marks = np.zeros((*keys.shape[:2], 8), np.uint16)
    heads = len(keys) // len(lengths)
    for sequence, length in enumerate(lengths):
        marks[sequence * heads : (sequence + 1) * heads, length:, 0] = 0xF0E2  # -10000 in fp16
    return np.concatenate([keys, marks], axis=2)


def tiles(operand: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """`[heads, tokens, channels]` in the NPU's order, `[heads, channels / 8, tokens, 8]`."""
    heads, tokens, channels = operand.shape
    result = np.empty((heads, channels // 8, tokens, 8), np.uint16)
    for channel in range(channels):
        result[:, channel // 8, :, channel % 8] = operand[:, :, channel]
    return result

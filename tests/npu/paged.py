"""A paged cache to attend over, and attention in float64 to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.block_layout import BlockLayout
from hostcache.codec import FP16, Codec
from hostcache.geometry import KVGeometry
from npu.attention import AttentionBatch

POISON = np.float16(np.nan)


@dataclass
class PagedMemory:
    """The region alone: every slot holds NaN until a token is put into it."""

    geometry: KVGeometry
    blocks: int
    leanest: Codec = FP16

    @property
    def units(self) -> int:
        """Units in the region: blocks, as all are fp16."""
        return self.blocks

    @property
    def unit_bytes(self) -> int:
        """Bytes of a block."""
        return self.geometry.block_bytes

    def layout(self, codec: Codec) -> BlockLayout:
        """Where the bytes of a codec's block lie."""
        return BlockLayout(self.geometry, codec)

    def __post_init__(self) -> None:
        self.buffer: NDArray[np.uint8] = np.zeros(self.blocks * self.geometry.block_bytes, np.uint8)
        self.buffer.view(np.float16)[...] = POISON

    @property
    def view(self) -> NDArray[np.float16]:
        """`[block, layer, k|v, kv_head, token, head_dim]`."""
        g = self.geometry
        return self.buffer.view(np.float16).reshape(self.blocks, g.layers, 2, g.kv_heads, g.block_tokens, g.head_dim)

    def fill(self, table: list[int], tokens: int, rng: np.random.Generator) -> None:
        """Put random K and V into the first `tokens` tokens of `table`, in every layer."""
        g = self.geometry
        for position in range(tokens):
            block, slot = table[position // g.block_tokens], position % g.block_tokens
            values = rng.standard_normal((g.layers, 2, g.kv_heads, g.head_dim))
            self.view[block, :, :, :, slot] = values.astype(np.float16)

    def sequence(self, layer: int, table: NDArray[np.int32], tokens: int) -> NDArray[np.float64]:
        """`[k|v, kv_head, tokens, head_dim]`."""
        g = self.geometry
        kv = self.view[table[: g.blocks_for(tokens)], layer].astype(np.float64)
        by_token: NDArray[np.float64] = np.moveaxis(kv, 0, 2).reshape(2, g.kv_heads, -1, g.head_dim)
        return by_token[:, :, :tokens]


def batch_of(
    tables: list[list[int]],
    context_lens: list[int],
    rows: list[int],
    *,
    windows: list[int] | None = None,
    sinks: list[int] | None = None,
) -> AttentionBatch:
    """Tables padded with -1, which no runtime may follow."""
    width = max(map(len, tables), default=0)
    padded = [table + [-1] * (width - len(table)) for table in tables]
    return AttentionBatch(
        query_starts=np.cumsum([0, *rows], dtype=np.int32),
        context_lens=np.array(context_lens, np.int32),
        tables=np.array(padded, np.int32).reshape(len(tables), width),
        windows=None if windows is None else np.array(windows, np.int32),
        sinks=None if sinks is None else np.array(sinks, np.int32),
    )


def seen_by(position: int, window: int, sinks: int) -> list[int]:
    """Tokens that the row at a position sees: each is a sink, or among the newest `window` ones; 0 is no window."""
    return [token for token in range(position + 1) if not window or token < sinks or token > position - window]


def reference(memory: PagedMemory, layer: int, batch: AttentionBatch, q: NDArray[np.float32]) -> NDArray[np.float64]:
    """Causal grouped-query attention, one row and head at a time, over what its window and sinks show of the past."""
    heads, head_dim = q.shape[1:]
    group = heads // memory.geometry.kv_heads
    out = np.empty(q.shape)
    for i, (start, end) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        context = int(batch.context_lens[i])
        window = 0 if batch.windows is None else int(batch.windows[i])
        sinks = 0 if batch.sinks is None else int(batch.sinks[i])
        k, v = memory.sequence(layer, batch.tables[i], context)
        for row in range(start, end):
            seen = seen_by(context - (end - row), window, sinks)
            for head in range(heads):
                scores = k[head // group, seen] @ q[row, head].astype(np.float64) / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[head // group, seen] / weights.sum()
    return out

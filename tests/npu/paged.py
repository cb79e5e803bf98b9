"""A paged cache to attend over, and attention in float64 to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.block_layout import BlockLayout
from hostcache.codec import CODECS, FP16, Codec
from hostcache.codec_pools import unit_bytes
from hostcache.geometry import KVGeometry
from npu.attention import AttentionBatch

POISON = np.float16(np.nan)

LEVELS = np.array([-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127], np.float64)
"""Of int4, by code."""

BY_CODE = {codec.code: codec for codec in CODECS.values()}


@dataclass
class PagedMemory:
    """The region alone: every slot holds NaN until a token is put into it.

    Attributes:
        geometry: of the cache.
        units: in the region.
        leanest: codec that it is cut for.
    """

    geometry: KVGeometry
    units: int
    leanest: Codec = FP16

    def __post_init__(self) -> None:
        self.unit_bytes = unit_bytes(self.geometry, self.leanest)
        self.buffer: NDArray[np.uint8] = np.zeros(self.units * self.unit_bytes, np.uint8)
        self.buffer.view(np.float16)[...] = POISON

    @property
    def view(self) -> NDArray[np.float16]:
        """`[block, layer, k|v, kv_head, token, head_dim]` of a region for fp16 alone."""
        g = self.geometry
        return self.buffer.view(np.float16).reshape(self.units, g.layers, 2, g.kv_heads, g.block_tokens, g.head_dim)

    def layout(self, codec: Codec) -> BlockLayout:
        """Where the bytes of a codec's block lie."""
        return BlockLayout(self.geometry, codec)

    def span(self, codec: Codec) -> int:
        """Units of a block."""
        return self.leanest.blocks_per_extent // codec.blocks_per_extent

    def rows(self, block: int, codec: Codec) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """A block's codes (fp16: elements), `[layer, k|v, kv_head, token, bytes]`, and scales, `[.., token, group]`."""
        g, layout = self.geometry, self.layout(codec)
        start = block * self.unit_bytes
        rows = self.buffer[start : start + layout.block_bytes].reshape(g.layers, 2, g.kv_heads, layout.row_bytes)
        end = layout.payload_bytes
        codes = rows[..., :end].reshape(*rows.shape[:3], g.block_tokens, layout.token_bytes)
        scales = rows[..., end : end + layout.scale_bytes].view(np.float16)
        return codes, scales.reshape(*rows.shape[:3], g.block_tokens, layout.groups)

    def fill(self, table: list[int], tokens: int, rng: np.random.Generator, codec: Codec = FP16) -> None:
        """Put random K and V into the first `tokens` tokens of `table`, in every layer."""
        g = self.geometry
        for position in range(tokens):
            slot = position % g.block_tokens
            codes, scales = self.rows(table[position // g.block_tokens], codec)
            if codec is FP16:
                values = rng.standard_normal((g.layers, 2, g.kv_heads, g.head_dim)).astype(np.float16)
                codes[..., slot, :] = values.view(np.uint8)
            else:
                codes[..., slot, :] = rng.integers(-127, 128, codes[..., slot, :].shape).astype(np.int8).view(np.uint8)
                scales[..., slot, :] = rng.uniform(0.005, 0.02, scales[..., slot, :].shape)

    def sequence(self, layer: int, table: NDArray[np.int32], tokens: int, codec: Codec = FP16) -> NDArray[np.float64]:
        """`[k|v, kv_head, tokens, head_dim]`, rotated back."""
        g = self.geometry
        blocks = [self._values(int(block), codec)[layer] for block in table[: g.blocks_for(tokens)]]
        if not blocks:
            return np.zeros((2, g.kv_heads, 0, g.head_dim))
        return np.concatenate(blocks, axis=2)[:, :, :tokens]

    def _values(self, block: int, codec: Codec) -> NDArray[np.float64]:
        """`[layer, k|v, kv_head, token, head_dim]`."""
        codes, scales = self.rows(block, codec)
        if codec is FP16:
            return codes.view(np.float16).astype(np.float64)
        head_dim, group = self.geometry.head_dim, self.layout(codec).group
        if codec.bits == 8:
            levels = codes.view(np.int8).astype(np.float64)
        else:
            halves = codes.reshape(*codes.shape[:4], -1, group // 2)
            levels = LEVELS[np.concatenate([halves & 15, halves >> 4], axis=-1)].reshape(*codes.shape[:4], head_dim)
        stored = levels * np.repeat(scales.astype(np.float64), group, axis=-1)
        piece = codec.rotation(head_dim)
        turned: NDArray[np.float64] = (stored.reshape(-1, piece) @ hadamard(piece)).reshape(stored.shape)
        return turned


def hadamard(n: int) -> NDArray[np.float64]:
    """The normalised Walsh-Hadamard matrix of a power of two: its own inverse."""
    matrix: NDArray[np.float64] = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    normalised: NDArray[np.float64] = matrix / np.sqrt(n)
    return normalised


def batch_of(
    tables: list[list[int]],
    context_lens: list[int],
    rows: list[int],
    *,
    windows: list[int] | None = None,
    sinks: list[int] | None = None,
    codecs: list[Codec] | None = None,
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
        codecs=None if codecs is None else np.array([codec.code for codec in codecs], np.uint8),
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
        codec = FP16 if batch.codecs is None else BY_CODE[int(batch.codecs[i])]
        k, v = memory.sequence(layer, batch.tables[i], context, codec)
        for row in range(start, end):
            seen = seen_by(context - (end - row), window, sinks)
            for head in range(heads):
                scores = k[head // group, seen] @ q[row, head].astype(np.float64) / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[head // group, seen] / weights.sum()
    return out

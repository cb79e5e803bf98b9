"""Attention in float64, straight through the block table: what the self-test holds a device's results against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache

from .attention import AttentionBatch

__all__ = ["LARGEST_ERROR", "exact_attention"]

LARGEST_ERROR = 2e-3
"""What a result may be off by, at most, where K, V and queries are of unit order.

The vendor's simulator (rknn-toolkit2 2.5.0), which rounds the result alone, is off by 6.5e-4 at worst on such operands,
and arithmetic that rounds to fp16 after every operation by as much. What the hardware does inside its fused operation
is not documented: three times as much is allowed. A wrong token, row or head is off by some tenths.
"""

_SCORE_BYTES = 64 << 20
"""Of float64 scores at a time: boards are small."""


def exact_attention(cache: PagedKVCache, batch: AttentionBatch, q: NDArray[np.float32]) -> NDArray[np.float64]:
    """Causal attention over layer 0, through the block table, in float64.

    Args:
        cache: with fp16 elements.
        batch: the step.
        q: float32 `[rows, heads, head_dim]`, not scaled. What a device is handed is scaled and rounded to fp16, and
            so it is here: that error is not the device's.

    Returns:
        float64, as q.
    """
    geometry = cache.geometry
    group = q.shape[1] // geometry.kv_heads
    scaled = (q * np.float32(geometry.head_dim**-0.5)).astype(np.float16)
    out = np.empty(q.shape)
    for sequence in range(batch.sequences):
        start, end = batch.query_starts[sequence : sequence + 2].tolist()
        context = int(batch.context_lens[sequence])
        ids = batch.tables[sequence, : geometry.blocks_for(context)]
        for kv_head in range(geometry.kv_heads):
            keys, values = _of_head(cache, ids, kv_head, context)
            step = max(1, _SCORE_BYTES // (8 * group * context))
            for first in range(start, end, step):
                last = min(first + step, end)
                rows = scaled[first:last, kv_head * group : (kv_head + 1) * group].astype(np.float64)
                seen = context - (end - 1 - np.arange(first, last))  # tokens that each row sees
                scores = rows @ keys.T  # [rows, group, context]
                scores[np.broadcast_to(np.arange(context) >= seen[:, np.newaxis, np.newaxis], scores.shape)] = -np.inf
                weights = np.exp(scores - scores.max(axis=2, keepdims=True))
                weights /= weights.sum(axis=2, keepdims=True)
                out[first:last, kv_head * group : (kv_head + 1) * group] = weights @ values
    return out


def _of_head(
    cache: PagedKVCache, ids: NDArray[np.int32], kv_head: int, context: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """K and V of one head, float64 `[context, head_dim]` each."""
    g = cache.geometry
    whole = cache.buffer[: cache.blocks * g.block_bytes].view(np.float16)
    blocks = whole.reshape(cache.blocks, g.layers, 2, g.kv_heads, g.block_tokens, g.head_dim)
    of_head = blocks[ids, 0, :, kv_head].astype(np.float64)  # [blocks, k|v, block_tokens, head_dim]
    keys, values = of_head.swapaxes(0, 1).reshape(2, -1, g.head_dim)[:, :context]
    return keys, values

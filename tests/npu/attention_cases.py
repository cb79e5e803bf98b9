"""Launches with an exact answer that knows neither masks nor canaries: attention over a sequence's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npu.attention_graph import AttentionGraph

__all__ = ["Case", "random_case"]


@dataclass(frozen=True)
class Case:
    """Operands of one launch, written from the contract, and what must come out.

    Attributes:
        used: rows of `want` that belong to query tokens.
        asking: rows at its end that are the canary's.
        want: float64 `[heads, rows, head_dim]`, from the operands' fp16 values; padding rows are zero.
    """

    q: NDArray[np.float16]
    k: NDArray[np.float16]
    v: NDArray[np.float16]
    mask: NDArray[np.float16] | None
    used: int
    asking: int
    want: NDArray[np.float64]


def random_case(
    graph: AttentionGraph, lengths: list[int], tokens: int, seed: int, *, spread: float = 1.0, values: str = "normal"
) -> Case:
    """Random K, V and queries.

    Args:
        graph: the graph.
        lengths: tokens of each sequence up to the launch's last query token; the tile must fit.
        tokens: the bucket.
        seed: of the numbers.
        spread: standard deviation of scores.
        values: V is `normal`, or `unit`: between -1 and 1.
    """
    rng = np.random.default_rng(seed)
    heads, rows, d, tile = len(lengths) * graph.kv_heads, graph.rows, graph.head_dim, graph.tile
    channels = d if graph.masked else d + 8
    used = tile * graph.group
    q, k = np.zeros((heads, rows, channels), np.float16), np.zeros((heads, tokens, channels), np.float16)
    v = np.zeros((heads, tokens, d), np.float16)
    q[:, :used, :d] = rng.normal(0, spread * d**-0.5, (heads, used, d))
    first = rng.choice(np.array([-1.0, 1.0]), d)
    second = first * np.where(np.arange(d) % 2, -1, 1)
    v[:, -2:] = first, second
    # The canary: scores of its two tokens that differ by shifts in K, the query and the mask; its rows see no others.
    asking = 4 if graph.masked else 1
    k_shift, q_shift, mask_shift = (
        rng.choice(np.arange(-7, 8, 2) / 8, size) for size in ((heads, 1), (heads, asking), (1, asking))
    )
    channel = 0 if graph.masked else d + 2
    k[:, -1, channel : channel + 2] = np.append(k_shift, np.ones((heads, 1)), axis=1)
    q[:, -asking:, channel] = 1
    q[:, -asking:, channel + 1] = q_shift
    difference = k_shift + q_shift
    mask = np.full((1, rows, tokens), -1e4, np.float16) if graph.masked else None
    if mask is None:
        q[:, :-1, d] = 1  # the mask in K counts
        q[:, -1, d + 1] = 1
        k[:, -2:, d + 1] = 64
    else:
        mask[0, -asking:, -2] = 0
        mask[0, -asking:, -1] = mask_shift
        difference += mask_shift
    want = np.zeros((heads, rows, d))
    want[:, -asking:] = first + (second - first) / (1 + np.exp(-difference[..., np.newaxis]))
    for sequence, length in enumerate(lengths):
        own = slice(sequence * graph.kv_heads, (sequence + 1) * graph.kv_heads)
        k[own, :length, :d] = rng.normal(0, 1, (graph.kv_heads, length, d))
        drawn = rng.normal(0, 1, (graph.kv_heads, length, d))
        v[own, :length] = drawn if values == "normal" else np.tanh(drawn)
        if mask is None:
            k[own, length:, d] = -1e4
        for row in range(rows - asking):
            seen = length - tile + 1 + min(row // graph.group, tile - 1)
            if mask is not None:
                mask[0, row, :seen] = 0
            if row < used:
                want[own, row] = exact(q[own, row, :d], k[own, :seen, :d], v[own, :seen])
    return Case(q, k, v, mask, used, asking, want)


def exact(q: NDArray[np.float16], k: NDArray[np.float16], v: NDArray[np.float16]) -> NDArray[np.float64]:
    """Attention of one query `[heads, d]` over `[heads, n, d]` in float64: `[heads, d]`."""
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k.astype(np.float64))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = np.einsum("hn,hnd->hd", weights, v.astype(np.float64))
    return result

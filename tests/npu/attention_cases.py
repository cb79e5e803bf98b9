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
        used: rows of `want` that belong to query tokens; the last row is the canary's.
        want: float64 `[heads, rows, head_dim]`, from the operands' fp16 values; padding rows are zero.
    """

    q: NDArray[np.float16]
    k: NDArray[np.float16]
    v: NDArray[np.float16]
    mask: NDArray[np.float16] | None
    used: int
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
    nonce = rng.choice(np.array([-1, 1], np.float16), d)
    v[:, -1] = nonce
    want = np.zeros((heads, rows, d))
    want[:, -1] = nonce
    mask = np.full((1, rows, tokens), -1e4, np.float16) if graph.masked else None
    if mask is None:
        q[:, :-1, d] = 1  # the mask in K counts
        q[:, -1, d + 1] = 1  # the canary asks for its own token
        k[:, -1, d + 1] = 64
    else:
        mask[0, -1, -1] = 0
    for sequence, length in enumerate(lengths):
        own = slice(sequence * graph.kv_heads, (sequence + 1) * graph.kv_heads)
        k[own, :length, :d] = rng.normal(0, 1, (graph.kv_heads, length, d))
        drawn = rng.normal(0, 1, (graph.kv_heads, length, d))
        v[own, :length] = drawn if values == "normal" else np.tanh(drawn)
        if mask is None:
            k[own, length:, d] = -1e4
        for row in range(rows - 1):
            seen = length - tile + 1 + min(row // graph.group, tile - 1)
            if mask is not None:
                mask[0, row, :seen] = 0
            if row < used:
                want[own, row] = exact(q[own, row, :d], k[own, :seen, :d], v[own, :seen])
    return Case(q, k, v, mask, used, want)


def exact(q: NDArray[np.float16], k: NDArray[np.float16], v: NDArray[np.float16]) -> NDArray[np.float64]:
    """Attention of one query `[heads, d]` over `[heads, n, d]` in float64: `[heads, d]`."""
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k.astype(np.float64))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = np.einsum("hn,hnd->hd", weights, v.astype(np.float64))
    return result

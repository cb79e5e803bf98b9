"""What int4 must know of a model's keys and queries, gathered token by token, and the constants that follow.

Of all A (see `npu.key_balance`), the one that gives keys and queries the same diagonal second moments keeps the
expected error of the products least when every element of `k A` gets the same error (balancing of linear systems,
Moore 1981).

The moments are those of a short text. Attention gives its first token much weight (Xiao et al., arXiv 2309.17453), so
that one counts like many.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .decoder import Floats
from .key_balance import KeyBalance

__all__ = ["FIRST_TOKEN_WEIGHT", "SHRINKAGE", "KeyMoments"]

FIRST_TOKEN_WEIGHT = 0.1
"""Share of the first token in the moments of keys. Source: the best of 0, 0.03, 0.1 and 0.3 for SmolLM2-135M."""

SHRINKAGE = 0.5
"""How far moments are drawn to a multiple of the unit matrix, for they are those of few tokens.
Source: the best of 0.01, 0.05, 0.2 and 0.5 for SmolLM2-135M at 2048 tokens."""


class KeyMoments:
    """Sums over a text, float64: their size does not depend on its length.

    Args:
        layers: of the model.
        kv_heads: likewise.
        head_dim: likewise.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        shape = (layers, kv_heads, head_dim)
        self._first, self._sums = np.zeros(shape), np.zeros(shape)
        self._keys, self._queries = np.zeros((*shape, head_dim)), np.zeros((*shape, head_dim))
        self._tokens, self._asked = [0] * layers, [0] * layers

    def add_first(self, layer: int, keys: Floats) -> None:
        """Take the keys of the text's first token, float32 `[kv_heads, head_dim]`."""
        self._first[layer] = keys

    def add(self, layer: int, keys: Floats, queries: Floats) -> None:
        """Take tokens behind the first.

        Args:
            layer: layer index.
            keys: float32 `[n, kv_heads, head_dim]`.
            queries: float32 `[n, heads, head_dim]`.
        """
        count, kv_heads, head_dim = keys.shape
        own = keys.astype(np.float64).transpose(1, 0, 2)
        by_head = queries.reshape(count, kv_heads, queries.shape[1] // kv_heads, head_dim).astype(np.float64)
        asked = by_head.transpose(1, 0, 2, 3).reshape(kv_heads, count * by_head.shape[2], head_dim)
        self._sums[layer] += own.sum(axis=1)
        self._keys[layer] += own.transpose(0, 2, 1) @ own
        self._queries[layer] += asked.transpose(0, 2, 1) @ asked
        self._tokens[layer] += count
        self._asked[layer] += asked.shape[1]

    def balance(self) -> KeyBalance:
        """The constants; every layer has had its first token and at least one more."""
        shape = self._first.shape
        offsets = np.empty(shape, np.float32)
        key_matrices, query_matrices = (np.empty(self._keys.shape, np.float32) for _ in range(2))
        for layer, head in np.ndindex(shape[:2]):
            first, mean = self._first[layer, head], self._sums[layer, head] / self._tokens[layer]
            offset = (1 - FIRST_TOKEN_WEIGHT) * mean + FIRST_TOKEN_WEIGHT * first
            away, off = first - offset, mean - offset
            # About the offset: the moments about the mean, and the mean's own.
            about = self._keys[layer, head] / self._tokens[layer] - np.outer(mean, mean) + np.outer(off, off)
            key_moments = (1 - FIRST_TOKEN_WEIGHT) * about
            key_moments += FIRST_TOKEN_WEIGHT * np.outer(away, away)
            matrix = _balancing(_shrunk(key_moments), _shrunk(self._queries[layer, head] / self._asked[layer]))
            offsets[layer, head] = offset
            key_matrices[layer, head] = matrix
            query_matrices[layer, head] = np.linalg.inv(matrix).T
        return KeyBalance(offsets, key_matrices, query_matrices)


def _shrunk(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moments that are surely those of a full rank; of nothing at all, or of what are no numbers, the unit matrix."""
    mean = float(np.trace(moments)) / len(moments)
    return moments + SHRINKAGE * mean * np.eye(len(moments)) if 0 < mean < math.inf else np.eye(len(moments))


def _balancing(keys: NDArray[np.float64], queries: NDArray[np.float64]) -> NDArray[np.float64]:
    """The matrix A for which `A^T keys A` and `A^-1 queries A^-T` are the same diagonal matrix."""
    root = np.linalg.cholesky(keys)
    squares, vectors = np.linalg.eigh(root.T @ queries @ root)
    balanced: NDArray[np.float64] = np.linalg.solve(root.T, vectors) * squares**0.25
    return balanced

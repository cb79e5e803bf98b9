"""What int4 must know of a model's keys and queries, gathered token by token, and the constants that follow.

By feedback (see `npu.key_balance`) scores get errors of `s^2 det(Q)^(1/n)`, for steps s and queries of second moments
Q, whatever the shape of Q. Of all A with one determinant, those that whiten keys leave s least; of these, we take one
that makes Q diagonal.

The moments are those of a short text. Attention gives its first token much weight (Xiao et al., arXiv 2309.17453), so
that one counts like many.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hostcache.codec import INT4

from .decoder import Floats
from .key_balance import KeyBalance

__all__ = ["FIRST_TOKEN_WEIGHT", "KEY_SHRINKAGE", "QUERY_SHRINKAGE", "KeyMoments"]

FIRST_TOKEN_WEIGHT = 0.1
"""Share of the first token in the moments of keys. Source: the best of 0, 0.03, 0.1 and 0.3 for SmolLM2-135M."""

KEY_SHRINKAGE = 0.5
"""How far moments of keys are drawn to a multiple of the unit matrix, for they are those of few tokens. Source: the
best of 0.2, 0.5 and 1 for SmolLM2-135M at 2048 tokens, which differ little."""

QUERY_SHRINKAGE = 0.1
"""The same of queries. Source: the best of 0.03, 0.1, 0.2, 0.3 and 0.5, likewise."""


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
        key_matrices, query_matrices, feedback = (np.empty(self._keys.shape, np.float32) for _ in range(3))
        rotation = _hadamard(shape[2])
        for layer, head in np.ndindex(shape[:2]):
            first, mean = self._first[layer, head], self._sums[layer, head] / self._tokens[layer]
            offset = (1 - FIRST_TOKEN_WEIGHT) * mean + FIRST_TOKEN_WEIGHT * first
            away, off = first - offset, mean - offset
            # About the offset: the moments about the mean, and the mean's own.
            about = self._keys[layer, head] / self._tokens[layer] - np.outer(mean, mean) + np.outer(off, off)
            key_moments = (1 - FIRST_TOKEN_WEIGHT) * about
            key_moments += FIRST_TOKEN_WEIGHT * np.outer(away, away)
            query_moments = _shrunk(self._queries[layer, head] / self._asked[layer], QUERY_SHRINKAGE)
            matrix = _whitening(_shrunk(key_moments, KEY_SHRINKAGE), query_moments)
            inverse = np.linalg.inv(matrix)
            met = rotation @ inverse  # what a query, as a column, is multiplied by
            offsets[layer, head] = offset
            key_matrices[layer, head] = matrix
            query_matrices[layer, head] = inverse.T
            feedback[layer, head] = _feedback(met @ query_moments @ met.T)
        return KeyBalance(offsets, key_matrices, query_matrices, feedback)


def _shrunk(moments: NDArray[np.float64], shrinkage: float) -> NDArray[np.float64]:
    """Moments that are surely those of a full rank; of nothing at all, or of what are no numbers, the unit matrix."""
    mean = float(np.trace(moments)) / len(moments)
    return moments + shrinkage * mean * np.eye(len(moments)) if 0 < mean < math.inf else np.eye(len(moments))


def _whitening(keys: NDArray[np.float64], queries: NDArray[np.float64]) -> NDArray[np.float64]:
    """The matrix A for which `A^T keys A` is the unit matrix and `A^-1 queries A^-T` a diagonal one.

    Elements that are rotated together shall differ in what queries make of them, from the least to the most: feedback
    can move an error from one to another of them alone.
    """
    root = np.linalg.cholesky(keys)
    vectors = np.linalg.eigh(root.T @ queries @ root)[1]  # by size
    spread = np.arange(len(keys)).reshape(INT4.rotation(len(keys)), -1).T.ravel()
    white: NDArray[np.float64] = np.linalg.solve(root.T, vectors[:, spread])
    return white


def _hadamard(head_dim: int) -> NDArray[np.float64]:
    """What rows of int4 are multiplied by, `[head_dim, head_dim]` (Sylvester's construction, block by block)."""
    piece = INT4.rotation(head_dim)
    matrix: NDArray[np.float64] = np.eye(head_dim // piece)
    for _ in range(piece.bit_length() - 1):
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]) / math.sqrt(2)).astype(np.float64)
    return matrix


def _feedback(queries: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each element, how much of its error to take from those behind it, to keep `error^T queries error` least."""
    root = np.linalg.cholesky(np.linalg.inv(queries)).T
    return np.triu(root / np.diag(root)[:, np.newaxis], 1)

"""The form in which int4 stores keys: constants of a model that make their error matter least.

With any matrix A of full rank, `q . k = (q A^-T) . (k A)`, so keys may be stored as `k A` if queries are met as
`q A^-T`. And what all keys of a head have in common may be taken away: it adds the same to every score of a query, and
the softmax does not see it.

An error in a key matters by what queries make of it. Where elements are quantised one after the other, an error that
was made can be made up for by those that follow, as far as queries do not tell them apart: `feedback` says how, as GPTQ
does for weights (Frantar et al., arXiv 2210.17323). The error of scores is then `s^2 det(Q)^(1/n)` for steps s and
queries of second moments Q, whatever their shape, and s is least, for the same product, where keys of A have unit
moments: so A whitens them, and makes the moments of queries diagonal.

The moments are those of a short text. Attention gives its first token much weight (Xiao et al., arXiv 2309.17453), so
that one counts like many. Which text it was is in the numerics, as are the constants themselves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hostcache._kv import ffi, lib
from hostcache.codec import INT4

from .decoder import Floats

__all__ = ["KeyBalance", "balance_keys"]

FIRST_TOKEN_WEIGHT = 0.1
"""Share of the first token in the moments of keys. Source: the best of 0, 0.03, 0.1 and 0.3 for SmolLM2-135M."""

KEY_SHRINKAGE, QUERY_SHRINKAGE = 0.5, 0.1
"""How far moments are drawn to a multiple of the unit matrix, for they are those of few tokens.
Source: the best of 0.2, 0.5 and 1, and of 0.03, 0.1, 0.2, 0.3 and 0.5 (which differ little), for SmolLM2-135M at 2048
tokens."""


@dataclass(frozen=True, eq=False)
class KeyBalance:
    """Takes queries and keys of sequences in int4 to the form that is stored, and keys back.

    Attributes:
        offsets: float32 `[layers, kv_heads, head_dim]`, taken from keys.
        key_matrices: float32 `[layers, kv_heads, head_dim, head_dim]`; keys, as rows, are multiplied by them.
        query_matrices: likewise for the queries of a KV head: their transposed inverse.
        feedback: likewise; what `PagedKVCache.write` must know of stored keys.
    """

    offsets: Floats
    key_matrices: Floats
    query_matrices: Floats
    feedback: Floats

    @cached_property
    def digest(self) -> str:
        """Names the constants: 16 hex digits."""
        return hashlib.sha256(self.tobytes()).hexdigest()[:16]

    def tobytes(self) -> bytes:
        """All constants, one array after the other."""
        return b"".join(
            part.tobytes() for part in (self.offsets, self.key_matrices, self.query_matrices, self.feedback)
        )

    @classmethod
    def frombuffer(cls, content: bytes, shape: tuple[int, int, int]) -> KeyBalance:
        """What `tobytes` gave, for so many layers, KV heads and elements of a head.

        Raises:
            ValueError: it has another size.
        """
        head_dim = shape[2]
        flat = np.frombuffer(content, np.float32).reshape(*shape, 1 + 3 * head_dim)
        # The arrays lie one after the other; only their sizes were checked so far.
        ends = math.prod(shape) * (1 + head_dim * np.arange(3))
        offsets, *matrices = np.split(flat.reshape(-1), ends)
        return cls(offsets.reshape(shape), *(matrix.reshape(*shape, head_dim) for matrix in matrices))

    def keys(self, layer: int, codecs: NDArray[np.uint8], keys: Floats) -> Floats:
        """Keys as they are stored.

        Args:
            layer: layer index.
            codecs: uint8 `[rows]`; rows that are not in int4 stay as they are.
            keys: float32 `[rows, kv_heads, head_dim]`, C-contiguous, rotated by position.

        Returns:
            A new array of that shape. A row's bits do not depend on the others.
        """
        return self._combined(codecs, keys, self.offsets[layer], self.key_matrices[layer])

    def queries(self, layer: int, codecs: NDArray[np.uint8], queries: Floats) -> Floats:
        """Queries that give with stored keys what these give with the keys themselves, less the same for all of them.

        Args:
            layer: layer index.
            codecs: uint8 `[rows]`, as for `keys`.
            queries: float32 `[rows, heads, head_dim]`, C-contiguous, rotated by position.
        """
        return self._combined(codecs, queries, None, self.query_matrices[layer])

    def restored(self, layer: int, stored: Floats) -> Floats:
        """Keys of int4 again, float32 `[rows, kv_heads, head_dim]`, from what `keys` gave."""
        # k = k' A^-1 + offset; a query matrix is A^-T.
        back = np.einsum("rhe,hde->rhd", stored, self.query_matrices[layer], dtype=np.float64)
        keys: Floats = (back + self.offsets[layer]).astype(np.float32)
        return keys

    def _combined(self, codecs: NDArray[np.uint8], rows: Floats, offsets: Floats | None, matrices: Floats) -> Floats:
        count, heads, head_dim = rows.shape
        out = np.empty_like(rows)
        lib.rp_kv_combine(
            ffi.from_buffer("uint8_t[]", codecs),
            INT4.code,
            count,
            heads,
            head_dim,
            heads // len(matrices),
            ffi.NULL if offsets is None else ffi.from_buffer("float[]", offsets),
            ffi.from_buffer("float[]", matrices),
            ffi.from_buffer("float[]", rows),
            ffi.from_buffer("float[]", out, require_writable=True),
        )
        return out


def balance_keys(first_keys: Floats, keys: Callable[[int], Floats], queries: Callable[[int], Floats]) -> KeyBalance:
    """Find the constants from what a model makes of a text.

    Args:
        first_keys: of its first token, float32 `[layers, kv_heads, head_dim]`.
        keys: of the others at the positions that shall count, by layer: float32 `[n, kv_heads, head_dim]`.
        queries: likewise, float32 `[m, heads, head_dim]`.
    """
    layers, kv_heads, head_dim = first_keys.shape
    offsets = np.empty(first_keys.shape, np.float32)
    key_matrices, query_matrices, feedback = (np.empty((*first_keys.shape, head_dim), np.float32) for _ in range(3))
    rotation = _hadamard(head_dim)
    for layer in range(layers):
        of_layer, asked = keys(layer).astype(np.float64), queries(layer).astype(np.float64)
        asked = asked.reshape(len(asked), kv_heads, -1, head_dim)
        for head in range(kv_heads):
            first, others = first_keys[layer, head].astype(np.float64), of_layer[:, head]
            offset = (1 - FIRST_TOKEN_WEIGHT) * others.mean(axis=0) + FIRST_TOKEN_WEIGHT * first
            spread, away = others - offset, first - offset
            key_moments = (1 - FIRST_TOKEN_WEIGHT) * spread.T @ spread / len(spread)
            key_moments += FIRST_TOKEN_WEIGHT * np.outer(away, away)
            of_head = asked[:, head].reshape(-1, head_dim)
            query_moments = _shrunk(of_head.T @ of_head / len(of_head), QUERY_SHRINKAGE)
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

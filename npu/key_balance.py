"""The form in which int4 stores keys: constants of a model that make their error matter least.

An error in a key matters by what queries make of it, so both may be traded: with any matrix A of full rank,
`q . k = (q A^-T) . (k A)`. And what all keys of a head have in common may be taken away: it adds the same to every
score of a query, and the softmax does not see it. `npu.key_moments` says which A that is. The constants are part of the
numerics.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hostcache._kv import ffi, lib
from hostcache.codec import INT4

from .decoder import Floats

__all__ = ["KeyBalance"]


@dataclass(frozen=True, eq=False)
class KeyBalance:
    """Takes queries and keys of sequences in int4 to the form that is stored, and keys back.

    Attributes:
        offsets: float32 `[layers, kv_heads, head_dim]`, taken from keys.
        key_matrices: float32 `[layers, kv_heads, head_dim, head_dim]`; keys, as rows, are multiplied by them.
        query_matrices: likewise for the queries of a KV head: their transposed inverse.
    """

    offsets: Floats
    key_matrices: Floats
    query_matrices: Floats

    @cached_property
    def digest(self) -> str:
        """Names the constants: 16 hex digits."""
        return hashlib.sha256(self.tobytes()).hexdigest()[:16]

    def tobytes(self) -> bytes:
        """All constants, one array after the other."""
        return b"".join(part.tobytes() for part in (self.offsets, self.key_matrices, self.query_matrices))

    @classmethod
    def frombuffer(cls, content: bytes, shape: tuple[int, int, int]) -> KeyBalance:
        """What `tobytes` gave, for so many layers, KV heads and elements of a head.

        Raises:
            ValueError: it has another size.
        """
        head_dim = shape[2]
        flat = np.frombuffer(content, np.float32).reshape(*shape, 1 + 2 * head_dim)
        # The arrays lie one after the other; only their sizes were checked so far.
        offsets, keys, queries = np.split(flat.reshape(-1), [math.prod(shape), math.prod(shape) * (1 + head_dim)])
        return cls(offsets.reshape(shape), keys.reshape(*shape, head_dim), queries.reshape(*shape, head_dim))

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

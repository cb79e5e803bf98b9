"""Moves keys to other positions: what lets a sequence go on past a model's context once it has let go of its middle.

The rotation of a key by its position is a rotation of pairs of elements, and rotations of a pair add up: a key rotated
at position p and turned by d more is the key rotated at p + d. So K need not be computed anew, only turned. Values have
no position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.codec import FP16, INT4, Codec

from .key_balance import KeyBalance
from .rope import Rope

__all__ = ["Rerotation", "turned"]


def turned(rows: NDArray[np.float32], angles: NDArray[np.float64], *, interleaved: bool) -> NDArray[np.float32]:
    """Rotate the pairs of heads.

    Args:
        rows: float32 `[..., head_dim]`.
        angles: float64 `[head_dim / 2]`, radians by pair.
        interleaved: element 2i of a head turns with 2i + 1; if not, element i with i + head_dim / 2
            (`Architecture.interleaved`).
    """
    half = len(angles)
    low, high = (np.s_[..., ::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :half], np.s_[..., half:])
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    result = np.empty_like(rows)
    result[low] = rows[low] * cos - rows[high] * sin
    result[high] = rows[low] * sin + rows[high] * cos
    return result


class Rerotation:
    """Copies blocks to other positions.

    Args:
        cache: where the blocks lie.
        rope: the rotation that the model's keys have. Its factor of cos and sin (`Rope.attention`) is in them already.
        interleaved: as in `turned`.
        balance: the form of keys in int4; None: they are stored as they are.
    """

    def __init__(
        self, cache: PagedKVCache, rope: Rope, *, interleaved: bool, balance: KeyBalance | None = None
    ) -> None:
        self._cache = cache
        self._frequencies = rope.frequencies(cache.geometry.head_dim)
        self._interleaved = interleaved
        self._balance = balance

    def turn(self, source: int, destination: int, by: int, codec: Codec = FP16) -> None:
        """Copy a block of every layer, its keys as if they stood `by` positions further on.

        Keys are turned in float32 and rounded once more, by their codec: to fp16, or quantised a second time. Values
        are copied bit for bit.

        Args:
            source: block id; only read.
            destination: block id, of one table and not kept; `source`, to turn a block in place.
            by: positions, negative for back.
            codec: of both blocks.

        Raises:
            UsageError: there is no such block.
            BlockStateError: the destination is free, shared, or known to the prefix cache.
        """
        content = self._cache.view(source, codec).copy()
        tokens = self._cache.tokens_written(source)
        if codec.scaled:
            self._turn_scaled(content, tokens, destination, by, codec)
        else:
            self._turn_halves(content, tokens, by)
        self._cache.overwrite(destination, content, tokens, codec)

    def _turn_halves(self, content: NDArray[np.uint8], tokens: int, by: int) -> None:
        """Turn the keys of an fp16 block's content where they are."""
        geometry = self._cache.geometry
        shape = (geometry.layers, 2, geometry.kv_heads, geometry.block_tokens, geometry.head_dim)
        keys = content.view(np.float16).reshape(shape)[:, 0, :, :tokens]
        with np.errstate(over="ignore", invalid="ignore"):  # beyond fp16 is infinity, as in the cache
            keys[:] = turned(keys.astype(np.float32), by * self._frequencies, interleaved=self._interleaved)

    def _turn_scaled(self, content: NDArray[np.uint8], tokens: int, destination: int, by: int, codec: Codec) -> None:
        """Quantise the turned keys into the destination, and take them over into `content`."""
        cache, geometry, layout = self._cache, self._cache.geometry, self._cache.layout(codec)
        codes = np.full(tokens, codec.code, np.uint8)
        slots = destination * geometry.block_tokens + np.arange(tokens, dtype=np.int64)
        balance = self._balance if codec is INT4 else None
        cache.overwrite(destination, content, 0, codec)  # refused before a byte of it changes, if at all
        for layer in range(geometry.layers):
            stored, values = (part.astype(np.float32) for part in cache.read(layer, [destination], tokens, codec))
            keys = stored if balance is None else balance.restored(layer, stored)
            keys = turned(keys, by * self._frequencies, interleaved=self._interleaved)
            if balance is None:
                cache.write(layer, slots, keys, values, codes)
            else:
                keys = balance.keys(layer, codes, keys)
                cache.write(layer, slots, keys, values, codes, feedback=balance.feedback[layer])
        after = cache.view(destination, codec).reshape(geometry.layers, 2, layout.kv_bytes)
        content.reshape(geometry.layers, 2, layout.kv_bytes)[:, 0] = after[:, 0]

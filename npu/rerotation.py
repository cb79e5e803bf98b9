"""Moves keys to other positions: what lets a sequence go on past a model's context once it has let go of its middle.

The rotation of a key by its position is a rotation of pairs of elements, and rotations of a pair add up: a key rotated
at position p and turned by d more is the key rotated at p + d. So K need not be computed anew, only turned. Values have
no position.
"""

from __future__ import annotations

import numpy as np

from hostcache.cache import PagedKVCache

from .rope import Rope

__all__ = ["Rerotation"]


class Rerotation:
    """Copies blocks to other positions.

    Args:
        cache: where the blocks lie.
        rope: the rotation that the model's keys have. Its factor of cos and sin (`Rope.attention`) is in them already.
        interleaved: element 2i of a head turns with 2i + 1; if not, element i with i + head_dim / 2
            (`Architecture.interleaved`).
    """

    def __init__(self, cache: PagedKVCache, rope: Rope, *, interleaved: bool) -> None:
        self._cache = cache
        head_dim = cache.geometry.head_dim
        self._frequencies = rope.frequencies(head_dim)
        odd, even = slice(1, None, 2), slice(0, None, 2)
        low, high = slice(0, head_dim // 2), slice(head_dim // 2, None)
        self._pairs = (even, odd) if interleaved else (low, high)

    def turn(self, source: int, destination: int, by: int) -> None:
        """Copy a block of every layer, its keys as if they stood `by` positions further on.

        Keys are turned in float32 and rounded to fp16 once more; values are copied bit for bit.

        Args:
            source: block id; only read.
            destination: block id, of one table and not kept; `source`, to turn a block in place.
            by: positions, negative for back.

        Raises:
            UsageError: there is no such block.
            BlockStateError: the destination is free, shared, or known to the prefix cache.
        """
        geometry = self._cache.geometry
        content = self._cache.view(source).copy()
        tokens = self._cache.tokens_written(source)
        shape = (geometry.layers, 2, geometry.kv_heads, geometry.block_tokens, geometry.head_dim)
        keys = content.view(np.float16).reshape(shape)[:, 0, :, :tokens]
        first, second = (keys[..., elements].astype(np.float32) for elements in self._pairs)
        angles = by * self._frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond fp16 is infinity, as in the cache
            keys[..., self._pairs[0]] = first * cos - second * sin
            keys[..., self._pairs[1]] = first * sin + second * cos
        self._cache.overwrite(destination, content, tokens)

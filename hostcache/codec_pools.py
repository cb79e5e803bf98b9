"""The codecs that one pool serves: how its memory is cut for them, and who owns the blocks of each."""

from __future__ import annotations

from collections.abc import Mapping

from .block_layout import BlockLayout
from .blocks import BlockPool
from .codec import CODECS, FP16, Codec
from .errors import UsageError
from .extents import ExtentPool
from .geometry import KVGeometry
from .slabs import block_pool

__all__ = ["codecs_down_to", "open_pools", "pool_of", "unit_bytes"]

UNIT_ALIGNMENT = 64
"""Bytes; a cache line, so that no two blocks share one."""


def codecs_down_to(leanest: Codec) -> list[Codec]:
    """The codecs that a pool opened for `leanest` serves, the richest first."""
    return [codec for codec in CODECS.values() if codec.blocks_per_extent <= leanest.blocks_per_extent]


def unit_bytes(geometry: KVGeometry, leanest: Codec) -> int:
    """Bytes of a unit of memory in a pool opened for `leanest`, of which `leanest.blocks_per_extent` are an extent.

    It is the least in which as many blocks of every codec fit into an extent as shall; scales may need a little more
    than their share. For fp16 alone it is a block.

    Raises:
        UsageError: a codec cannot store heads of this size.

    Example:
        >>> from hostcache import KVGeometry
        >>> from hostcache.codec import FP16, INT8
        >>> from hostcache.codec_pools import unit_bytes
        >>> geometry = KVGeometry(layers=24, kv_heads=2, head_dim=128)
        >>> unit_bytes(geometry, FP16), unit_bytes(geometry, INT8)  # half of the first, and 1/64 of that for scales
        (393216, 199680)
    """
    if leanest is FP16:
        return geometry.block_bytes
    units = leanest.blocks_per_extent
    most = max(
        -(-BlockLayout(geometry, codec).block_bytes * codec.blocks_per_extent // units)
        for codec in codecs_down_to(leanest)
    )
    return -(-most // UNIT_ALIGNMENT) * UNIT_ALIGNMENT


def open_pools(extents: ExtentPool, block_tokens: int) -> dict[str, BlockPool]:
    """A pool for each codec whose blocks these extents can hold, by name."""
    return {
        codec.name: block_pool(extents, codec, block_tokens)
        for codec in CODECS.values()
        if codec.blocks_per_extent <= extents.units
    }


def pool_of(pools: Mapping[str, BlockPool], codec: Codec) -> BlockPool:
    """The pool of a codec's blocks.

    Raises:
        UsageError: the memory was not cut for it.
    """
    try:
        return pools[codec.name]
    except KeyError:
        raise UsageError(
            f"this pool serves {', '.join(pools)} and no {codec.name}: open it for {codec.name}", codec=codec.name
        ) from None

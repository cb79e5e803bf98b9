"""What the scheduler asks of a cache, and a cache that has nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .blocks import BlockPool
from .codec import FP16, Codec
from .codec_pools import open_pools, pool_of
from .extents import ExtentPool
from .geometry import KVGeometry
from .table import BlockTable

__all__ = ["BlockCache", "UnbackedCache"]


class BlockCache(Protocol):
    """Who owns which block; not what is in it.

    `PagedKVCache` is one with bytes. To decide what a step computes takes none.
    """

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the model's KV."""

    @property
    def extents(self) -> ExtentPool:
        """The memory in which the blocks of all codecs lie."""

    @property
    def pool(self) -> BlockPool:
        """The fp16 blocks' reference counts."""

    @property
    def pools(self) -> Mapping[str, BlockPool]:
        """The same for each codec that is served, by name."""

    def pool_of(self, codec: Codec) -> BlockPool:
        """The same for one codec, or UsageError if it is not served."""

    def table(self, codec: Codec = FP16) -> BlockTable:
        """An empty block table over this cache."""


class UnbackedCache:
    """Blocks without bytes: all of the bookkeeping, for planning and for replaying traffic that computes nothing.

    Nothing can be written to it or read from it.

    Args:
        geometry: shape of the KV that there would be.
        blocks: fp16 blocks that there would be room for.
        leanest: the codec of which an extent holds most blocks; it and all richer ones can be used.

    Attributes:
        geometry: as given.
        extents: the memory that there would be.
        pools: reference counts of each codec's blocks, by its name.
        pool: those of fp16 blocks.
        copied_tokens: tokens that copy-on-write would have copied.

    Raises:
        UsageError: there is not even one block.

    Example:
        >>> from hostcache import KVGeometry, UnbackedCache
        >>> cache = UnbackedCache(KVGeometry(layers=24, kv_heads=2, head_dim=128), blocks=512)
        >>> table = cache.table()
        >>> table.append(20)
        >>> table.fork().append(1)  # would copy the four tokens of the shared tail
        >>> cache.copied_tokens, cache.pool.used
        (4, 3)
    """

    def __init__(self, geometry: KVGeometry, blocks: int, leanest: Codec = FP16) -> None:
        self.geometry = geometry
        self.extents = ExtentPool(blocks, leanest.blocks_per_extent)
        self.pools: Mapping[str, BlockPool] = open_pools(self.extents, geometry.block_tokens)
        self.pool = self.pools[FP16.name]
        self.copied_tokens = 0

    def pool_of(self, codec: Codec) -> BlockPool:
        """Reference counts of a codec's blocks.

        Raises:
            UsageError: the pool was not opened for it.
        """
        return pool_of(self.pools, codec)

    def table(self, codec: Codec = FP16) -> BlockTable:
        """An empty block table over this cache.

        Raises:
            UsageError: the pool was not opened for the codec.
        """
        return BlockTable(self.pool_of(codec), self._count_copy)

    def _count_copy(self, _source: int, _destination: int, tokens: int) -> None:
        self.copied_tokens += tokens

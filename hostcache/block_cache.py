"""What the scheduler asks of a cache, and a cache that has nothing else."""

from __future__ import annotations

from typing import Protocol

from .blocks import BlockPool
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
    def pool(self) -> BlockPool:
        """The blocks' reference counts."""

    def table(self) -> BlockTable:
        """An empty block table over this cache."""


class UnbackedCache:
    """Blocks without bytes: all of the bookkeeping, for planning and for replaying traffic that computes nothing.

    Nothing can be written to it or read from it.

    Args:
        geometry: shape of the KV that there would be.
        blocks: blocks in the pool.

    Attributes:
        geometry: as given.
        pool: reference counts of the blocks.
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

    def __init__(self, geometry: KVGeometry, blocks: int) -> None:
        self.geometry = geometry
        self.pool = BlockPool(blocks, geometry.block_tokens)
        self.copied_tokens = 0

    def table(self) -> BlockTable:
        """An empty block table over this cache."""
        return BlockTable(self.pool, self._count_copy)

    def _count_copy(self, _source: int, _destination: int, tokens: int) -> None:
        self.copied_tokens += tokens

"""A cache without bytes keeps the same books as one with them."""

from __future__ import annotations

import pytest

from hostcache import BlockCache, KVGeometry, PagedKVCache, UnbackedCache
from hostcache.errors import OutOfBlocks, UsageError

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4)


def test_the_books_are_those_of_a_cache_with_bytes() -> None:
    backed = PagedKVCache.create(GEOMETRY, nbytes=6 * GEOMETRY.block_bytes)
    unbacked = UnbackedCache(GEOMETRY, blocks=6)
    caches: list[BlockCache] = [backed, unbacked]
    for cache in caches:
        table = cache.table()
        table.append(6)
        fork = table.fork()
        fork.append(3)  # its tail becomes its own, and one block more
        assert (table.blocks, fork.blocks) == ([0, 1], [0, 2, 3])
        assert cache.pool.refs == [2, 1, 1, 1, 0, 0]
        with pytest.raises(OutOfBlocks):
            fork.append(12)
        table.release()
        fork.release()
        assert cache.pool.free == cache.pool.total == 6
        cache.pool.check()
    backed.close()


def test_copy_on_write_is_counted_in_tokens() -> None:
    cache = UnbackedCache(GEOMETRY, blocks=6)
    table = cache.table()
    table.append(7)
    table.fork().append(1)  # three tokens of the second block are shared
    assert cache.copied_tokens == 3


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(UsageError, match="at least one block"):
        UnbackedCache(GEOMETRY, blocks=0)

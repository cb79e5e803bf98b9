"""How many sessions of each codec one pool holds."""

from __future__ import annotations

import itertools

import pytest

from hostcache import BlockTable, KVGeometry, PagedKVCache
from hostcache.codec import FP16, INT4, INT8, Codec


def sessions(geometry: KVGeometry, nbytes: int, codec: Codec, tokens: int) -> int:
    """Sessions of so many tokens that find room before the pool is full."""
    cache = PagedKVCache.create(geometry, nbytes, codec)
    pool = cache.pool_of(codec)
    for count in itertools.count():
        if cache.table(codec).blocks_needed(tokens) > pool.available:
            cache.extents.check()
            cache.close()
            return count
        cache.table(codec).append(tokens)
    raise AssertionError("a pool has an end")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [32, 512])
@pytest.mark.parametrize(("codec", "least"), [(INT8, 1.9), (INT4, 3.5)])
def test_lean_codecs_hold_so_many_times_the_sessions_of_fp16(
    codec: Codec, least: float, tokens: int, head_dim: int
) -> None:
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=head_dim)
    nbytes = 1024 * geometry.block_bytes
    rich = sessions(geometry, nbytes, FP16, tokens)
    assert rich == 1024 * 16 // tokens
    assert sessions(geometry, nbytes, codec, tokens) >= least * rich


def test_scales_count() -> None:
    """1024 blocks of fp16, 64 elements a head, are as much as 910 extents of four int4 blocks and their scales."""
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=64)
    cache = PagedKVCache.create(geometry, 1024 * geometry.block_bytes, INT4)
    # 16 tokens of 32 bytes and two scales of 2 bytes, K and V: 1152; times 4 is 9/8 of fp16's 4096.
    assert (cache.unit_bytes, cache.extents.total) == (1152, 1024 * 8 // 9)
    cache.close()


def test_codecs_share_the_pool_as_they_need_it() -> None:
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=64)
    cache = PagedKVCache.create(geometry, 90 * geometry.block_bytes, INT4)  # 80 extents
    tables: dict[str, list[BlockTable]] = {codec.name: [] for codec in (FP16, INT8, INT4)}
    for codec, count in ((FP16, 10), (INT8, 20), (INT4, 30)):
        for _ in range(count):
            table = cache.table(codec)
            table.append(32)
            tables[codec.name].append(table)
    # 10 sessions of two extents, 20 of one, 30 of half a one.
    assert cache.extents.used == 20 + 20 + 15
    assert len(cache.extents.free) == 25
    for table in tables["int8"]:
        table.release()
    assert len(cache.extents.free) == 45
    cache.extents.check()
    cache.close()

"""Blocks of several codecs in one swap space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache, SwapSpace
from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.errors import UsageError


def filled(cache: PagedKVCache, codec: Codec, blocks: list[int], seed: int) -> list[NDArray[np.uint8]]:
    """Fill blocks with noise; returns what they hold."""
    rng = np.random.default_rng(seed)
    content = [rng.integers(0, 256, cache.layout(codec).block_bytes, np.uint8) for _ in blocks]
    for tokens, (block, noise) in enumerate(zip(blocks, content, strict=True), 1):
        cache.overwrite(block, noise, tokens, codec)
    return content


@pytest.fixture
def cache() -> PagedKVCache:
    geometry = KVGeometry(layers=3, kv_heads=1, head_dim=72)
    return PagedKVCache.create(geometry, 1 << 17, INT4)


@pytest.mark.parametrize("on_disk", [False, True])
def test_blocks_come_back_byte_for_byte_wherever_they_go(cache: PagedKVCache, tmp_path: Path, on_disk: bool) -> None:
    swap = SwapSpace(1 << 17, cache, tmp_path if on_disk else None)
    put = {}
    for seed, codec in enumerate(CODECS.values()):
        blocks = cache.pool_of(codec).allocate(3)
        content = filled(cache, codec, blocks, seed)
        put[codec.name] = swap.put(blocks, codec), content
        cache.pool_of(codec).release_all(blocks)
    assert swap.used == 3 * (4 + 2 + 1)
    swap.check()
    for codec in (INT4, INT8, FP16):  # into other blocks than they came from
        ticket, content = put[codec.name]
        assert ticket is not None
        assert ticket.codec is codec
        fresh = cache.pool_of(codec).allocate(3)
        swap.take(ticket, fresh)
        for tokens, (block, expected) in enumerate(zip(fresh, content, strict=True), 1):
            assert np.array_equal(cache.view(block, codec), expected)
            assert cache.tokens_written(block) == tokens
    assert (swap.used, swap.stats.put_blocks, swap.stats.taken_blocks) == (0, 9, 9)
    swap.check()
    swap.close()


def test_room_is_counted_in_units(cache: PagedKVCache) -> None:
    swap = SwapSpace(6 * cache.unit_bytes, cache)
    rich, half, lean = (cache.pool_of(codec).allocate(2) for codec in (FP16, INT8, INT4))
    assert swap.put(rich) is None  # eight units
    assert swap.put(rich[:1]) is not None
    assert swap.put(half, INT8) is None
    assert swap.put(lean, INT4) is not None
    assert (swap.free, swap.stats.refused) == (0, 2)
    swap.check()


def test_what_was_put_is_taken_by_as_many_blocks_of_its_codec(cache: PagedKVCache) -> None:
    swap = SwapSpace(1 << 16, cache)
    ticket = swap.put(cache.pool_of(INT8).allocate(2), INT8)
    assert ticket is not None
    with pytest.raises(UsageError, match="2 blocks were put, 1 are to take them"):
        swap.take(ticket, cache.pool_of(INT8).allocate(1))
    swap.drop(ticket)
    assert swap.used == 0
    swap.check()


def test_the_time_that_swapping_takes_follows_from_the_bytes(cache: PagedKVCache) -> None:
    ticks = iter(range(100))
    swap = SwapSpace(1 << 16, cache, clock=lambda: float(next(ticks)))
    blocks = cache.pool.allocate(1)
    ticket = swap.put(blocks)
    assert ticket is not None
    swap.take(ticket, blocks)
    assert swap.seconds_for(2) == pytest.approx(4)  # a second each way
    # int8: 72 bytes and a scale instead of 144.
    assert swap.seconds_for(2, INT8) == pytest.approx(4 * (16 * (72 + 2)) / (16 * 144))

from __future__ import annotations

import hashlib
import mmap
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from hostcache import BlockPool, KVGeometry, Namespace, PagedKVCache, PrefixCache, Region
from hostcache.balloon import Balloon
from hostcache.errors import RegionError
from hostcache.region import HUGE_PAGE
from tests.hostcache.test_give_back import is_about
from tests.hostcache.test_region import resident_bytes

PAGE = mmap.PAGESIZE


def bench(blocks: int, block_bytes: int = PAGE) -> tuple[BlockPool, Region, Balloon]:
    pool, region = BlockPool(blocks, 16), Region.anonymous(blocks * block_bytes)
    return pool, region, Balloon(pool.extents, region, block_bytes)


def cached(pool: BlockPool, *blocks: int) -> None:
    """Make the first blocks of a fresh pool cached, the one named first used longest ago."""
    pool.allocate(len(blocks))
    for block in blocks:
        pool.keep(block)
        pool.release(block)


def digest(content: NDArray[np.uint8]) -> bytes:
    """Of a region's bytes: a copy of them would be memory that comes and goes, too."""
    return hashlib.blake2b(content.data).digest()


def test_free_blocks_go_first_and_the_highest_of_them() -> None:
    pool, _, balloon = bench(6)
    cached(pool, 1, 0)
    assert balloon.inflate(2 * PAGE) == 2 * PAGE
    assert [block for block in range(6) if block in pool.extents.withheld] == [4, 5]
    assert balloon.inflate(3 * PAGE) == 3 * PAGE
    assert pool.cached_blocks() == [0]  # 1 was used longer ago
    assert balloon.inflate(3 * PAGE) == PAGE  # nothing else is left
    assert (pool.withheld, balloon.given_bytes, balloon.inflate(1)) == (6, 6 * PAGE, 0)


def test_what_is_asked_for_is_rounded_up_to_granules_and_what_is_taken_down() -> None:
    pool, _, balloon = bench(4)
    assert balloon.inflate(1) == PAGE
    assert balloon.inflate(PAGE + 1) == 2 * PAGE
    assert balloon.inflate(0) == 0
    assert balloon.deflate(PAGE - 1) == 0
    assert balloon.deflate(2 * PAGE + 1) == 2 * PAGE
    assert pool.allocate(3) == [0, 1, 2]  # the lowest came first
    assert pool.extents.withheld == {3}


def test_some_blocks_are_spared() -> None:
    pool, _, balloon = bench(6)
    cached(pool, 0, 1, 2)
    assert balloon.inflate(6 * PAGE, spare=2) == 4 * PAGE
    assert pool.cached_blocks() == [1, 2]
    assert balloon.inflate(6 * PAGE, spare=2) == 0
    assert balloon.inflate(6 * PAGE, spare=1) == PAGE
    pool, _, balloon = bench(8, block_bytes=PAGE // 4)  # four blocks go at a time
    assert balloon.inflate(PAGE, spare=5) == 0
    assert balloon.inflate(2 * PAGE, spare=4) == PAGE


def test_used_fenced_and_pinned_blocks_keep_their_bytes() -> None:
    pool, region, balloon = bench(5)
    region.buffer[:] = 7
    pool.allocate(3)  # 0 stays used
    fence = pool.fence([1])
    pool.keep(2)  # and stays referred to, as a pin does
    pool.release(1)
    assert balloon.inflate(5 * PAGE) == 2 * PAGE
    assert (region.buffer[: 3 * PAGE] == 7).all()
    fence.release()
    assert balloon.inflate(5 * PAGE) == PAGE
    assert region.buffer[::PAGE].tolist() == [7, 0, 7, 0, 0]
    pool.check()


def test_a_block_counts_as_free_only_once_all_of_it_is_there() -> None:
    pool, _, balloon = bench(4, block_bytes=PAGE * 3 // 4)  # pages hold blocks 0 1, 1 2, 2 3
    assert balloon.inflate(3 * PAGE) == 3 * PAGE
    assert pool.withheld == 4
    balloon.deflate(PAGE)
    assert pool.allocate(1) == [0]  # half of 1 is missing
    assert pool.free == 0
    balloon.deflate(PAGE)
    assert pool.allocate(1) == [1]


def test_blocks_that_share_a_page_with_one_in_use_stay() -> None:
    pool, region, balloon = bench(8, block_bytes=PAGE // 4)
    region.buffer[:] = 7
    pool.allocate(1)
    assert balloon.inflate(8 * PAGE) == PAGE  # the other page
    assert (pool.free, pool.withheld) == (3, 4)
    assert (region.buffer[:PAGE] == 7).all()


def test_where_there_may_be_huge_pages_only_whole_ones_go() -> None:
    block_bytes = 360 << 10  # of the demo's model; a huge page holds 5.7
    pool, region = BlockPool(24, 16), Region.anonymous(24 * block_bytes)
    if not region.huge_pages:
        pytest.skip("this kernel has no transparent huge pages")
    region.buffer[:] = 7
    pool.allocate(2)
    before = resident_bytes()
    balloon = Balloon(pool.extents, region, block_bytes)
    # 8.4 MiB are four huge pages, and a rest that stays; the first holds blocks 0 and 1.
    assert balloon.inflate(1 << 30) == 3 * HUGE_PAGE
    assert is_about(before - resident_bytes(), 3 * HUGE_PAGE)
    # Bytes 2 to 8 MiB lie in blocks 5 (which begins at 1.76 MiB) to 22.
    assert [block for block in range(24) if block in pool.extents.withheld] == list(range(5, 23))
    assert (region.buffer[:HUGE_PAGE] == 7).all()
    assert (region.buffer[4 * HUGE_PAGE :] == 7).all()


def test_the_memory_of_a_cache_is_lent_and_what_its_sequences_hold_stays() -> None:
    geometry = KVGeometry(layers=8, kv_heads=2, head_dim=64)  # 64 KiB a block
    cache = PagedKVCache.create(geometry, 32 << 20)
    prefix, balloon = PrefixCache(cache.pool), cache.balloon()
    tokens = np.arange(200 * 16, dtype=np.int32)
    table = cache.table()
    table.append(len(tokens))
    rng = np.random.default_rng(0)
    for layer in range(geometry.layers):
        keys, values = rng.standard_normal((2, len(tokens), 2, 64), dtype=np.float32)
        cache.write(layer, table.slots(0, len(tokens)), keys, values)
    node = prefix.root(Namespace("model"))
    prefix.hold_node(node)
    for index in range(200):
        node = prefix.publish(node, tokens[index * 16 :][:16], table.blocks[index])
    before, both = resident_bytes(), [digest(cache.buffer[: count * 65536]) for count in (200, 64)]
    given = balloon.inflate(1 << 30)
    assert given == (32 << 20) - HUGE_PAGE * 7  # 200 blocks are 12.5 MiB
    assert is_about(before - resident_bytes(), given)
    assert digest(cache.buffer[: 200 * 65536]) == both[0]
    table.release()  # now they are cached, and a match finds them
    hit = prefix.match(Namespace("model"), tokens[: 64 * 16 + 1])
    assert hit.blocks == list(range(64))
    assert balloon.inflate(1 << 30) == 5 * HUGE_PAGE  # all but the 4 MiB that the hit holds
    assert digest(cache.buffer[: 64 * 65536]) == both[1]
    prefix.check()
    assert prefix.resident == 64
    assert balloon.deflate(1 << 30) == 28 << 20
    assert is_about(before - resident_bytes(), 0)
    assert (cache.pool.free, cache.pool.used) == (512 - 64, 64)
    cache.close()


def test_a_region_that_keeps_its_pages_gives_none() -> None:
    pool, region, balloon = bench(4)
    cached(pool, 0, 1, 2, 3)
    region.hold_pages()
    assert not balloon.can_give
    assert balloon.inflate(PAGE) == 0
    assert pool.cached == 4  # and nothing was evicted for it
    region.let_pages_go()
    assert balloon.can_give


def test_memory_that_does_not_come_leaves_its_blocks_withheld() -> None:
    pool, region, balloon = bench(4)
    balloon.inflate(4 * PAGE)
    populate = region.populate
    came: list[int] = []

    def once(offset: int, nbytes: int) -> None:
        if came:
            raise RegionError("no more")
        came.append(offset)
        populate(offset, nbytes)

    with patch.object(region, "populate", once):
        assert balloon.deflate(4 * PAGE) == PAGE
    assert (pool.free, pool.withheld, balloon.given_bytes) == (1, 3, 3 * PAGE)


class FakeRegion:
    """Remembers page by page what a real one would have."""

    def __init__(self, nbytes: int, page_bytes: int) -> None:
        self.nbytes, self.page_bytes, self.gives_back = nbytes, page_bytes, True
        self.there = [True] * -(-nbytes // page_bytes)

    def give_back(self, offset: int, nbytes: int) -> bool:
        assert offset % self.page_bytes == nbytes % self.page_bytes == 0
        assert offset + nbytes <= self.nbytes
        self._set(offset, nbytes, False)
        return True

    def populate(self, offset: int, nbytes: int) -> None:
        self._set(offset, nbytes, True)

    def _set(self, offset: int, nbytes: int, there: bool) -> None:
        for page in range(offset // self.page_bytes, -(-(offset + nbytes) // self.page_bytes)):
            self.there[page] = there

    def has(self, start: int, end: int) -> bool:
        return all(self.there[start // self.page_bytes : -(-end // self.page_bytes)])


class BalloonUnderTraffic(RuleBasedStateMachine):
    """Whatever happens, a block that can be handed out or holds something has all of its memory."""

    @initialize(total=st.integers(1, 12), block_bytes=st.integers(1, 12), page_bytes=st.integers(1, 6))
    def begin(self, total: int, block_bytes: int, page_bytes: int) -> None:
        self.pool = BlockPool(total, 16)
        self.prefix = PrefixCache(self.pool)
        self.block_bytes = block_bytes
        self.region = FakeRegion(total * block_bytes, page_bytes)
        self.balloon = Balloon(self.pool.extents, self.region, block_bytes)  # type: ignore[arg-type] # it has what is needed
        self.held: list[int] = []
        self.tokens = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.available:
            self.held += self.pool.allocate(count)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), publish=st.booleans())
    def release(self, data: st.DataObject, publish: bool) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if publish:
            self.tokens += 16
            root = self.prefix.root(Namespace("model"))
            self.prefix.hold_node(root)
            tokens = np.arange(self.tokens, self.tokens + 16, dtype=np.int32)
            self.prefix.release_node(self.prefix.publish(root, tokens, block))
        self.pool.release(block)

    @rule(nbytes=st.integers(0, 150), spare=st.integers(0, 6))
    def inflate(self, nbytes: int, spare: int) -> None:
        available = self.pool.available
        before, cached = self.balloon.given_bytes, self.pool.cached_blocks()
        used = self.pool.used
        given = self.balloon.inflate(nbytes, spare)
        assert self.pool.available >= min(available, spare)
        assert self.balloon.given_bytes == before + given
        assert self.pool.used == used
        if self.pool.cached_blocks() != cached:
            assert nbytes > 0

    @rule(nbytes=st.integers(0, 150))
    def deflate(self, nbytes: int) -> None:
        before = self.balloon.given_bytes
        taken = self.balloon.deflate(nbytes)
        assert 0 <= taken <= nbytes
        assert self.balloon.given_bytes == before - taken

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self.prefix.check()
        missing = self.region.there.count(False) * self.region.page_bytes
        assert missing == self.balloon.given_bytes
        for block in range(self.pool.total):
            has = self.region.has(block * self.block_bytes, (block + 1) * self.block_bytes)
            assert has != (block in self.pool.extents.withheld)


TestBalloonUnderTraffic = BalloonUnderTraffic.TestCase
TestBalloonUnderTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

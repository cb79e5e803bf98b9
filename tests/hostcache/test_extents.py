"""Several codecs over the same extents."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostcache import Fence
from hostcache.blocks import BlockPool
from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.codec_pools import codecs_down_to, open_pools, pool_of, unit_bytes
from hostcache.errors import BlockStateError, OutOfBlocks, UsageError
from hostcache.extents import ExtentPool
from hostcache.geometry import KVGeometry
from hostcache.slabs import SlabPool, block_pool

UNITS = 4


def pools(total: int, units: int = UNITS) -> tuple[ExtentPool, list[BlockPool]]:
    extents = ExtentPool(total, units)
    return extents, list(open_pools(extents, 16).values())


def keep_and_release(pool: BlockPool, *blocks: int) -> None:
    for block in blocks:
        pool.keep(block)
        pool.release(block)


def test_blocks_of_all_codecs_are_named_by_their_first_unit() -> None:
    _, (rich, half, lean) = pools(4)
    assert (rich.total, half.total, lean.total) == (4, 8, 16)
    assert half.allocate(3) == [0, 2, 4]
    assert lean.allocate(5) == [8, 9, 10, 11, 12]
    with pytest.raises(OutOfBlocks, match=r"1 blocks asked for, 0 available .* of 4\), 4 in the memory of"):
        rich.allocate(1)
    assert half.allocate(1) == [6]
    assert (half.used, half.free, half.elsewhere) == (4, 0, 4)


def test_a_single_block_is_taken_as_several_are() -> None:
    extents, (rich, half, lean) = pools(3)
    assert [
        half.allocate_one(),
        lean.allocate_one(),
        half.allocate_one(),
        lean.allocate_one(),
        rich.allocate_one(),
    ] == [0, 4, 2, 5, 8]
    extents.check()
    with pytest.raises(OutOfBlocks, match="1 blocks asked for"):
        half.allocate_one()


def test_an_extent_that_is_partly_used_is_filled_before_another_is_taken_and_goes_back_empty() -> None:
    extents, (rich, _, lean) = pools(3)
    assert lean.allocate(9) == list(range(9))
    for block in (1, 6, 3):
        lean.release(block)
    assert lean.allocate(4) == [1, 3, 6, 9]
    lean.release(8)
    assert extents.free == []
    lean.release(9)
    assert extents.free == [8]
    assert rich.allocate(1) == [8]
    extents.check()


def test_what_can_be_had_counts_the_idle_extents_of_others() -> None:
    extents, (rich, half, lean) = pools(3)
    lean.allocate(6)
    keep_and_release(lean, 0, 1)
    for block in (2, 3):
        lean.release(block)
    # The first extent holds two cached blocks, the second two used ones and room for two; the third is free.
    assert extents.common == 2
    assert (rich.available, half.available, lean.available) == (2, 4, 10)
    assert (lean.spare, half.spare) == (2, 0)
    fence = lean.fence([0])
    assert (rich.available, lean.available) == (1, 9)  # one more block of the first extent is in use
    fence.release()
    assert rich.allocate(2) == [0, 8]  # the cached ones went
    assert lean.cached == 0
    extents.check()


def test_what_was_used_longest_ago_goes_whosever_it_is() -> None:
    extents, (rich, _, lean) = pools(3)
    rich.allocate(1)
    lean.allocate(5)  # 4..7 and 8
    keep_and_release(lean, 4, 5, 6)
    keep_and_release(rich, 0)
    keep_and_release(lean, 7)  # the extent counts as used when the last of its blocks was
    assert lean.allocate(3) == [9, 10, 11]
    assert lean.allocate(1) == [4]  # its own oldest is older than the fp16 block
    assert (rich.cached, lean.cached_blocks()) == (1, [5, 6, 7])
    lean.acquire(5)
    lean.acquire(6)
    assert lean.allocate(1) == [0]  # the fp16 block is older than 7
    assert (rich.cached, lean.cached_blocks()) == (0, [7])
    extents.check()


def test_of_the_extents_of_two_others_the_one_idle_for_longer_goes() -> None:
    for first, second in ((1, 2), (2, 1)):
        extents, codecs = pools(2)
        blocks = {which: codecs[which].allocate(1) for which in (1, 2)}
        for which in (first, second):
            keep_and_release(codecs[which], *blocks[which])
        codecs[0].allocate(1)
        assert (codecs[first].cached, codecs[second].cached) == (0, 1)
        extents.check()


def test_an_extent_is_not_taken_from_another_codec_before_its_fence_has_passed() -> None:
    extents, (rich, _, lean) = pools(1)
    lean.allocate(2)
    fence = lean.fence([1])
    keep_and_release(lean, 0)
    lean.release(1)
    assert (lean.cached, lean.fenced, rich.available) == (1, 1, 0)
    with pytest.raises(OutOfBlocks):
        rich.allocate(1)
    fence.release()
    assert rich.allocate(1) == [0]
    extents.check()


def test_thrifty_pools_leave_free_extents_to_others() -> None:
    extents, (_, _, lean) = pools(3)
    lean.allocate(4)
    keep_and_release(lean, 1, 2)
    assert lean.allocate(1) == [4]  # a free extent rather than what is kept
    lean.release(4)
    extents.thrifty = True
    assert lean.allocate(3) == [1, 2, 4]  # what is kept beside blocks in use rather than another extent
    assert extents.free == [8]
    with pytest.raises(OutOfBlocks, match="8 blocks asked for, 7 available"):
        lean.allocate(8)
    assert lean.allocate(7) == [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("total", [10, 1000])
def test_thrifty_pools_do_not_search_all_extents(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every extent has a block in use and one that is kept or free: each look finds one, or what is gone for good."""
    extents, (_, _, lean) = pools(total)
    lean.allocate(total * UNITS)
    for extent in range(0, total * UNITS, UNITS):
        lean.release(extent + 1)
        keep_and_release(lean, extent + 2)
    extents.thrifty = True
    looks = 0
    has_free, is_kept = SlabPool._has_free, SlabPool._is_kept_beside

    def look(self: SlabPool, extent: int) -> bool:
        nonlocal looks
        looks += 1
        return has_free(self, extent)

    def look_at_kept(self: SlabPool, clock: int, block: int) -> bool:
        nonlocal looks
        looks += 1
        return is_kept(self, clock, block)

    monkeypatch.setattr(SlabPool, "_has_free", look)
    monkeypatch.setattr(SlabPool, "_is_kept_beside", look_at_kept)
    taken = lean.allocate(2 * total)
    assert taken == [extent + offset for offset in (1, 2) for extent in range(0, total * UNITS, UNITS)]
    assert looks <= 3 * len(taken)


def test_a_block_freed_in_a_full_extent_is_found_again() -> None:
    extents, (_, _, lean) = pools(2)
    lean.allocate(4)  # the first extent is full
    extents.thrifty = True
    assert lean.allocate(1) + lean.allocate(1) == [4, 5]  # which is noticed here
    lean.release(2)
    assert lean.allocate(2) == [2, 6]
    extents.check()


def test_blocks_that_come_and_go_leave_no_trail() -> None:
    """A block beside another that is in use is cached and used again, over and over."""
    extents, (_, _, lean) = pools(1)
    lean.allocate(2)
    lean.keep(1)
    for _ in range(100):
        lean.release(1)
        extents.check()  # which counts what is out of date
        lean.acquire(1)


def test_a_block_is_known_to_its_own_pool_alone() -> None:
    _, (rich, half, lean) = pools(1)
    lean.allocate(1)
    for other in (rich, half):
        with pytest.raises(BlockStateError, match="released while nobody referred to it"):
            other.release(0)
        with pytest.raises(BlockStateError, match="acquired while free"):
            other.acquire(0)


@pytest.mark.parametrize("used", [1, 2])
@pytest.mark.parametrize("codec", range(3), ids=list(CODECS))
def test_no_block_is_none_of_them(codec: int, used: int) -> None:
    """-1 stands for no block in prefix hits and C's arrays; Python's lists would take it for the last one's."""
    extents, codecs = pools(1)
    pool = codecs[codec]
    last = pool.allocate(pool.total)[-1]
    for _ in range(used - 1):
        pool.acquire(last)
    for act in (pool.acquire, pool.release, pool.keep, pool.raise_fence):
        with pytest.raises(BlockStateError, match="block -1"):
            act(-1)
    for acts in (pool.acquire_all, pool.release_all):
        with pytest.raises(BlockStateError, match="block -1"):
            acts([-1])
    assert not pool.writable(-1)
    pool.keep(last)
    with pytest.raises(BlockStateError, match="block -1 was forgotten"):
        pool.forget(-1)
    assert pool.refs[last] == used
    assert pool.is_kept(last)
    extents.check()


def test_a_generation_tells_owners_of_different_codecs_apart() -> None:
    _, (rich, _, lean) = pools(1)
    (block,) = lean.allocate(1)
    lean.release(block)
    rich.allocate(1)
    assert rich.generation[0] == lean.generation[0] == 2


def test_the_check_sees_what_belongs_to_two_codecs_or_to_none() -> None:
    extents, (rich, _, lean) = pools(2)
    lean.allocate(2)
    extents.check()
    rich.refs[0] = 1
    with pytest.raises(BlockStateError, match="extent 0 has 2 owners"):
        rich.check()
    rich.refs[0] = 0
    extents.free.clear()
    with pytest.raises(BlockStateError, match="extent 4 has 0 owners"):
        lean.check()


@pytest.mark.parametrize(("codec", "units"), [(INT8, 1), (INT4, 2)])
def test_memory_that_was_not_cut_for_a_codec_holds_none_of_its_blocks(codec: Codec, units: int) -> None:
    extents = ExtentPool(2, units)
    with pytest.raises(UsageError, match=f"holds no {codec.name} blocks, of which an extent has"):
        block_pool(extents, codec, 16)
    with pytest.raises(UsageError, match=f"and no {codec.name}: open it for {codec.name}"):
        pool_of(open_pools(extents, 16), codec)


def test_a_unit_is_what_the_codec_needs_that_needs_most() -> None:
    geometry = KVGeometry(layers=2, kv_heads=3, head_dim=64)
    assert codecs_down_to(INT8) == [FP16, INT8]
    assert unit_bytes(geometry, FP16) == 2 * 2 * 3 * 16 * 64 * 2  # a block
    # int8: 16 tokens of 64 bytes and a scale of 2; half an fp16 block would be 2 % less.
    assert unit_bytes(geometry, INT8) == 2 * 2 * 3 * 16 * (64 + 2)
    # int4: 16 tokens of 32 bytes and two scales.
    assert unit_bytes(geometry, INT4) == 2 * 2 * 3 * 16 * (32 + 4)
    # 16 * (8 / 2 + 2) are 96 bytes, which rows of 16 hold; a block of two rows is 192 bytes, three cache lines.
    assert unit_bytes(KVGeometry(layers=1, kv_heads=1, head_dim=8), INT4) == 192
    # 16 * (10 / 2 + 2) are 112 bytes, twice as many 224: they end within the fourth cache line.
    assert unit_bytes(KVGeometry(layers=1, kv_heads=1, head_dim=10), INT4) == 256


@dataclass
class Held:
    """A block that is not free, as the model knows it."""

    pool: BlockPool
    refs: int = 1
    kept: bool = False
    fences: int = 0
    since: int = 0

    @property
    def busy(self) -> bool:
        return self.refs > 0 or self.fences > 0


class PoolsAgainstModel(RuleBasedStateMachine):
    """Three codecs against a model that says the same thing in the slowest way."""

    @initialize(total=st.integers(1, 4))
    def begin(self, total: int) -> None:
        self.extents, self.pools = pools(total)
        self.all = range(0, total * UNITS, UNITS)
        self.blocks: dict[int, Held] = {}
        self.idle: dict[int, int] = {}
        self.withheld: set[int] = set()
        self.fences: list[tuple[Fence, int]] = []
        self.now = 0

    def owner(self, extent: int) -> BlockPool | None:
        return next((held.pool for block, held in self.blocks.items() if block // UNITS * UNITS == extent), None)

    def within(self, extent: int, pool: BlockPool) -> range:
        return range(extent, extent + UNITS, UNITS // pool.codec.blocks_per_extent)

    def held_by(self, pool: BlockPool) -> list[int]:
        return [extent for extent in self.all if self.owner(extent) is pool]

    def vacant(self, pool: BlockPool) -> list[int]:
        return [b for extent in self.held_by(pool) for b in self.within(extent, pool) if b not in self.blocks]

    def cached(self, pool: BlockPool) -> list[int]:
        mine = [block for block, held in self.blocks.items() if held.pool is pool and not held.busy]
        return sorted(mine, key=lambda block: self.blocks[block].since)

    def busy(self, extent: int) -> bool:
        return any(held.busy for block, held in self.blocks.items() if block // UNITS * UNITS == extent)

    def free(self) -> list[int]:
        return [extent for extent in self.all if self.owner(extent) is None and extent not in self.withheld]

    def available(self, pool: BlockPool) -> int:
        others = [e for e in self.all if self.owner(e) not in (None, pool) and not self.busy(e)]
        common = (len(self.free()) + len(others)) * pool.codec.blocks_per_extent
        return len(self.vacant(pool)) + len(self.cached(pool)) + common

    def settle(self) -> None:
        """Blocks that are nobody's go, and idle extents are noted."""
        self.now += 1
        for block, held in list(self.blocks.items()):
            if not held.busy and not held.kept:
                del self.blocks[block]
        idle = [extent for extent in self.all if self.owner(extent) is not None and not self.busy(extent)]
        self.idle = {extent: self.idle.get(extent, self.now) for extent in idle}

    def evict_one(self, pool: BlockPool) -> None:
        foreign = [extent for extent in self.idle if self.owner(extent) is not pool]
        oldest, own = min(foreign, key=lambda extent: self.idle[extent], default=None), self.cached(pool)
        if oldest is not None and (not own or self.idle[oldest] < self.blocks[own[0]].since):
            for block in [b for b in self.blocks if b // UNITS * UNITS == oldest]:
                del self.blocks[block]
            del self.idle[oldest]
        else:
            del self.blocks[own[0]]
            if self.owner(own[0] // UNITS * UNITS) is None:
                self.idle.pop(own[0] // UNITS * UNITS, None)

    def take(self, pool: BlockPool, *, thrifty: bool) -> int:
        beside = [extent for extent in self.held_by(pool) if self.busy(extent)]
        spare = [block for block in self.vacant(pool) if block // UNITS * UNITS in beside]
        kept = [block for block in self.cached(pool) if block // UNITS * UNITS in beside]
        if thrifty and spare:
            return spare[0]
        if thrifty and kept:
            return kept[0]
        while not self.vacant(pool) and not self.free():
            self.evict_one(pool)
        return (self.vacant(pool) or self.free())[0]

    @rule(which=st.integers(0, 2), count=st.integers(0, 6), thrifty=st.booleans())
    def allocate(self, which: int, count: int, thrifty: bool) -> None:
        pool = self.pools[which]
        self.extents.thrifty = thrifty
        thrifty = thrifty and pool.codec is not FP16
        if count > self.available(pool):
            with pytest.raises(OutOfBlocks):
                pool.allocate(count)
            return
        per = pool.codec.blocks_per_extent
        while not thrifty and len(self.vacant(pool)) + len(self.free()) * per < count:
            self.evict_one(pool)
        expected = []
        for _ in range(count):
            block = self.take(pool, thrifty=thrifty)
            self.blocks[block] = Held(pool)
            self.idle.pop(block // UNITS * UNITS, None)
            expected.append(block)
        assert pool.allocate(count) == expected
        self.settle()

    def draw(self, data: st.DataObject, *, referred: bool) -> tuple[int, Held] | None:
        found = [block for block, held in self.blocks.items() if not referred or held.refs]
        if not found:
            return None
        block = data.draw(st.sampled_from(found))
        return block, self.blocks[block]

    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        drawn = self.draw(data, referred=True)
        if drawn is None:
            return
        block, held = drawn
        if keep and not held.kept:
            held.pool.keep(block)
            held.kept = True
        held.pool.release(block)
        held.refs -= 1
        held.since = self.now + 1
        self.settle()

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        drawn = self.draw(data, referred=False)
        if drawn is None:
            return
        block, held = drawn
        if not held.refs and not held.kept:  # behind a fence
            with pytest.raises(BlockStateError):
                held.pool.acquire(block)
            return
        held.pool.acquire(block)
        held.refs += 1
        self.settle()

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        drawn = self.draw(data, referred=False)
        if drawn is not None and drawn[1].kept:
            drawn[1].pool.forget(drawn[0])
            drawn[1].kept = False
            self.settle()

    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        drawn = self.draw(data, referred=False)
        if drawn is not None:
            self.fences.append((drawn[1].pool.fence([drawn[0]]), drawn[0]))
            drawn[1].fences += 1
            self.settle()

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def release_fence(self, data: st.DataObject) -> None:
        fence, block = self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1)))
        fence.release()
        held = self.blocks[block]
        held.fences -= 1
        if not held.busy:
            held.since = self.now + 1
        self.settle()

    @rule(extent=st.integers(0, 3), back=st.booleans())
    def withhold_or_restore(self, extent: int, back: bool) -> None:
        extent *= UNITS
        if back and extent in self.withheld:
            self.extents.restore([extent])
            self.withheld.remove(extent)
        elif not back and extent in self.free():
            self.extents.withhold([extent])
            self.withheld.add(extent)

    @rule(extent=st.integers(0, 3))
    def reclaim(self, extent: int) -> None:
        extent *= UNITS
        self.extents.reclaim(extent)
        if extent in self.idle:
            for block in [b for b in self.blocks if b // UNITS * UNITS == extent]:
                del self.blocks[block]
            self.settle()

    @invariant()
    def agree(self) -> None:
        self.extents.check()
        assert sorted(self.extents.free) == self.free()
        assert self.extents.used == sum(self.busy(extent) for extent in self.all)
        assert self.extents.reclaimable() == dict.fromkeys(self.free(), 0) | {
            extent: pool.idle[extent] for pool in self.pools for extent in self.idle if self.owner(extent) is pool
        }
        for pool in self.pools:
            mine = {block: held for block, held in self.blocks.items() if held.pool is pool}
            assert {block: refs for block, refs in enumerate(pool.refs) if refs} == {
                block: held.refs for block, held in mine.items() if held.refs
            }
            assert pool.cached_blocks() == self.cached(pool)
            assert pool.fenced == sum(held.fences > 0 and not held.refs for held in mine.values())
            assert pool.used == sum(held.refs > 0 for held in mine.values())
            assert pool.available == self.available(pool) == pool.spare + pool.per_extent * self.extents.common
            counts = (pool.free, pool.cached, pool.fenced, pool.used, pool.withheld, pool.elsewhere)
            assert sum(counts) == pool.total


TestPoolsAgainstModel = PoolsAgainstModel.TestCase
TestPoolsAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), demand=st.tuples(*[st.integers(0, 6)] * 3), order=st.permutations(range(3)))
def test_what_fits_together_can_be_had_in_any_order_and_nothing_else(
    seed: int, demand: tuple[int, int, int], order: list[int]
) -> None:
    """That is what promises rest on: thrifty pools leave the others as much as was reckoned."""
    rng = random.Random(seed)
    extents, codecs = pools(rng.randint(1, 5))
    for _ in range(rng.randint(0, 12)):
        pool = rng.choice(codecs)
        if pool.available:
            for block in pool.allocate(rng.randint(1, min(pool.available, 5))):
                if rng.random() < 0.3:
                    pool.keep(block)
                if rng.random() < 0.6:
                    pool.release(block)
    extents.thrifty = True
    fits = sum(pool.extents_for(count) for pool, count in zip(codecs, demand, strict=True)) <= extents.common
    try:
        for which in order:
            codecs[which].allocate(demand[which])
    except OutOfBlocks:
        assert not fits
    else:
        assert fits
    extents.check()


def test_the_codecs_are_known_by_how_many_fit_into_an_extent() -> None:
    assert {codec.name: codec.blocks_per_extent for codec in CODECS.values()} == {"fp16": 1, "int8": 2, "int4": 4}

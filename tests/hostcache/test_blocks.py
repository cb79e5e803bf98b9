from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostcache import BlockPool, Fence
from hostcache.errors import BlockStateError, OutOfBlocks, UsageError


def test_the_lowest_free_block_is_handed_out_first() -> None:
    pool = BlockPool(6, 16)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release(2)
    pool.release(0)
    assert pool.allocate(3) == [0, 2, 4]


def test_one_block_at_a_time_is_as_many_at_once() -> None:
    pool = BlockPool(3, 16)
    assert [pool.allocate_one(), *pool.allocate(2)] == [0, 1, 2]
    assert (pool.refs, pool.generation) == ([1, 1, 1], [1, 1, 1])
    pool.keep(1)
    pool.release(1)
    assert pool.allocate_one() == 1  # evicted for it
    assert (pool.refs, pool.generation) == ([1, 1, 1], [1, 2, 1])
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 available"):
        pool.allocate_one()


def test_too_many_blocks_take_nothing() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 available") as caught:
        pool.allocate(2)
    assert caught.value.values == {"asked": 2, "available": 1, "total": 4}
    assert (pool.free, pool.used) == (1, 3)


def test_a_block_is_freed_once() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(BlockStateError, match="block 0 was released while nobody referred to it"):
        pool.release(block)
    with pytest.raises(BlockStateError, match="acquired while free"):
        pool.acquire(block)
    with pytest.raises(BlockStateError, match="fenced while free"):
        pool.fence([block])


def test_a_generation_tells_one_owner_from_the_next() -> None:
    pool = BlockPool(2, 16)
    assert pool.generation == [0, 0]
    pool.allocate(1)
    pool.release(0)
    pool.allocate(1)
    assert pool.generation == [2, 0]
    pool.allocate(1)
    assert pool.generation == [2, 1]


def test_a_generation_lasts_as_long_as_the_content() -> None:
    pool = BlockPool(1, 16)
    pool.allocate(1)
    pool.acquire(0)  # a fork
    pool.keep(0)
    with pool.fence([0]):
        pool.release(0)
        pool.release(0)
    assert pool.is_cached(0)
    pool.acquire(0)  # a prefix hit
    pool.forget(0)
    assert pool.generation == [1]
    pool.keep(0)
    pool.release(0)
    assert pool.allocate(1) == [0]  # evicted and handed to somebody else
    assert pool.generation == [2]


def test_a_kept_block_stays_until_blocks_run_out() -> None:
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    pool.keep(first)
    pool.keep(second)
    pool.release(second)
    pool.release(first)
    assert (pool.free, pool.cached, pool.available) == (1, 2, 3)
    assert pool.allocate(2) == [1, 2]  # the free block 2, and block 1, which was released first
    assert pool.is_cached(first)


def test_a_kept_block_is_immutable_even_with_one_owner() -> None:
    pool = BlockPool(1, 16)
    pool.allocate(1)
    assert pool.writable(0)
    pool.keep(0)
    assert not pool.writable(0)
    with pytest.raises(BlockStateError, match="cannot be kept"):
        pool.keep(0)
    pool.forget(0)
    assert pool.writable(0)
    with pytest.raises(BlockStateError, match="never kept"):
        pool.forget(0)


def test_a_fenced_block_is_not_reused_before_its_fence_is_released() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    fence, second = pool.fence([block]), pool.fence([block])
    pool.release(block)
    assert (pool.fenced, pool.available) == (1, 1)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    fence.release()
    fence.release()
    assert pool.fenced == 1  # the other reader is not done
    second.release()
    assert pool.allocate(2) == [0, 1]


def test_a_cached_block_is_not_evicted_while_it_is_being_read() -> None:
    pool = BlockPool(1, 16)
    pool.allocate(1)
    pool.keep(0)
    pool.release(0)
    with pool.fence([0]):
        assert (pool.cached, pool.fenced) == (0, 1)
        with pytest.raises(OutOfBlocks):
            pool.allocate(1)
        pool.acquire(0)  # a hit may still share it
        pool.release(0)
    assert (pool.cached, pool.fenced) == (1, 0)


def test_a_fence_that_cannot_hold_all_its_blocks_holds_none() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    with pytest.raises(BlockStateError):
        pool.fence([0, 1])
    with pytest.raises(IndexError):
        pool.fence([0, 2])
    pool.release(0)
    assert pool.free == 2


def test_withheld_blocks_are_not_handed_out_before_they_are_restored() -> None:
    pool = BlockPool(4, 16)
    pool.extents.withhold([0, 2])
    assert (pool.free, pool.withheld, pool.used, pool.available) == (2, 2, 0, 2)
    with pytest.raises(OutOfBlocks, match=r"\(2 free, 0 cached, 0 fenced, 0 used, 2 withheld of 4\)"):
        pool.allocate(3)
    pool.extents.restore([2])
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.extents.withheld == {0}
    assert (pool.withheld, pool.used) == (1, 3)


def test_only_free_blocks_are_withheld_and_only_withheld_ones_restored() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(2)
    pool.keep(0)
    pool.release(0)
    for taken in (0, 1):  # cached, used
        with pytest.raises(BlockStateError, match=rf"extents \[{taken}\] cannot be withheld: they are not free"):
            pool.extents.withhold([taken, 3])
    pool.extents.withhold([3])
    with pytest.raises(BlockStateError, match=r"extents \[3\] cannot be withheld"):
        pool.extents.withhold([2, 3])
    with pytest.raises(BlockStateError, match=r"extents \[2\] cannot be restored: they are not withheld"):
        pool.extents.restore([2, 3])
    for use in (pool.acquire, pool.keep, lambda block: pool.fence([block])):
        with pytest.raises(BlockStateError):
            use(3)
    assert (pool.free, pool.cached, pool.used, pool.withheld) == (1, 1, 1, 1)


def test_a_block_is_evicted_after_those_that_hang_on_it() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(3)
    for block in (0, 1, 2):
        pool.keep(block)
    pool.release_all([0, 1, 2])
    behind = {0: 1}  # 1 is reachable through 0 only
    asked: list[int] = []

    def evict(block: int) -> int:
        asked.append(block)
        victim = behind.pop(block, block)
        pool.forget(victim)
        return victim

    pool.evict = evict
    pool.evict_block(0)
    assert asked == [0, 0]
    assert pool.cached_blocks() == [2]
    assert pool.free == 2
    pool.evict_block(0)  # it is free by now
    assert asked == [0, 0]


def test_blocks_are_acquired_together_whoever_has_them() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(3)
    pool.keep(1)
    pool.release(1)  # cached
    pool.acquire_all([0, 1, 2])
    assert pool.refs == [2, 1, 2, 0]
    assert (pool.used, pool.cached) == (3, 0)
    with pytest.raises(BlockStateError, match="block 3 was acquired while free"):
        pool.acquire_all([0, 3, 2])
    pool.release_all([0, 0, 1, 2])
    assert pool.refs == [1, 0, 1, 0]
    with pytest.raises(BlockStateError, match="block 1 was released while nobody referred to it"):
        pool.release_all([1, 2])
    assert pool.cached_blocks() == [1]


def test_no_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one block"):
        BlockPool(0, 16)


def test_check_sees_a_block_in_two_states() -> None:
    pool = BlockPool(2, 16)
    pool.check()
    pool.refs[1] = 1
    with pytest.raises(BlockStateError, match="block 1 is in 2 states"):
        pool.check()


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool against sets that say the same thing in the slowest way."""

    total = 5

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.total, 16)
        self.refs = dict.fromkeys(range(self.total), 0)
        self.kept: set[int] = set()
        self.withheld: set[int] = set()
        self.order: list[int] = []  # kept blocks, in the order in which they were last let go
        self.fences: list[tuple[Fence, list[int]]] = []

    def fenced(self, block: int) -> bool:
        return any(block in blocks for _, blocks in self.fences)

    def free(self) -> set[int]:
        empty = {b for b, refs in self.refs.items() if not refs and b not in self.kept and not self.fenced(b)}
        return empty - self.withheld

    def cached(self) -> list[int]:
        return [b for b in self.order if not self.refs[b] and b in self.kept and not self.fenced(b)]

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free, cached = self.free(), self.cached()
        if count > len(free) + len(cached):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        evicted = cached[: max(0, count - len(free))]
        expected = sorted(free | set(evicted))[:count]
        assert self.pool.allocate(count) == expected
        self.kept -= set(evicted)
        for block in expected:
            self.refs[block] = 1

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, refs in self.refs.items() if refs]))
        self.pool.release(block)
        self.refs[block] -= 1
        self.settle(block)

    def settle(self, block: int) -> None:
        if not self.refs[block] and block in self.kept and not self.fenced(block):
            self.order = [b for b in self.order if b != block] + [block]

    @rule(block=st.integers(0, total - 1))
    def acquire(self, block: int) -> None:
        if self.refs[block] or block in self.kept:
            self.pool.acquire(block)
            self.refs[block] += 1
        else:
            with pytest.raises(BlockStateError):
                self.pool.acquire(block)

    @rule(block=st.integers(0, total - 1))
    def keep_or_forget(self, block: int) -> None:
        if block in self.kept:
            self.pool.forget(block)
            self.kept.remove(block)
        elif self.refs[block]:
            self.pool.keep(block)
            self.kept.add(block)
        else:
            with pytest.raises(BlockStateError):
                self.pool.keep(block)

    @rule(blocks=st.sets(st.integers(0, total - 1)))
    def withhold(self, blocks: set[int]) -> None:
        if blocks <= self.free():
            self.pool.extents.withhold(blocks)
            self.withheld |= blocks
        else:
            with pytest.raises(BlockStateError):
                self.pool.extents.withhold(blocks)

    @rule(blocks=st.sets(st.integers(0, total - 1)))
    def restore(self, blocks: set[int]) -> None:
        if blocks <= self.withheld:
            self.pool.extents.restore(blocks)
            self.withheld -= blocks
        else:
            with pytest.raises(BlockStateError):
                self.pool.extents.restore(blocks)

    @rule(block=st.integers(0, total - 1))
    def evict_block(self, block: int) -> None:
        if block in self.cached():
            self.kept.remove(block)
        self.pool.evict_block(block)

    @rule(blocks=st.lists(st.integers(0, total - 1), unique=True))
    def fence(self, blocks: list[int]) -> None:
        empty = [b for b in blocks if not (self.refs[b] or b in self.kept or self.fenced(b))]
        if empty:
            fenced_first = blocks[: blocks.index(empty[0])]
            before = [b for b in fenced_first if b in self.cached()]
            with pytest.raises(BlockStateError):
                self.pool.fence(blocks)
            for block in before:  # the fence that failed let them go again, newest last
                self.settle(block)
            return
        self.fences.append((self.pool.fence(blocks), blocks))

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def release_fence(self, data: st.DataObject) -> None:
        fence, blocks = self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1)))
        fence.release()
        for block in blocks:
            self.settle(block)

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        assert self.pool.refs == list(self.refs.values())
        assert self.pool.free == len(self.free())
        assert self.pool.cached_blocks() == self.cached()
        assert self.pool.withheld == len(self.withheld)
        assert self.pool.used == sum(refs > 0 for refs in self.refs.values())
        states = (self.pool.free, self.pool.cached, self.pool.fenced, self.pool.used, self.pool.withheld)
        assert sum(states) == self.total


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache, SwapSpace, SwapTicket
from hostcache.bandwidth import Bandwidth
from hostcache.errors import BlockStateError, OutOfBlocks, RegionError, SwapError, UsageError
from hostcache.swap_store import FileStore

SMALL = KVGeometry(layers=2, kv_heads=1, head_dim=8, block_tokens=4)


def pool_of(blocks: int) -> PagedKVCache:
    return PagedKVCache.create(SMALL, blocks * SMALL.block_bytes)


MakeSpace = Callable[..., SwapSpace]


@pytest.fixture
def space() -> Iterator[MakeSpace]:
    """Makes swap spaces of so many blocks, which are closed when the test ends."""
    with contextlib.ExitStack() as closing:

        def make(blocks: int, cache: PagedKVCache, folder: Path | None = None) -> SwapSpace:
            swap = SwapSpace(blocks * SMALL.block_bytes, cache, folder)
            closing.callback(swap.close)
            return swap

        yield make


def fill(cache: PagedKVCache, blocks: list[int], seed: int) -> NDArray[np.uint8]:
    """Random bytes in blocks of one table; returns a copy of them, `[blocks, bytes]`."""
    content = np.random.default_rng(seed).integers(0, 256, (len(blocks), SMALL.block_bytes)).astype(np.uint8)
    for block, row in zip(blocks, content, strict=True):
        cache.overwrite(block, row, 4)
    return content


def content_of(cache: PagedKVCache, blocks: list[int]) -> NDArray[np.uint8]:
    return np.array([cache.view(block) for block in blocks])


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "file" else None


def test_blocks_come_back_as_they_were_wherever_they_are_put(space: MakeSpace, folder: Path | None) -> None:
    cache = pool_of(8)
    swap = space(4, cache, folder)
    blocks = cache.pool.allocate(3)
    before = fill(cache, blocks, 1)
    ticket = swap.put(blocks)
    assert ticket is not None
    assert (swap.used, swap.free, ticket.blocks) == (3, 1, 3)
    cache.pool.release_all(blocks)
    fill(cache, cache.pool.allocate(3), 2)  # somebody else has the old places
    places = cache.pool.allocate(3)
    assert set(places).isdisjoint(blocks)
    swap.take(ticket, places[::-1])
    assert np.array_equal(content_of(cache, places[::-1]), before)
    assert (swap.used, swap.stats.put_blocks, swap.stats.taken_blocks) == (0, 3, 3)
    swap.check()
    swap.close()


def test_restore_needs_no_contiguous_blocks(space: MakeSpace, folder: Path | None) -> None:
    """Three sequences interleaved in the pool; one goes, and comes back into the holes the others leave."""
    cache = pool_of(9)
    swap = space(3, cache, folder)
    tables = [[], [], []]  # type: list[list[int]]
    for _ in range(3):
        for table in tables:
            table.extend(cache.pool.allocate(1))
    assert tables == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    contents = [fill(cache, table, seed) for seed, table in enumerate(tables)]
    ticket = swap.put(tables[1])
    assert ticket is not None
    cache.pool.release_all(tables[1])
    holes = cache.pool.allocate(3)
    assert holes == [1, 4, 7]
    fill(cache, holes, 9)
    swap.take(ticket, [7, 1, 4])
    assert np.array_equal(content_of(cache, [7, 1, 4]), contents[1])
    assert np.array_equal(content_of(cache, tables[0]), contents[0])
    assert np.array_equal(content_of(cache, tables[2]), contents[2])


def test_swapped_work_is_resumable_when_the_space_holds_one_of_two(space: MakeSpace, folder: Path | None) -> None:
    """Room for one block, two sequences to go: the second is told to recompute, the first resumes, then the second."""
    cache = pool_of(2)
    swap = space(1, cache, folder)
    first, second = cache.pool.allocate(2)
    contents = fill(cache, [first, second], 3)
    ticket = swap.put([first])
    assert ticket is not None
    assert swap.put([second]) is None
    assert swap.stats.refused == 1
    fill(cache, [first], 4)
    swap.take(ticket, [first])
    assert np.array_equal(content_of(cache, [first, second]), contents)
    again = swap.put([second])
    assert again is not None
    swap.take(again, [second])
    assert np.array_equal(content_of(cache, [first, second]), contents)


def test_swap_is_bounded_and_a_refusal_takes_nothing(space: MakeSpace, folder: Path | None) -> None:
    cache = pool_of(8)
    swap = space(5, cache, folder)
    assert swap.total == 5
    blocks = cache.pool.allocate(8)
    tickets = [swap.put(blocks[:2]), swap.put(blocks[2:4])]
    assert swap.put(blocks[4:6]) is None
    assert swap.put(blocks[4:5]) is not None  # what still fits is taken
    assert swap.free == 0
    assert swap.put([]) is not None
    for ticket in tickets:
        assert ticket is not None
        swap.drop(ticket)
    assert swap.free == 4
    assert swap.stats.dropped_blocks == 4
    swap.check()


def test_a_ticket_is_good_once(space: MakeSpace, folder: Path | None) -> None:
    cache = pool_of(4)
    swap = space(4, cache, folder)
    blocks = cache.pool.allocate(2)
    fill(cache, blocks, 5)
    taken, dropped = swap.put(blocks[:1]), swap.put(blocks[1:])
    assert taken is not None
    assert dropped is not None
    swap.take(taken, blocks[:1])
    swap.drop(dropped)
    for ticket in (taken, dropped, SwapTicket(77, 1)):
        with pytest.raises(BlockStateError, match=rf"ticket {ticket.id} was taken or dropped before"):
            swap.take(ticket, blocks[:1])
        with pytest.raises(BlockStateError, match=rf"ticket {ticket.id} was taken or dropped before"):
            swap.drop(ticket)
    assert (swap.used, swap.stats.dropped_blocks) == (0, 1)


def test_two_tickets_do_not_touch_each_other(space: MakeSpace, folder: Path | None) -> None:
    """One is taken while the other waits, and its room is used again at once."""
    cache = pool_of(6)
    swap = space(4, cache, folder)
    left, right = cache.pool.allocate(2), cache.pool.allocate(2)
    contents = fill(cache, left, 6), fill(cache, right, 7)
    first, second = swap.put(left), swap.put(right)
    assert first is not None
    assert second is not None
    swap.take(first, left)
    third = swap.put(left[:1])
    fill(cache, right, 8)
    swap.take(second, right)
    assert np.array_equal(content_of(cache, right), contents[1])
    fill(cache, left[:1], 8)
    assert third is not None
    swap.take(third, left[:1])
    assert np.array_equal(content_of(cache, left), contents[0])


def test_shared_and_kept_blocks_are_only_read(space: MakeSpace, folder: Path | None) -> None:
    cache = pool_of(4)
    swap = space(4, cache, folder)
    (block,) = cache.pool.allocate(1)
    before = fill(cache, [block], 9)
    cache.pool.acquire(block)  # a fork
    cache.pool.keep(block)  # published
    ticket = swap.put([block])
    assert ticket is not None
    assert cache.pool.refs[block] == 2
    assert cache.pool.is_kept(block)
    for place, why in ((block, "shared or kept"), (3, "free")):
        with pytest.raises(BlockStateError, match=why):
            swap.take(ticket, [place])
    cache.pool.release(block)
    with pytest.raises(BlockStateError, match="kept"):  # one table, but the tree knows it
        swap.take(ticket, [block])
    assert np.array_equal(content_of(cache, [block]), before)
    places = cache.pool.allocate(1)
    swap.take(ticket, places)  # the ticket outlived the mistakes
    assert np.array_equal(content_of(cache, places), before)


def test_what_cannot_be_meant_is_refused(space: MakeSpace, folder: Path | None) -> None:
    cache = pool_of(4)
    swap = space(4, cache, folder)
    blocks = cache.pool.allocate(2)
    with pytest.raises(BlockStateError, match="block 3 was put into swap while free"):
        swap.put([*blocks, 3])
    with pytest.raises(UsageError, match="there is no block 4 among 4"):
        swap.put([4])
    with pytest.raises(UsageError, match="there is no block -1 among 4"):
        swap.put([-1])
    assert swap.used == 0
    ticket = swap.put(blocks)
    assert ticket is not None
    with pytest.raises(UsageError, match="2 blocks were put, 1 are to take them"):
        swap.take(ticket, blocks[:1])
    assert swap.used == 2
    with pytest.raises(UsageError, match="does not hold one block of"):
        SwapSpace(SMALL.block_bytes - 1, cache)


def test_counts_conserve_when_a_put_is_interrupted(
    space: MakeSpace, folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pool_of(4)
    swap = space(4, cache, folder)
    blocks = cache.pool.allocate(3)
    copies = iter([None, KeyboardInterrupt])

    def interrupted(*_: object) -> None:
        if stop := next(copies):
            raise stop

    monkeypatch.setattr(swap._store, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swap.put(blocks)
    assert (swap.free, swap.stats.put_blocks) == (4, 0)
    swap.check()


def test_a_take_that_is_interrupted_can_be_repeated(
    space: MakeSpace, folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pool_of(4)
    swap = space(4, cache, folder)
    blocks = cache.pool.allocate(2)
    before = fill(cache, blocks, 10)
    ticket = swap.put(blocks)
    assert ticket is not None

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(swap._store, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swap.take(ticket, blocks)
    fill(cache, blocks, 11)
    swap.take(ticket, blocks)
    assert np.array_equal(content_of(cache, blocks), before)
    swap.check()


def test_the_check_checks(space: MakeSpace) -> None:
    cache = pool_of(4)
    swap = space(4, cache)
    ticket = swap.put(cache.pool.allocate(2))
    assert ticket is not None
    swap._free.append(0)  # a slot that a ticket stands for
    with pytest.raises(BlockStateError, match="2 slots behind tickets and 3 free of 4"):
        swap.check()
    swap._free.remove(0)
    swap.check()
    swap.stats.taken_blocks += 1
    with pytest.raises(BlockStateError, match="2 blocks behind tickets, but"):
        swap.check()


def test_a_block_that_came_back_has_not_only_grown(space: MakeSpace) -> None:
    """Whoever keeps a staged copy of the place must see that other bytes are there, and then only growth."""
    cache = pool_of(2)
    swap = space(2, cache)
    table = cache.table()
    table.append(6)
    ones = np.ones((6, 1, 8), np.float32)
    for layer in range(2):
        cache.write(layer, table.slots(0, 6), ones, ones)
    ticket = swap.put(table.blocks)
    assert ticket is not None
    before = cache.rewrites.copy()
    swap.take(ticket, table.blocks)
    assert (cache.rewrites - before).tolist() == [1, 1]
    assert [cache.tokens_written(block) for block in table.blocks] == [4, 2]
    table.append(1)
    for layer in range(2):
        cache.write(layer, table.slots(6, 7), ones[:1], ones[:1])
    assert (cache.rewrites - before).tolist() == [1, 1]  # the next token behind them is growth, no rewrite


def test_a_swap_file_has_no_name_and_is_private(space: MakeSpace, tmp_path: Path) -> None:
    cache = pool_of(2)
    swap = space(2, cache, tmp_path)
    assert os.listdir(tmp_path) == []
    store = swap._store
    assert isinstance(store, FileStore)
    status = os.fstat(store._file.fileno())
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 2 * SMALL.block_bytes
    swap.close()
    swap.close()
    assert swap.put(cache.pool.allocate(1)) is None


def test_a_folder_without_room_is_refused_at_start(
    space: MakeSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pool_of(2)
    with pytest.raises(RegionError, match=r"cannot set 0\.0 MiB aside for swapping in .*none \(No such file"):
        space(2, cache, tmp_path / "none")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RegionError, match="No space left on device"):
        space(2, cache, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def broken(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_does_not_write_is_not_used_again(
    space: MakeSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pool_of(4)
    swap = space(4, cache, tmp_path)
    blocks = cache.pool.allocate(2)
    before = fill(cache, blocks, 12)
    kept = swap.put(blocks[:1])
    assert kept is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        assert swap.put(blocks[1:]) is None
    assert swap.failure == "the swap file failed: Input/output error"
    assert (swap.used, swap.stats.failures) == (1, 1)
    assert swap.put(blocks[1:]) is None  # although the file would work again
    swap.take(kept, blocks[:1])  # what was written before is not lost
    assert np.array_equal(content_of(cache, blocks), before)
    swap.check()


def test_a_file_that_does_not_read_loses_one_ticket_and_says_so(
    space: MakeSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pool_of(4)
    swap = space(4, cache, tmp_path)
    blocks = cache.pool.allocate(3)
    before = fill(cache, blocks, 13)
    lost, other = swap.put(blocks[:2]), swap.put(blocks[2:])
    assert lost is not None
    assert other is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(SwapError, match=r"2 swapped blocks are lost .*Input/output error.*: .* recomputed"):
            swap.take(lost, blocks[:2])
    assert swap.used == 1
    with pytest.raises(BlockStateError):
        swap.take(lost, blocks[:2])
    swap.take(other, blocks[2:])
    assert np.array_equal(content_of(cache, blocks[2:]), before[2:])
    swap.check()


def test_a_lost_ticket_does_not_hold_on_to_the_pool(
    space: MakeSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is kept, as loggers and debuggers keep errors, and the pool closes nevertheless."""
    cache = pool_of(2)
    swap = space(2, cache, tmp_path)
    blocks = cache.pool.allocate(2)
    ticket = swap.put(blocks)
    assert ticket is not None
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(SwapError) as kept:
        swap.take(ticket, blocks)
    cache.close()
    assert kept.value.values == {"blocks": 2}


@pytest.mark.parametrize("damage", ["a bit", "cut short"])
def test_other_bytes_than_were_written_are_never_given_back(space: MakeSpace, tmp_path: Path, damage: str) -> None:
    cache = pool_of(2)
    swap = space(2, cache, tmp_path)
    blocks = cache.pool.allocate(2)
    fill(cache, blocks, 14)
    ticket = swap.put(blocks)
    assert ticket is not None
    assert isinstance(swap._store, FileStore)
    fd = swap._store._file.fileno()
    if damage == "a bit":
        position = SMALL.block_bytes + 17
        os.pwrite(fd, bytes([os.pread(fd, 1, position)[0] ^ 0x10]), position)
    else:
        os.ftruncate(fd, SMALL.block_bytes + 17)
    with pytest.raises(SwapError, match=r"holds other bytes|ends at byte"):
        swap.take(ticket, blocks)


def test_a_file_may_take_and_give_a_few_bytes_at_a_time(
    space: MakeSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is over when every byte has arrived, however slowly."""
    cache = pool_of(2)
    swap = space(2, cache, tmp_path)
    blocks = cache.pool.allocate(2)
    before = fill(cache, blocks, 15)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: read(fd, [into[0][:5]], offset))
    ticket = swap.put(blocks)
    assert ticket is not None
    fill(cache, blocks, 16)
    swap.take(ticket, blocks)
    assert np.array_equal(content_of(cache, blocks), before)


def clock_of(*times: float) -> Iterator[float]:
    return iter(times)


def test_the_estimate_is_what_was_measured() -> None:
    """Two blocks out in 4 s and back in 2 s: three blocks there and back take 9 s."""
    cache = pool_of(4)
    times = clock_of(0, 4, 10, 12)
    swap = SwapSpace(4 * SMALL.block_bytes, cache, clock=lambda: next(times))
    assert swap.seconds_for(3) == 0
    blocks = cache.pool.allocate(2)
    ticket = swap.put(blocks)
    assert ticket is not None
    assert swap.seconds_for(3) == pytest.approx(6)
    swap.take(ticket, blocks)
    assert swap.seconds_for(3) == pytest.approx(9)


def test_a_card_that_slows_down_is_noticed_soon() -> None:
    """Many copies of 1 s, then three of 10 s: with weights 1, 3/4, 9/16, ... these are 2.3125 of 4 in all."""
    rate = Bandwidth()
    for _ in range(100):
        rate.add(100, 1)
    assert rate.seconds_for(100) == pytest.approx(1)
    for _ in range(3):
        rate.add(100, 10)
    assert rate.seconds_for(100) == pytest.approx((2.3125 * 10 + 1.6875 * 1) / 4)


class SwapUnderPressure(RuleBasedStateMachine):
    """Sequences that grow, swap out and come back, over a pool and a swap space that are both too small."""

    @initialize(in_file=st.booleans())
    def start(self, in_file: bool) -> None:
        self.cache = pool_of(6)
        folder = tempfile.gettempdir() if in_file else None
        self.swap = SwapSpace(5 * SMALL.block_bytes, self.cache, folder)
        self.running: list[tuple[list[int], NDArray[np.uint8]]] = []
        self.away: list[tuple[SwapTicket, NDArray[np.uint8]]] = []
        self.seed = 0

    def teardown(self) -> None:
        if hasattr(self, "swap"):
            self.swap.close()

    @rule(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        try:
            blocks = self.cache.pool.allocate(count)
        except OutOfBlocks:
            return
        self.seed += 1
        self.running.append((blocks, fill(self.cache, blocks, self.seed)))

    @rule(which=st.integers(0, 9))
    def swap_out(self, which: int) -> None:
        if self.running:
            blocks, content = self.running.pop(which % len(self.running))
            room = self.swap.free
            ticket = self.swap.put(blocks)
            assert (ticket is None) == (len(blocks) > room)
            self.cache.pool.release_all(blocks)
            if ticket is not None:
                self.away.append((ticket, content))

    @rule(which=st.integers(0, 9))
    def come_back(self, which: int) -> None:
        if self.away:
            ticket, content = self.away[which % len(self.away)]
            try:
                blocks = self.cache.pool.allocate(ticket.blocks)
            except OutOfBlocks:
                return
            self.swap.take(ticket, blocks)
            self.away.remove((ticket, content))
            self.running.append((blocks, content))

    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        if self.away:
            self.swap.drop(self.away.pop(which % len(self.away))[0])

    @invariant()
    def everybody_has_what_is_theirs(self) -> None:
        if not hasattr(self, "swap"):
            return
        self.swap.check()
        self.cache.pool.check()
        assert self.swap.used == sum(ticket.blocks for ticket, _ in self.away)
        assert self.cache.pool.used == sum(len(blocks) for blocks, _ in self.running)
        for blocks, content in self.running:
            assert np.array_equal(content_of(self.cache, blocks), content)


TestSwapUnderPressure = SwapUnderPressure.TestCase
TestSwapUnderPressure.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

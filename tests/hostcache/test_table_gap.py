"""Tables that have let go of blocks in their middle, and whose keys were turned back over the gap."""

from __future__ import annotations

import pytest

from hostcache import BlockPool, BlockTable
from hostcache.errors import BlockStateError, UsageError

SIZE = 4


class Keys:
    """What stands in each slot: the position that its key is rotated to."""

    def __init__(self, total: int = 16) -> None:
        self.pool = BlockPool(total, SIZE)
        self.at: dict[int, int] = {}
        self.turns: list[int] = []

    def table(self) -> BlockTable:
        return BlockTable(self.pool, self.copy)

    def write(self, table: BlockTable, count: int) -> None:
        start = table.length
        table.append(count)
        for position in range(start, start + count):
            self.at[table.slot(position)] = position - table.gap.turned

    def copy(self, source: int, destination: int, tokens: int) -> None:
        for offset in range(tokens):
            self.at[destination * SIZE + offset] = self.at[source * SIZE + offset]

    def turn(self, source: int, destination: int, by: int) -> None:
        for offset in range(SIZE):
            if source * SIZE + offset in self.at:
                self.at[destination * SIZE + offset] = self.at[source * SIZE + offset] + by
        self.turns.append(by)

    def read(self, table: BlockTable) -> list[int]:
        front = min(table.gap.front, table.length)
        slots = [*table.slots(0, front), *table.slots(front + table.gap.tokens, table.length)]
        return [self.at[int(slot)] for slot in slots]


def test_positions_behind_a_gap_keep_their_slots() -> None:
    keys = Keys()
    table = keys.table()
    keys.write(table, 18)
    assert table.let_go(4, 8)
    assert (table.length, table.held, table.blocks, table.ids.tolist()) == (18, 10, [0, 3, 4], [0, 3, 4])
    assert keys.pool.free == 16 - 3
    assert [table.slot(p) for p in (3, 12, 17)] == [3, 12, 17]
    assert table.slots(12, 18).tolist() == [12, 13, 14, 15, 16, 17]
    assert keys.read(table) == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17]
    keys.write(table, 3)  # two of them in the last block, and one in block 1, the lowest that is free
    assert table.slots(18, 21).tolist() == [18, 19, 4]
    assert not table.let_go(4, 8)
    for start, stop in ((2, 6), (2, 14), (5, 6), (8, 13)):
        with pytest.raises(
            UsageError, match=rf"positions {start}\.\.{stop} are not within 0\.\.21, on one side of the 8"
        ):
            table.slots(start, stop)
    with pytest.raises(UsageError, match=r"let go of 12 tokens behind 0 .* whose gap is 8 tokens behind 4"):
        table.let_go(0, 12)
    with pytest.raises(UsageError, match="let go of 10 tokens behind 4"):
        table.let_go(4, 10)
    with pytest.raises(UsageError, match="truncate a table of 21 tokens to 11"):
        table.truncate(11)
    table.truncate(13)
    assert (table.length, table.held, table.blocks) == (13, 5, [0, 3])
    table.release()
    keys.write(table, 2)
    assert (table.held, table.gap.tokens, keys.read(table)) == (2, 0, [0, 1])


def test_turns_compose() -> None:
    """Twice: whatever was there at a turn stands where it would had nothing been in front; the front never moves."""
    keys = Keys()
    table = keys.table()
    keys.write(table, 18)
    table.let_go(4, 8)
    table.turn(keys.turn)
    assert keys.turns == [-8, -8]
    assert keys.read(table) == list(range(10))
    keys.write(table, 8)
    assert keys.read(table) == list(range(18))
    table.let_go(4, 16)
    table.turn(keys.turn)
    assert keys.turns[2:] == [-8, -8]
    assert keys.read(table) == list(range(10))
    assert (table.gap.front, table.gap.tokens, table.gap.turned) == (4, 16, 16)


def test_a_turn_that_failed_is_continued() -> None:
    """Nothing leaks, and no key is turned twice: neither the table's nor those of a fork from in between."""
    keys = Keys()
    table = keys.table()
    keys.write(table, 18)
    table.let_go(4, 8)

    def fail_at_the_second(source: int, destination: int, by: int) -> None:
        if keys.turns:
            raise MemoryError
        keys.turn(source, destination, by)

    with pytest.raises(MemoryError):
        table.turn(fail_at_the_second)
    assert (keys.pool.used, len(table.blocks), table.blocks_to_turn()) == (3, 3, 1)
    with pytest.raises(UsageError, match="with 1 blocks turned ahead"):
        table.let_go(4, 12)
    fork = table.fork()
    table.turn(keys.turn)
    fork.turn(keys.turn)
    assert keys.turns == [-8, -8, -8]
    assert keys.read(table) == keys.read(fork) == list(range(10))
    assert table.gap == fork.gap
    assert table.let_go(4, 12)
    table.release()
    fork.release()
    assert keys.pool.free == 16


def test_a_fork_has_the_gap_and_turns_copies_of_its_own() -> None:
    keys = Keys()
    parent = keys.table()
    keys.write(parent, 14)
    parent.let_go(4, 4)
    child = parent.fork()
    assert (child.gap, child.blocks, child.length, child.held) == (parent.gap, [0, 2, 3], 14, 10)
    assert child.blocks_to_turn() == 2  # the parent keeps both
    child.turn(keys.turn)
    assert keys.read(child) == list(range(10))
    assert keys.read(parent) == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
    assert [keys.pool.refs[block] for block in parent.blocks] == [2, 1, 1]
    keys.write(child, 1)  # into its own copy of the tail
    assert keys.read(parent)[-1] == 13
    assert parent.blocks_to_turn() == 1  # by now they are its alone: it frees each for the next


def test_what_the_prefix_cache_knows_stays_as_it_was() -> None:
    keys = Keys()
    table = keys.table()
    keys.write(table, 12)
    keys.pool.keep(2)
    table.let_go(0, 4)
    table.turn(keys.turn)
    assert keys.pool.cached_blocks() == [2]
    assert [keys.at[2 * SIZE + offset] for offset in range(SIZE)] == [8, 9, 10, 11]
    assert keys.read(table) == list(range(8))


def test_blocks_of_two_tables_are_let_go_of_once_by_each() -> None:
    keys = Keys()
    parent = keys.table()
    keys.write(parent, 16)
    child = parent.fork()
    parent.let_go(0, 8)
    assert (keys.pool.refs[0], keys.pool.refs[3]) == (1, 2)
    parent.release()
    child.let_go(0, 12)
    child.release()
    assert keys.pool.free == 16
    with pytest.raises(BlockStateError):
        keys.pool.release(0)


def test_a_table_of_which_nothing_is_left_goes_on() -> None:
    keys = Keys()
    table = keys.table()
    keys.write(table, 8)
    table.let_go(0, 8)
    assert (table.blocks, table.held, table.blocks_to_turn(), keys.pool.free) == ([], 0, 0, 16)
    table.turn(keys.turn)
    keys.write(table, 5)
    assert (table.length, keys.read(table)) == (13, [0, 1, 2, 3, 4])

from __future__ import annotations

import numpy as np
import pytest

from hostcache import BlockPool, BlockTable
from hostcache.errors import BlockStateError, OutOfBlocks, UsageError


class Copies(list[tuple[int, int, int]]):
    def __call__(self, source: int, destination: int, tokens: int) -> None:
        self.append((source, destination, tokens))


def make(total: int = 8) -> tuple[BlockPool, BlockTable, Copies]:
    pool, copies = BlockPool(total, 16), Copies()
    return pool, BlockTable(pool, copies), copies


def test_positions_map_to_slots_through_the_blocks() -> None:
    pool, table, _ = make()
    pool.allocate(1)  # so that the table does not begin at block 0
    table.append(18)
    assert table.blocks == [1, 2]
    assert table.slots(14, 18).tolist() == [16 + 14, 16 + 15, 32, 33]
    assert [table.slot(p) for p in (0, 15, 16, 17)] == [16, 31, 32, 33]
    assert table.ids.dtype == np.int32
    with pytest.raises(UsageError, match=r"positions 0\.\.19 are not within 0\.\.18"):
        table.slots(0, 19)


def test_a_block_is_taken_only_when_a_token_needs_it() -> None:
    pool, table, _ = make()
    for length in range(1, 49):
        assert table.blocks_needed(1) == (length % 16 == 1)
        table.append(1)
        assert len(table.blocks) == -(-length // 16)
    assert pool.used == 3


def test_a_table_that_cannot_grow_is_unchanged() -> None:
    _, table, _ = make(total=2)
    table.append(20)
    with pytest.raises(OutOfBlocks):
        table.append(13)
    assert (table.length, table.blocks) == (20, [0, 1])
    table.append(12)


def test_a_fork_shares_until_someone_writes() -> None:
    pool, parent, copies = make()
    parent.append(20)
    child = parent.fork()
    assert pool.refs[:2] == [2, 2]
    assert parent.blocks_needed(1) == 1
    child.append(1)
    assert copies == [(1, 2, 4)]  # four tokens of the shared tail were valid
    assert (parent.blocks, child.blocks) == ([0, 1], [0, 2])
    assert child.ids.tolist() == [0, 2]
    assert parent.blocks_needed(1) == 0  # the tail is the parent's alone again
    parent.append(1)
    assert copies == [(1, 2, 4)]


def test_a_fork_at_a_block_edge_copies_nothing() -> None:
    _, parent, copies = make()
    parent.append(16)
    child = parent.fork()
    child.append(1)
    parent.append(1)
    assert copies == []
    assert child.blocks[1] != parent.blocks[1]


def test_kept_content_is_never_written_over() -> None:
    pool, table, copies = make()
    table.append(16)
    pool.keep(0)
    table.truncate(10)
    assert table.blocks_needed(1) == 1
    table.append(1)
    assert copies == [(0, 1, 10)]
    assert table.blocks == [1]
    assert pool.is_cached(0)


def test_a_copy_on_write_that_finds_no_block_changes_nothing() -> None:
    pool, parent, copies = make(total=1)
    parent.append(4)
    child = parent.fork()
    with pytest.raises(OutOfBlocks):
        child.append(1)
    assert (child.blocks, pool.refs, copies) == ([0], [2], [])


@pytest.mark.parametrize(("length", "left"), [(0, 0), (1, 1), (16, 1), (17, 2), (40, 3)])
def test_truncate_gives_back_whole_blocks(length: int, left: int) -> None:
    pool, table, _ = make()
    table.append(40)
    table.truncate(length)
    assert (table.length, len(table.blocks), pool.used) == (length, left, left)


def test_truncate_refuses_what_is_not_there() -> None:
    _, table, _ = make()
    table.append(3)
    for length in (-1, 4):
        with pytest.raises(UsageError, match=f"truncate a table of 3 tokens to {length}"):
            table.truncate(length)


def test_a_negative_count_is_not_appended() -> None:
    pool, table, _ = make()
    table.append(20)
    with pytest.raises(UsageError, match="cannot append -4 tokens"):
        table.append(-4)
    assert (table.length, pool.used) == (20, 2)


def test_release_gives_everything_back_once() -> None:
    pool, table, _ = make()
    table.append(40)
    child = table.fork()
    table.release()
    assert pool.used == 3
    child.release()
    table.release()
    assert pool.free == 8


def test_a_table_adopts_only_when_it_is_empty_and_the_blocks_fit_the_tokens() -> None:
    pool, table, _ = make()
    blocks = pool.allocate(2)
    with pytest.raises(UsageError, match="cannot adopt 2 blocks for 33 tokens"):
        table.adopt(blocks, 33)
    table.adopt(blocks, 20)
    assert table.slots(19, 20).tolist() == [16 + 3]
    with pytest.raises(UsageError):
        table.adopt([], 0)


def test_ids_keep_up_when_the_table_grows_long() -> None:
    pool, table, _ = make(total=100)
    pool.allocate_one()  # so that no memory that was cleared passes for the ids
    for count in range(1, 100):
        table.append(16)
        assert table.ids.tolist() == table.blocks == list(range(1, count + 1))
    assert pool.free == 0


def test_a_table_released_behind_its_back_is_noticed() -> None:
    pool, table, _ = make()
    table.append(1)
    pool.release(0)
    with pytest.raises(BlockStateError):
        table.release()

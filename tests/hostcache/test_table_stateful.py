"""Block tables against lists of what was written, through forks, copies on write, truncation, gaps and kept blocks.

A token is a number of its own and how far it was turned; what a table has let go of is None.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostcache import BlockPool, BlockTable, Fence
from hostcache.errors import OutOfBlocks, UsageError

SIZE = 3  # tokens in a block

Tokens: TypeAlias = "list[tuple[int, int] | None]"


class TablesAgainstModel(RuleBasedStateMachine):
    """Every token ever written is a number of its own, so whatever is in a wrong place is seen."""

    total = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.total, SIZE)
        self.pool.evict = self.evict
        self.memory: list[Tokens] = [[(0, 0)] * SIZE for _ in range(self.total)]
        self.tables: list[tuple[BlockTable, Tokens]] = []  # and the tokens it holds, first position first
        self.turned: dict[BlockTable, int] = {}  # by how much those were turned that were
        self.kept: dict[int, Tokens] = {}  # block: its tokens when it was kept
        self.fences: list[tuple[Fence, int, Tokens]] = []
        self.next_token = 1

    def evict(self, oldest: int) -> int:
        del self.kept[oldest]
        return oldest

    def copy(self, source: int, destination: int, tokens: int) -> None:
        self.memory[destination][:tokens] = self.memory[source][:tokens]

    def turn(self, source: int, destination: int, by: int) -> None:
        assert self.owners(destination) == 0
        for offset, cell in enumerate(self.memory[source]):
            self.memory[destination][offset] = cell and (cell[0], cell[1] + by)

    def owners(self, block: int) -> int:
        return sum(block in table.blocks for table, _ in self.tables)

    def fenced(self, block: int) -> bool:
        return any(block == other for _, other, _ in self.fences)

    def available(self) -> int:
        return sum(not self.owners(block) and not self.fenced(block) for block in range(self.total))

    def write_behind(self, block: int, count: int) -> None:
        """A table writes into a block of its own: a fence keeps away new owners, not the one that is there."""
        for _, fenced, content in self.fences:
            if fenced == block:
                del content[count:]

    def draw(self, data: st.DataObject) -> tuple[BlockTable, Tokens]:
        return data.draw(st.sampled_from(self.tables))

    @precondition(lambda self: len(self.tables) < 4)
    @rule()
    def new(self) -> None:
        self.tables.append((BlockTable(self.pool, self.copy), []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 8))
    def append(self, data: st.DataObject, count: int) -> None:
        table, tokens = self.draw(data)
        tail_is_shared = len(tokens) % SIZE and (self.owners(table.blocks[-1]) > 1 or table.blocks[-1] in self.kept)
        needed = sum(position % SIZE == 0 for position in range(len(tokens), len(tokens) + count))
        needed += bool(count and tail_is_shared)
        assert table.blocks_needed(count) == needed
        assert not needed or count > table.own_until - table.length
        if needed > self.available():
            before = list(table.blocks)
            with pytest.raises(OutOfBlocks):
                table.append(count)
            assert table.blocks == before
            return
        if count and len(tokens) % SIZE and not tail_is_shared:
            self.write_behind(table.blocks[-1], len(tokens) % SIZE)
        table.append(count)
        for position in range(len(tokens), len(tokens) + count):
            slot = table.slot(position)
            self.memory[slot // SIZE][slot % SIZE] = (self.next_token, 0)
            tokens.append((self.next_token, 0))
            self.next_token += 1

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, tokens = self.draw(data)
        self.tables.append((table.fork(), list(tokens)))
        self.turned[self.tables[-1][0]] = self.turned.get(table, 0)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, tokens = self.draw(data)
        length = data.draw(st.integers(0, len(tokens)))
        if length and None in tokens[length:]:
            with pytest.raises(UsageError, match=f"to {length}"):
                table.truncate(length)
            return
        table.truncate(length)
        del tokens[length:]
        if not length:
            self.turned.pop(table, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), front=st.integers(0, 1), blocks=st.integers(0, 4))
    def let_go(self, data: st.DataObject, front: int, blocks: int) -> None:
        """A gap begins behind some blocks, or grows from there."""
        table, tokens = self.draw(data)
        first = tokens.index(None) if None in tokens else front * SIZE
        missing = tokens.count(None)
        if blocks * SIZE > missing and first + blocks * SIZE > len(tokens):
            with pytest.raises(UsageError, match=f"let go of {blocks * SIZE} tokens behind {first}"):
                table.let_go(first, blocks * SIZE)
            return
        assert table.let_go(first, blocks * SIZE) == (blocks * SIZE > missing)
        tokens[first : first + max(blocks * SIZE, missing)] = [None] * max(blocks * SIZE, missing)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def turn_back(self, data: st.DataObject) -> None:
        """What is behind the gap is moved up to it, each time by what it has grown."""
        table, tokens = self.draw(data)
        gone = tokens.count(None)
        behind = tokens.index(None) + gone if gone else 0
        shared = [self.owners(b) > 1 or self.fenced(b) for b in table.blocks[(behind - gone) // SIZE :]]
        assert table.blocks_to_turn() == sum(shared) + (not all(shared))
        if table.blocks_to_turn() > self.available():
            return
        table.turn(self.turn)
        by = self.turned.get(table, 0) - gone
        tokens[behind:] = [token and (token[0], token[1] + by) for token in tokens[behind:]]
        self.turned[table] = gone

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_entry(*self.draw(data))

    def release_entry(self, table: BlockTable, tokens: Tokens) -> None:
        table.release()
        self.tables.remove((table, tokens))

    @precondition(lambda self: any(table.blocks for table, _ in self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """As a prefix cache does with a block that is full, or with the tail of a sequence that has ended."""
        table, tokens = data.draw(st.sampled_from([entry for entry in self.tables if entry[0].blocks]))
        index = data.draw(st.integers(0, len(table.blocks) - 1))
        block, held = table.blocks[index], [token for token in tokens if token is not None]
        if block in self.kept:
            self.pool.forget(block)
            del self.kept[block]
        else:
            self.pool.keep(block)
            self.kept[block] = list(held[index * SIZE : (index + 1) * SIZE])
            if len(self.kept[block]) < SIZE:
                self.release_entry(table, tokens)

    @precondition(lambda self: self.kept and len(self.tables) < 4)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """A new table begins with a kept block, or with a part of one."""
        block = data.draw(st.sampled_from(sorted(self.kept)))
        tokens = self.kept[block][: data.draw(st.integers(1, SIZE))]
        table = BlockTable(self.pool, self.copy)
        self.pool.acquire(block)
        table.adopt([block], len(tokens))
        self.tables.append((table, list(tokens)))

    @rule(block=st.integers(0, total - 1), lower=st.booleans())
    def fence(self, block: int, *, lower: bool) -> None:
        """A copy out of a block begins, or the last one ends: no other owner may have written meanwhile."""
        if self.fences and lower:
            fence, block, content = self.fences.pop()
            assert self.memory[block][: len(content)] == content
            fence.release()
        elif block in self.kept and len(self.fences) < 2:
            self.fences.append((self.pool.fence([block]), block, list(self.kept[block])))

    @invariant()
    def every_table_reads_what_was_written_through_it(self) -> None:
        for table, tokens in self.tables:
            gone = tokens.count(None)
            front = tokens.index(None) if gone else 0
            slots = table.slots(0, front).tolist() + table.slots(front + gone, len(tokens)).tolist()
            held = [token for token in tokens if token is not None]
            assert [self.memory[slot // SIZE][slot % SIZE] for slot in slots] == held
            assert slots == [table.slot(p) for p, token in enumerate(tokens) if token is not None]
            assert table.ids.tolist() == table.blocks
            assert (table.length, table.held) == (len(tokens), len(held))
            assert len(table.blocks) == -(-len(held) // SIZE)
            with pytest.raises(UsageError):
                table.slots(0, len(tokens) + 1)

    @invariant()
    def kept_blocks_never_change(self) -> None:
        for block, tokens in self.kept.items():
            assert self.memory[block][: len(tokens)] == tokens

    @invariant()
    def the_pool_counts_the_tables(self) -> None:
        self.pool.check()
        assert self.pool.refs == [self.owners(block) for block in range(self.total)]
        assert self.pool.available == self.available()


TestTablesAgainstModel = TablesAgainstModel.TestCase
TestTablesAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

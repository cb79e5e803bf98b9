"""One sequence's blocks, in order: append, fork with copy-on-write, truncate, let go of some in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool
from .errors import UsageError

__all__ = ["NO_GAP", "BlockTable", "CopyBlock", "TableGap", "TurnAnyBlock", "TurnBlock"]

CopyBlock = Callable[[int, int, int], None]
"""`copy(source, destination, tokens)` copies the first `tokens` tokens of a block, all layers."""

TurnBlock = Callable[[int, int, int], None]
"""`turn(source, destination, by)` copies a block, all layers, its keys turned on by `by` positions, or back."""

TurnAnyBlock = Callable[..., None]
"""`turn(source, destination, by)` for fp16 blocks; with `codec=` for others."""


@dataclass(frozen=True)
class TableGap:
    """What a table has let go of.

    Attributes:
        front: tokens in front of the gap; whole blocks.
        tokens: tokens in the gap; whole blocks.
        turned: positions by which the keys behind it were turned back; at most `tokens`.
        ahead: blocks behind it that a turn which failed had turned back by all of `tokens`; the next one goes on there.
    """

    front: int = 0
    tokens: int = 0
    turned: int = 0
    ahead: int = 0


NO_GAP = TableGap()
"""Nothing is missing."""


class BlockTable:
    """Maps a sequence's positions to slots of the pool: position p is in block `p // block_tokens` of the table.

    The table owns one reference per entry. Entries are only appended or cut off at the end, never re-pointed,
    with two exceptions: before a token is written behind shared or kept content, the tail block is replaced by a
    private copy (copy-on-write); and `turn` replaces blocks whose keys change.

    A table may let go of blocks in its middle. Positions and lengths still count all tokens; those behind the gap are
    in block `(p - gap) // block_tokens`.

    Args:
        pool: where blocks come from and go back to.
        copy: copies one block's first tokens into another.

    Attributes:
        blocks: block ids, first position first. Read it; change it only through the methods.
        length: tokens that have a slot, or had one in the gap.
        gap: what it has let go of.
        own_until: how many may have one before the next block is taken, or a copy of a shared one. Whoever comes to
            share the last block does so by `fork`, or after this table has let go of it.

    Example:
        >>> from hostcache import KVGeometry, PagedKVCache
        >>> cache = PagedKVCache.create(KVGeometry(layers=1, kv_heads=1, head_dim=64), nbytes=1 << 20)
        >>> table = cache.table()
        >>> table.append(20)
        >>> table.blocks, table.slots(15, 18).tolist()
        ([0, 1], [15, 16, 17])
        >>> fork = table.fork()
        >>> fork.append(1)  # would land in block 1, which two tables share by now
        >>> fork.blocks
        [0, 2]
    """

    def __init__(self, pool: BlockPool, copy: CopyBlock) -> None:
        self.blocks: list[int] = []
        self.length = 0
        self.gap = NO_GAP
        self.own_until = 0
        self._pool = pool
        self._copy = copy
        self._ids = np.empty(16, dtype=np.int32)  # the same ids as an array; grows by doubling
        self._noted = 0  # how many of them are in it

    @property
    def pool(self) -> BlockPool:
        """Where its blocks come from."""
        return self._pool

    @property
    def ids(self) -> NDArray[np.int32]:
        """The block ids as int32 `[len(blocks)]`: a view that the next change overwrites; copy it to keep it."""
        count = len(self.blocks)
        if self._noted < count:
            if len(self._ids) < count:
                self._ids = np.empty(max(count, 2 * len(self._ids)), dtype=np.int32)
                self._noted = 0
            self._ids[self._noted : count] = self.blocks[self._noted :]
            self._noted = count
        return self._ids[:count]

    @property
    def shared_tail(self) -> int | None:
        """The block that the next token would land in but that this table may not write into; None if it may."""
        if self.length % self._pool.block_tokens == 0 or self._pool.writable(self.blocks[-1]):
            return None
        return self.blocks[-1]

    @property
    def held(self) -> int:
        """Tokens that have a slot: `length` without the gap."""
        return self.length - self.gap.tokens

    def adopt(self, blocks: Sequence[int], tokens: int, gap: TableGap = NO_GAP) -> None:
        """Start an empty table with blocks whose references the caller hands over.

        Args:
            blocks: block ids, already acquired for this table.
            tokens: the table's length: tokens they hold, and those in the gap; at most the last block is not full.
            gap: what is missing among them.

        Raises:
            UsageError: the table is not empty, or the blocks are not as many as the tokens need.
        """
        if self.length or len(blocks) != -(-(tokens - gap.tokens) // self._pool.block_tokens):
            raise UsageError(
                f"cannot adopt {len(blocks)} blocks for {tokens} tokens, {gap.tokens} of them missing, into a table of "
                f"{len(self.blocks)} blocks",
                blocks=len(blocks),
                tokens=tokens,
            )
        self.blocks.extend(blocks)
        self.gap = gap
        self.length = self.own_until = tokens

    def blocks_needed(self, count: int) -> int:
        """Blocks that `append(count)` would take from the pool, the private copy of a shared tail included."""
        size = self._pool.block_tokens
        grown = -(-(self.length + count - self.gap.tokens) // size) - len(self.blocks)
        return grown + (count > 0 and self.shared_tail is not None)

    def append(self, count: int) -> None:
        """Give the next `count` tokens slots.

        Raises:
            OutOfBlocks: the pool cannot provide them; the table is unchanged.
            UsageError: `count` is negative.
        """
        length = self.length + count
        if length <= self.own_until and count >= 0:
            self.length = length
            return
        if count < 0:
            raise UsageError(f"cannot append {count} tokens: truncate takes tokens back", count=count)
        pool, blocks = self._pool, self.blocks
        full = len(blocks) * pool.block_tokens + self.gap.tokens
        if count == 1 and length > full:  # as most blocks begin
            blocks.append(pool.allocate_one())
            self.length, self.own_until = length, full + pool.block_tokens
            return
        needed = self.blocks_needed(count)
        if needed:
            fresh = pool.allocate(needed)
            if self.shared_tail is not None:
                self._replace_tail(fresh.pop(0))
            blocks.extend(fresh)
        self.length = length
        self._own_all()

    def catch_up(self, ids: NDArray[np.int32], length: int) -> None:
        """Learn what was done in its name: blocks were allocated for it, and tokens got slots in them or lost them.

        Args:
            ids: int32, its block ids, none of them shared if there are more than before.
            length: tokens that have a slot, or had one in the gap.
        """
        fresh = ids[len(self.blocks) :].tolist()
        if fresh:
            self.blocks.extend(fresh)
            self._own_all()
        self.length = length

    def fork(self) -> BlockTable:
        """A second table over the same blocks; whoever writes first gets a private copy of the tail."""
        child = BlockTable(self._pool, self._copy)
        self._pool.acquire_all(self.blocks)
        child.adopt(self.blocks, self.length, self.gap)
        self.own_until = self.length
        return child

    def let_go(self, front: int, tokens: int) -> bool:
        """Let the gap grow to `tokens` tokens behind the first `front` ones: this table's references to them go.

        Args:
            front: whole blocks; the same in every call.
            tokens: whole blocks; fewer than are missing already change nothing.

        Returns:
            Whether any block went.

        Raises:
            UsageError: these are not whole blocks of the table behind where the gap began, or a turn failed and has to
                be repeated first.
        """
        size, gap = self._pool.block_tokens, self.gap
        if tokens <= gap.tokens:
            return False
        moved = gap.tokens and front != gap.front
        if front % size or tokens % size or front + tokens > self.length or moved or gap.ahead:
            raise UsageError(
                f"cannot let go of {tokens} tokens behind {front} in a table of {self.length} tokens in blocks of "
                f"{size}, whose gap is {gap.tokens} tokens behind {gap.front}, with {gap.ahead} blocks turned ahead",
                front=front,
                tokens=tokens,
            )
        first, count = front // size, (tokens - gap.tokens) // size
        dropped = self.blocks[first : first + count]
        del self.blocks[first : first + count]
        self._noted = min(self._noted, first)
        self.gap = TableGap(front, tokens, gap.turned)
        self._pool.release_all(dropped)
        return True

    def known_behind(self, front: int) -> int:
        """Blocks behind the first `front` tokens that the prefix cache knows."""
        return sum(1 for block in self.blocks[front // self._pool.block_tokens :] if self._pool.is_kept(block))

    def blocks_to_turn(self) -> int:
        """Blocks that must be available for `turn`: one to turn into, and one for each that it cannot free."""
        moved = self.blocks[self._first_to_turn :]
        staying = sum(1 for block in moved if not self._pool.would_free(block))
        return staying + (staying < len(moved))

    def turn(self, turn: TurnBlock) -> None:
        """Close the gap in the keys' positions: each block behind it is replaced by a copy that was turned back.

        Others that share these blocks, or know what they hold, keep them as they are. If `turn` raises, the next call
        turns what is left: no key is ever turned twice.

        Args:
            turn: how a block is turned.

        Raises:
            OutOfBlocks: fewer than `blocks_to_turn` are available.
        """
        by = self.gap.turned - self.gap.tokens
        for index in range(self._first_to_turn, len(self.blocks)):
            fresh = self._pool.allocate_one()
            try:
                turn(self.blocks[index], fresh, by)
            except BaseException:
                self._pool.release(fresh)
                raise
            self._repoint(index, fresh)
            self.gap = replace(self.gap, ahead=self.gap.ahead + 1)
        self.gap = replace(self.gap, turned=self.gap.tokens, ahead=0)
        if self.held > self.gap.front:
            self._own_all()

    def truncate(self, length: int) -> None:
        """Take back the slots of the tokens from `length` on.

        Raises:
            UsageError: `length` is negative, beyond the table or in front of the gap's end, and not 0.
        """
        if length == 0:
            self.gap = NO_GAP
        if not self.gap.front + self.gap.tokens <= length <= self.length:
            raise UsageError(f"cannot truncate a table of {self.length} tokens to {length}", length=length)
        keep = -(-(length - self.gap.tokens) // self._pool.block_tokens)
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self._noted = min(self._noted, keep)
        self.length = self.own_until = length
        self._pool.release_all(dropped)
        if length and self.shared_tail is None:
            self._own_all()

    def release(self) -> None:
        """Give every block back. The table is empty afterwards and may be used again."""
        self.truncate(0)

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slot ids (`block * block_tokens + offset`) of positions `start` to `stop - 1`, int64.

        Raises:
            UsageError: a position has no slot, or they are on both sides of the gap.
        """
        gap = self.gap
        behind = start >= gap.front + gap.tokens
        if not 0 <= start <= stop <= (self.length if behind else gap.front):
            raise UsageError(
                f"positions {start}..{stop} are not within 0..{self.length}, on one side of the {gap.tokens} missing "
                f"behind {gap.front}",
                start=start,
                stop=stop,
            )
        size, shift = self._pool.block_tokens, gap.tokens if behind else 0
        positions = np.arange(start - shift, stop - shift, dtype=np.int64)
        return self.ids[positions // size].astype(np.int64) * size + positions % size

    def slot(self, position: int) -> int:
        """Slot id of one position, which is not in the gap."""
        size = self._pool.block_tokens
        if position >= self.gap.front:
            position -= self.gap.tokens
        return self.blocks[position // size] * size + position % size

    @property
    def _first_to_turn(self) -> int:
        """Index of the first block that `turn` has not turned yet."""
        return self.gap.front // self._pool.block_tokens + self.gap.ahead

    def _replace_tail(self, fresh: int) -> None:
        shared = self.blocks[-1]
        self._copy(shared, fresh, self.length % self._pool.block_tokens)
        self._repoint(len(self.blocks) - 1, fresh)

    def _repoint(self, index: int, fresh: int) -> None:
        """A block has been copied: only now may the old one go, which was referenced until then."""
        old = self.blocks[index]
        self.blocks[index] = fresh
        self._noted = min(self._noted, index)
        self._pool.release(old)

    def _own_all(self) -> None:
        """The last block is nobody else's, and may be written to its end."""
        self.own_until = len(self.blocks) * self._pool.block_tokens + self.gap.tokens

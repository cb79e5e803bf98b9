"""One sequence's blocks, in order: append, fork with copy-on-write, truncate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool
from .errors import UsageError

__all__ = ["BlockTable", "CopyBlock"]

CopyBlock = Callable[[int, int, int], None]
"""`copy(source, destination, tokens)` copies the first `tokens` tokens of a block, all layers."""


class BlockTable:
    """Maps a sequence's positions to slots of the pool: position p is in block `p // block_tokens` of the table.

    The table owns one reference per entry. Entries are only appended or cut off at the end, never re-pointed,
    with one exception: before a token is written behind shared or kept content, the tail block is replaced by a
    private copy (copy-on-write).

    Args:
        pool: where blocks come from and go back to.
        copy: copies one block's first tokens into another.

    Attributes:
        blocks: block ids, first position first. Read it; change it only through the methods.
        length: tokens that have a slot.
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
        self.own_until = 0
        self._pool = pool
        self._copy = copy
        self._ids = np.empty(16, dtype=np.int32)  # the same ids as an array; grows by doubling

    @property
    def ids(self) -> NDArray[np.int32]:
        """The block ids as int32 `[len(blocks)]`: a view that the next change overwrites; copy it to keep it."""
        return self._ids[: len(self.blocks)]

    @property
    def shared_tail(self) -> int | None:
        """The block that the next token would land in but that this table may not write into; None if it may."""
        if self.length % self._pool.block_tokens == 0 or self._pool.writable(self.blocks[-1]):
            return None
        return self.blocks[-1]

    def adopt(self, blocks: Sequence[int], tokens: int) -> None:
        """Start an empty table with blocks whose references the caller hands over.

        Args:
            blocks: block ids, already acquired for this table.
            tokens: tokens they hold; at most the last block is not full.

        Raises:
            UsageError: the table is not empty, or the blocks are not as many as the tokens need.
        """
        if self.blocks or len(blocks) != -(-tokens // self._pool.block_tokens):
            raise UsageError(
                f"cannot adopt {len(blocks)} blocks for {tokens} tokens into a table of {len(self.blocks)} blocks",
                blocks=len(blocks),
                tokens=tokens,
            )
        self._extend(blocks)
        self.length = self.own_until = tokens

    def blocks_needed(self, count: int) -> int:
        """Blocks that `append(count)` would take from the pool, the private copy of a shared tail included."""
        size = self._pool.block_tokens
        grown = -(-(self.length + count) // size) - len(self.blocks)
        return grown + (count > 0 and self.shared_tail is not None)

    def append(self, count: int) -> None:
        """Give the next `count` tokens slots.

        Raises:
            OutOfBlocks: the pool cannot provide them; the table is unchanged.
            UsageError: `count` is negative.
        """
        if count < 0:
            raise UsageError(f"cannot append {count} tokens: truncate takes tokens back", count=count)
        needed = self.blocks_needed(count)
        if needed:
            fresh = self._pool.allocate(needed)
            if self.shared_tail is not None:
                self._replace_tail(fresh.pop(0))
            self._extend(fresh)
        self.length += count
        self.own_until = len(self.blocks) * self._pool.block_tokens

    def catch_up(self, ids: NDArray[np.int32], length: int) -> None:
        """Learn what was done in its name: blocks were allocated for it, and tokens got slots in them or lost them.

        Args:
            ids: int32, its block ids, none of them shared if there are more than before.
            length: tokens that have a slot.
        """
        fresh = ids[len(self.blocks) :].tolist()
        if fresh:
            self._extend(fresh)
            self.own_until = len(self.blocks) * self._pool.block_tokens
        self.length = length

    def fork(self) -> BlockTable:
        """A second table over the same blocks; whoever writes first gets a private copy of the tail."""
        child = BlockTable(self._pool, self._copy)
        for block in self.blocks:
            self._pool.acquire(block)
        child.adopt(self.blocks, self.length)
        self.own_until = self.length
        return child

    def truncate(self, length: int) -> None:
        """Take back the slots of the tokens from `length` on.

        Raises:
            UsageError: `length` is negative or beyond the table.
        """
        if not 0 <= length <= self.length:
            raise UsageError(f"cannot truncate a table of {self.length} tokens to {length}", length=length)
        keep = -(-length // self._pool.block_tokens)
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self.length = self.own_until = length
        self._pool.release_all(dropped)
        if length and self.shared_tail is None:
            self.own_until = keep * self._pool.block_tokens

    def release(self) -> None:
        """Give every block back. The table is empty afterwards and may be used again."""
        self.truncate(0)

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slot ids (`block * block_tokens + offset`) of positions `start` to `stop - 1`, int64.

        Raises:
            UsageError: a position has no slot.
        """
        if not 0 <= start <= stop <= self.length:
            raise UsageError(f"positions {start}..{stop} are not within 0..{self.length}", start=start, stop=stop)
        size = self._pool.block_tokens
        positions = np.arange(start, stop, dtype=np.int64)
        return self._ids[positions // size].astype(np.int64) * size + positions % size

    def slot(self, position: int) -> int:
        """Slot id of one position."""
        size = self._pool.block_tokens
        return self.blocks[position // size] * size + position % size

    def _replace_tail(self, fresh: int) -> None:
        shared = self.blocks[-1]
        self._copy(shared, fresh, self.length % self._pool.block_tokens)
        # The shared block was referenced until the copy was done; only now may it go.
        self.blocks[-1] = fresh
        self._ids[len(self.blocks) - 1] = fresh
        self._pool.release(shared)

    def _extend(self, blocks: Sequence[int]) -> None:
        start, stop = len(self.blocks), len(self.blocks) + len(blocks)
        if stop > len(self._ids):
            grown = np.empty(max(stop, 2 * len(self._ids)), dtype=np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = blocks
        self.blocks.extend(blocks)

"""Who owns each block of the pool, and which one is handed out next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .errors import BlockStateError, OutOfBlocks, UsageError

__all__ = ["BlockPool", "Fence"]


class BlockPool:
    """Reference counts over a fixed number of blocks.

    A block is in exactly one state, so `free + cached + fenced + used + withheld == total` always holds:

    - free: nobody refers to it and nothing in it is worth keeping;
    - used: at least one block table refers to it;
    - cached: nobody refers to it, but the prefix cache knows what it holds; taken back when blocks run out;
    - fenced: nobody refers to it any more, but a copy out of it is still running, so it may not be reused yet;
    - withheld: it was free, and its memory was given back; not handed out before it has memory again (`Balloon`).

    Allocation takes the lowest free block first: deterministic, and it keeps the used part of the pool low and
    its runs long. A block that the prefix cache holds (`keep`) is immutable for as long as it is held.

    Args:
        total: blocks in the pool.
        block_tokens: tokens per block.

    Attributes:
        refs: references per block.
        generation: per block, how often it was handed out. The pool does not read it: it is for whoever keeps copies of
            blocks from step to step, such as staged ones, to tell a new owner's content from the old one's. Sharing a
            block, releasing it and finding it again leave the content alone, and so the number. What an owner takes
            back and writes anew (`BlockTable.truncate`) does not show here.
        evict: set by the prefix cache; given the least recently used cached block, names the block to take
            back (that one, or one that is only reachable through it) after forgetting what it holds.

    Example:
        >>> from hostcache import BlockPool
        >>> pool = BlockPool(total=4, block_tokens=16)
        >>> pool.allocate(2)
        [0, 1]
        >>> pool.release(0)
        >>> pool.free, pool.used
        (3, 1)
    """

    def __init__(self, total: int, block_tokens: int) -> None:
        if total < 1:
            raise UsageError(f"a pool needs at least one block, got {total}", total=total)
        self.total = total
        self.block_tokens = block_tokens
        self.refs = [0] * total
        self.generation = [0] * total
        self.evict: Callable[[int], int] = lambda oldest: oldest
        self._free = list(range(total))  # a heap: a sorted list already is one
        self._kept = bytearray(total)  # 1: the prefix cache knows this block's content
        self._fences = [0] * total
        self._fenced: set[int] = set()
        self._withheld: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Unreferenced blocks whose content the prefix cache keeps."""
        return len(self._cached)

    @property
    def fenced(self) -> int:
        """Unreferenced blocks that a running copy still reads."""
        return len(self._fenced)

    @property
    def used(self) -> int:
        """Blocks that at least one table refers to."""
        return self.total - self.free - self.cached - self.fenced - self.withheld

    @property
    def withheld(self) -> int:
        """Blocks whose memory was given back."""
        return len(self._withheld)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached blocks if need be.

        Raises:
            OutOfBlocks: fewer are available; nothing was taken.
        """
        if count > len(self._free):
            self._make_room(count)
        free, refs, generation = self._free, self.refs, self.generation
        blocks = []
        for _ in range(count):
            block = heapq.heappop(free)
            refs[block] = 1
            generation[block] += 1
            blocks.append(block)
        return blocks

    def allocate_one(self) -> int:
        """As `allocate(1)`, for a table that grows token by token.

        Raises:
            OutOfBlocks: none is available.
        """
        free = self._free
        if not free:
            self._make_room(1)
        block = heapq.heappop(free)
        self.refs[block] = 1
        self.generation[block] += 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a block that is used, or cached, or kept behind a fence.

        Raises:
            BlockStateError: the block is free; its content is gone.
        """
        if self.refs[block] == 0:
            if not self._kept[block]:
                raise BlockStateError(f"block {block} was acquired while free", block=block)
            self._cached.pop(block, None)
            self._fenced.discard(block)
        self.refs[block] += 1

    def acquire_all(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these, as `acquire` does.

        Raises:
            BlockStateError: one of them is free; those in front of it got theirs.
        """
        refs = self.refs
        for block in blocks:
            if held := refs[block]:
                refs[block] = held + 1
            else:
                self.acquire(block)

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached, fenced or free.

        Raises:
            BlockStateError: nobody refers to the block: it would be freed twice.
        """
        refs = self.refs[block]
        if refs < 1:
            raise BlockStateError(f"block {block} was released while nobody referred to it", block=block)
        self.refs[block] = refs - 1
        if refs == 1:
            self._settle(block)

    def release_all(self, blocks: Sequence[int]) -> None:
        """Release a table's blocks, last first, so that the tail of a prefix is evicted before its head."""
        refs = self.refs
        for block in reversed(blocks):
            if (held := refs[block]) > 1:
                refs[block] = held - 1
            else:
                self.release(block)

    def keep(self, block: int) -> None:
        """The prefix cache now knows what this used block holds; it becomes immutable.

        Raises:
            BlockStateError: the block is not used, or is kept already.
        """
        if self.refs[block] < 1 or self._kept[block]:
            raise BlockStateError(
                f"block {block} cannot be kept: {self.refs[block]} references, kept {bool(self._kept[block])}",
                block=block,
            )
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """The prefix cache lets go of a block; if it was cached it is free now.

        Raises:
            BlockStateError: the block was not kept.
        """
        if not self._kept[block]:
            raise BlockStateError(f"block {block} was forgotten but never kept", block=block)
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            heapq.heappush(self._free, block)

    def evict_block(self, block: int) -> None:
        """Evict a cached block, after those that are only reachable through it; others are left alone."""
        while self.is_cached(block):
            self._evict_for(block)

    def withhold(self, blocks: Iterable[int]) -> None:
        """Take free blocks out of use until they are restored. O(total): for the rare time when memory is short.

        Raises:
            BlockStateError: a block is not free; none was taken.
        """
        chosen = set(blocks)
        left = [block for block in self._free if block not in chosen]
        if len(left) + len(chosen) != len(self._free):
            taken = sorted(chosen.difference(self._free))
            raise BlockStateError(f"blocks {taken[:5]} cannot be withheld: they are not free", blocks=taken)
        heapq.heapify(left)
        self._free = left
        self._withheld |= chosen

    def restore(self, blocks: Iterable[int]) -> None:
        """Make withheld blocks free again; they have their memory back.

        Raises:
            BlockStateError: a block is not withheld; none was restored.
        """
        chosen = set(blocks)
        if not chosen <= self._withheld:
            strangers = sorted(chosen - self._withheld)
            raise BlockStateError(f"blocks {strangers[:5]} cannot be restored: they are not withheld", blocks=strangers)
        self._withheld -= chosen
        for block in chosen:
            heapq.heappush(self._free, block)

    def is_kept(self, block: int) -> bool:
        """Whether the prefix cache knows this block's content."""
        return bool(self._kept[block])

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept and unreferenced, so that it may be evicted."""
        return block in self._cached

    def cached_blocks(self) -> list[int]:
        """The cached blocks, least recently used first."""
        return list(self._cached)

    def is_withheld(self, block: int) -> bool:
        """Whether the block's memory was given back."""
        return block in self._withheld

    def is_fenced(self, block: int) -> bool:
        """Whether a copy out of the block is running, whoever refers to it."""
        return self._fences[block] > 0

    def is_idle(self, block: int) -> bool:
        """Whether nobody refers to the block and nobody reads it: it is free, cached or withheld."""
        return self.refs[block] == 0 and not self._fences[block]

    def would_free(self, block: int, references: int = 1) -> bool:
        """Whether giving up so many references makes the block available at once."""
        return self.refs[block] == references and not self._fences[block]

    def writable(self, block: int) -> bool:
        """Whether the one table that refers to the block may write into it."""
        return self.refs[block] == 1 and not self._kept[block]

    def fence(self, blocks: Iterable[int]) -> Fence:
        """Keep blocks from being reused until the returned fence is released.

        Raises:
            BlockStateError: a block is free: there is nothing in it to protect.
        """
        return Fence(self, blocks)

    def check(self) -> None:
        """Prove that every block is in exactly one state. O(total): for tests and for idle moments.

        Raises:
            BlockStateError: what does not add up, with the counts.
        """
        free, cached, fenced, withheld = set(self._free), set(self._cached), self._fenced, self._withheld
        problems = []
        if len(free) != len(self._free):
            problems.append("a block is twice in the free heap")
        for block in range(self.total):
            states = sum(block in state for state in (free, cached, fenced, withheld)) + (self.refs[block] > 0)
            if states != 1:
                problems.append(f"block {block} is in {states} states")
            if self.refs[block] < 0 or self._fences[block] < 0:
                problems.append(f"block {block} has {self.refs[block]} references, {self._fences[block]} fences")
            if (block in free or block in withheld) and (self._kept[block] or self._fences[block]):
                problems.append(f"free or withheld block {block} is kept or fenced")
            if block in cached and not self._kept[block]:
                problems.append(f"cached block {block} is not kept")
            if block in fenced and not self._fences[block]:
                problems.append(f"fenced block {block} has no fence")
        if problems:
            raise BlockStateError("; ".join(problems[:5]), problems=problems)

    def _settle(self, block: int) -> None:
        """Put a block that nobody refers to into its state."""
        if self._fences[block]:
            self._fenced.add(block)
        elif self._kept[block]:
            self._cached[block] = None
        else:
            heapq.heappush(self._free, block)

    def _make_room(self, count: int) -> None:
        """Evict cached blocks until `count` are free."""
        if count > self.available:
            raise OutOfBlocks(
                f"{count} blocks asked for, {self.available} available ({self.free} free, {self.cached} cached, "
                f"{self.fenced} fenced, {self.used} used, {self.withheld} withheld of {self.total})",
                asked=count,
                available=self.available,
                total=self.total,
            )
        while len(self._free) < count:
            self._evict_one()

    def _evict_one(self) -> None:
        self._evict_for(next(iter(self._cached)))

    def _evict_for(self, block: int) -> None:
        victim = self.evict(block)
        if self._kept[victim]:  # no prefix cache is attached: forget on its behalf
            self.forget(victim)

    def _raise_fence(self, block: int) -> None:
        if self.refs[block] == 0 and not self._kept[block] and block not in self._fenced:
            raise BlockStateError(f"block {block} was fenced while free", block=block)
        self._fences[block] += 1
        if block in self._cached:
            del self._cached[block]
            self._fenced.add(block)

    def _lower_fence(self, block: int) -> None:
        self._fences[block] -= 1
        if self._fences[block] == 0 and block in self._fenced:
            self._fenced.remove(block)
            self._settle(block)


class Fence:
    """Holds blocks back from reuse while something outside still reads them. A context manager; made by the pool.

    The ids are copied: a table that changes later does not change what the fence protects.
    """

    def __init__(self, pool: BlockPool, blocks: Iterable[int]) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        try:
            for block in blocks:
                pool._raise_fence(int(block))
                self._blocks.append(int(block))
        except BaseException:  # ids may come from anywhere, a generator that raises included
            self.release()
            raise

    def release(self) -> None:
        """The reader is done. Safe to call twice."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            self._pool._lower_fence(block)

    def __enter__(self) -> Fence:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

"""Who owns each block of the pool, and which one is handed out next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .codec import FP16, Codec
from .errors import BlockStateError, OutOfBlocks
from .extents import ExtentPool
from .fence import Fence

__all__ = ["BlockPool"]


class BlockPool:
    """Reference counts over the blocks of one codec, here one whose block is a whole extent; `SlabPool` has others.

    A block is in exactly one state, so `free + cached + fenced + used + withheld + elsewhere == total` always holds:

    - free: nobody refers to it and nothing in it is worth keeping;
    - used: at least one block table refers to it;
    - cached: nobody refers to it, but the prefix cache knows what it holds; taken back when blocks run out;
    - fenced: nobody refers to it any more, but a copy out of it is still running, so it may not be reused yet;
    - withheld: it was free, and its memory was given back; not handed out before it has memory again (`Balloon`);
    - elsewhere: its extent belongs to another codec.

    Allocation takes the lowest free block first: deterministic, and it keeps the used part of the pool low and
    its runs long. A block that the prefix cache holds (`keep`) is immutable for as long as it is held.

    When nothing is free, what was used longest ago goes: a cached block of this codec, or an idle extent of another.
    An extent counts as used when the last of its blocks was, so that nothing goes which was used later than what stays.

    Args:
        total: blocks in the pool, as many as there are extents.
        block_tokens: tokens per block.
        extents: where blocks come from; None: from as many extents as blocks, for this codec alone.

    Attributes:
        codec: whose blocks.
        extents: the memory they lie in.
        per_extent: blocks in an extent.
        span: units that a block takes up; its id is a multiple of that.
        refs: references per block.
        generation: see `ExtentPool`.
        idle: extents that could be given up, with the clock since when, in this order.
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

    codec: Codec = FP16

    def __init__(self, total: int, block_tokens: int, extents: ExtentPool | None = None) -> None:
        self.extents = extents = ExtentPool(total) if extents is None else extents
        units = extents.total * extents.units
        self.total = total
        self.block_tokens = block_tokens
        self.per_extent = self.codec.blocks_per_extent
        self.span = extents.units // self.per_extent
        self.refs = [0] * units
        self.generation = extents.generation
        self.evict: Callable[[int], int] = lambda oldest: oldest
        self._free = extents.free  # that very heap: a free extent is a free block
        self._kept = bytearray(units)  # 1: the prefix cache knows this block's content
        self._fences = [0] * units
        self._fenced: set[int] = set()
        self._alone = extents.units == 1  # no other codec's blocks fit
        self._cached: OrderedDict[int, int] = OrderedDict()  # least recently used first, with the clock
        self.idle = self._cached  # an extent is a block
        extents.users.append(self)

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
        return self.total - self.free - self.cached - self.fenced - self.withheld - self.elsewhere

    @property
    def withheld(self) -> int:
        """Blocks whose memory was given back."""
        return len(self.extents.withheld) * self.per_extent

    @property
    def elsewhere(self) -> int:
        """Blocks that there would be in the extents of other codecs."""
        return sum(user.held for user in self.extents.users if user is not self) * self.per_extent

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        own = len(self._free) + len(self._cached)
        return own if self._alone else own + self.extents.idle_besides(self)

    @property
    def spare(self) -> int:
        """Of the available blocks, those in extents that this codec will not give up: in which something is in use."""
        return 0

    @property
    def held(self) -> int:
        """Extents in which this codec has blocks."""
        return self.total - len(self._free) - self.withheld - self.elsewhere

    def extent_of(self, block: int) -> int:
        """The extent that a block lies in."""
        return block - block % self.extents.units

    def busy_in(self, extent: int) -> int:
        """Blocks of an extent of this codec's that are used or fenced."""
        return int(self.refs[extent] > 0 or extent in self._fenced)

    def extents_for(self, blocks: int) -> int:
        """Extents of `ExtentPool.common` that so many blocks would take; 0 for none, or a negative number."""
        return max(0, -(-(blocks - self.spare) // self.per_extent))

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
        if block < 0 or self.refs[block] == 0:  # the last one's would be meant by -1, which stands for no block
            if block < 0 or not self._kept[block]:
                raise BlockStateError(f"block {block} was acquired while free", block=block)
            self._revive(block)
        self.refs[block] += 1

    def acquire_all(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these, as `acquire` does.

        Raises:
            BlockStateError: one of them is free; those in front of it got theirs.
        """
        refs = self.refs
        for block in blocks:
            if (held := refs[block]) and block >= 0:
                refs[block] = held + 1
            else:
                self.acquire(block)

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached, fenced or free.

        Raises:
            BlockStateError: nobody refers to the block: it would be freed twice.
        """
        refs = self.refs[block]
        if refs < 1 or block < 0:
            raise BlockStateError(f"block {block} was released while nobody referred to it", block=block)
        self.refs[block] = refs - 1
        if refs == 1:
            self._settle(block)

    def release_all(self, blocks: Sequence[int]) -> None:
        """Release a table's blocks, last first, so that the tail of a prefix is evicted before its head."""
        refs = self.refs
        for block in reversed(blocks):
            if (held := refs[block]) > 1 and block >= 0:
                refs[block] = held - 1
            else:
                self.release(block)

    def keep(self, block: int) -> None:
        """The prefix cache now knows what this used block holds; it becomes immutable.

        Raises:
            BlockStateError: the block is not used, or is kept already.
        """
        if self.refs[block] < 1 or self._kept[block] or block < 0:
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
        if not self._kept[block] or block < 0:
            raise BlockStateError(f"block {block} was forgotten but never kept", block=block)
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._add_free(block)

    def evict_block(self, block: int) -> None:
        """Evict a cached block, after those that are only reachable through it; others are left alone."""
        while self.is_cached(block):
            self._evict_for(block)

    def is_kept(self, block: int) -> bool:
        """Whether the prefix cache knows this block's content."""
        return bool(self._kept[block])

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept and unreferenced, so that it may be evicted."""
        return block in self._cached

    def cached_blocks(self) -> list[int]:
        """The cached blocks, least recently used first."""
        return list(self._cached)

    def is_fenced(self, block: int) -> bool:
        """Whether a copy out of the block is running, whoever refers to it."""
        return self._fences[block] > 0

    def would_free(self, block: int, references: int = 1) -> bool:
        """Whether giving up so many references makes the block available at once."""
        return self.refs[block] == references and not self._fences[block]

    def writable(self, block: int) -> bool:
        """Whether the one table that refers to the block may write into it."""
        return self.refs[block] == 1 and not self._kept[block] and block >= 0

    def fence(self, blocks: Iterable[int]) -> Fence:
        """Keep blocks from being reused until the returned fence is released.

        Raises:
            BlockStateError: a block is free: there is nothing in it to protect.
        """
        return Fence(self, blocks)

    def raise_fence(self, block: int) -> None:
        """One more reader of a block; `Fence` calls it.

        Raises:
            BlockStateError: the block is free: there is nothing in it to protect.
        """
        if block < 0 or (self.refs[block] == 0 and not self._kept[block] and block not in self._fenced):
            raise BlockStateError(f"block {block} was fenced while free", block=block)
        self._fences[block] += 1
        if block in self._cached:
            self._revive(block)
            self._fenced.add(block)

    def lower_fence(self, block: int) -> None:
        """One reader fewer; the last one lets a block go that nobody refers to."""
        self._fences[block] -= 1
        if self._fences[block] == 0 and block in self._fenced:
            self._fenced.remove(block)
            self._settle(block)

    def holds(self, extent: int) -> bool:
        """Whether the block that an extent is belongs to somebody here."""
        return self.refs[extent] > 0 or extent in self._cached or extent in self._fenced

    def give_up(self, extent: int) -> None:
        """Evict what the extent still holds."""
        self.evict_block(extent)

    def check(self) -> None:
        """Prove that every block of every codec in these extents is in exactly one state. O(total): for tests.

        Raises:
            BlockStateError: what does not add up.
        """
        self.extents.check()

    def problems(self) -> list[str]:
        """What does not add up in this codec's books. O(total)."""
        unused = set(self._free) | self.extents.withheld
        problems = []
        for block in range(0, len(self.refs), self.extents.units):
            problems += self._problems_of(block, free=block in unused)
        return problems

    def _problems_of(self, block: int, *, free: bool) -> list[str]:
        problems = []
        states = free + (block in self._cached) + (block in self._fenced) + (self.refs[block] > 0)
        if states > 1:
            problems.append(f"block {block} is in {states} states")
        if self.refs[block] < 0 or self._fences[block] < 0:
            problems.append(f"block {block} has {self.refs[block]} references, {self._fences[block]} fences")
        if states == free and (self._kept[block] or self._fences[block]):
            problems.append(f"block {block}, which is nobody's, is kept or fenced")
        if block in self._cached and not self._kept[block]:
            problems.append(f"cached block {block} is not kept")
        if block in self._fenced and not self._fences[block]:
            problems.append(f"fenced block {block} has no fence")
        return problems

    def _settle(self, block: int) -> None:
        """Put a block that nobody refers to into its state."""
        if self._fences[block]:
            self._fenced.add(block)
        elif self._kept[block]:
            self._add_cached(block)
        else:
            heapq.heappush(self._free, block)

    def _add_cached(self, block: int) -> None:
        """A block has become the one of the cached ones that was used last."""
        self.extents.clock = self._cached[block] = self.extents.clock + 1

    def _add_free(self, block: int) -> None:
        """A cached block holds nothing any more."""
        heapq.heappush(self._free, block)

    def _revive(self, block: int) -> None:
        """A kept block that nobody used is used again."""
        self._cached.pop(block, None)
        self._fenced.discard(block)

    def _make_room(self, count: int) -> None:
        """Evict cached blocks until `count` are free."""
        if count > self.available:
            raise OutOfBlocks(
                f"{count} blocks asked for, {self.available} available ({self.free} free, {self.cached} cached, "
                f"{self.fenced} fenced, {self.used} used, {self.withheld} withheld of {self.total})"
                + (f", {self.elsewhere} in the memory of other codecs" if self.elsewhere else ""),
                asked=count,
                available=self.available,
                total=self.total,
            )
        while self.free < count:
            self._evict_one()

    def _evict_one(self) -> None:
        """Take back what was used longest ago: a block of this codec, or an extent of another."""
        own = next(iter(self._cached), None)
        foreign = self.extents.longest_idle(self)
        if foreign is not None and (own is None or foreign[0] < self._cached[own]):
            foreign[2].give_up(foreign[1])
        elif own is not None:
            self._evict_for(own)

    def _evict_for(self, block: int) -> None:
        victim = self.evict(block)
        if self._kept[victim]:  # no prefix cache is attached: forget on its behalf
            self.forget(victim)

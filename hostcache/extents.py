"""The pool's memory in extents: each serves one codec at a time, and goes back when it is empty."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from .errors import BlockStateError, UsageError

__all__ = ["ExtentPool", "ExtentUser"]


class ExtentUser(Protocol):
    """What the extents ask of a codec's pool; `BlockPool` is one.

    Attributes:
        per_extent: blocks of the codec that an extent holds.
        idle: extents that it holds and could give up, as nothing in them is used or fenced; with the clock when that
            began, in this order.
    """

    per_extent: int
    idle: OrderedDict[int, int]

    @property
    def held(self) -> int:
        """Extents that it holds."""

    def extents_for(self, blocks: int) -> int:
        """Extents it would take for so many blocks more than are used."""

    def holds(self, extent: int) -> bool:
        """Whether an extent is its own."""

    def give_up(self, extent: int) -> None:
        """Evict what an idle extent still holds, which returns it."""

    def problems(self) -> list[str]:
        """What does not add up in its books."""


class ExtentPool:
    """Which extents of the region are free; the others belong to the pools of codecs.

    An extent is the memory of one fp16 block, of two int8 blocks or of four int4 blocks. It is cut into as many *units*
    as it holds blocks of the leanest codec that is in use. Everything is named by its first unit: an extent, a block
    of whichever codec. So ids mean the same memory to everybody, and no two codecs ever use the same one at a time.

    Args:
        total: extents in the region.
        units: units per extent.

    Attributes:
        total: as given.
        units: as given.
        free: extents that nobody holds, a heap; the lowest goes first.
        withheld: extents whose memory was given back; not handed out before they have memory again (`Balloon`).
        generation: per unit, how often the block that begins there was handed out, whatever its codec. The pools do
            not read it: it is for whoever keeps copies of blocks from step to step, such as staged ones, to tell a new
            owner's content from the old one's. Sharing a block, releasing it and finding it again leave the content
            alone, and so the number. What an owner takes back and writes anew (`BlockTable.truncate`) does not show
            here.
        users: the codecs' pools, at most one of which has a whole extent as its block.
        clock: rises whenever a block is kept that nobody uses any more: tells which of two was used last.
        thrifty: whether the pools rather evict what they keep beside blocks in use than take another extent. Free
            extents are then left to those that were promised them.

    Raises:
        UsageError: there is not even one extent.

    Example:
        >>> from hostcache.codec import FP16, INT4
        >>> from hostcache.extents import ExtentPool
        >>> from hostcache.slabs import block_pool
        >>> extents = ExtentPool(total=3, units=4)
        >>> lean, rich = block_pool(extents, INT4, block_tokens=16), block_pool(extents, FP16, block_tokens=16)
        >>> lean.allocate(2), rich.allocate(1), lean.allocate(3)
        ([0, 1], [4], [2, 3, 8])
        >>> lean.release(8)  # the only block in its extent
        >>> rich.available, lean.available
        (1, 4)
    """

    def __init__(self, total: int, units: int = 1) -> None:
        if total < 1:
            raise UsageError(f"a pool needs at least one block, got {total}", total=total)
        self.total = total
        self.units = units
        self.free = list(self._all)  # a sorted list already is a heap
        self.withheld: set[int] = set()
        self.generation = [0] * (total * units)
        self.users: list[ExtentUser] = []
        self.clock = 0
        self.thrifty = False

    @property
    def common(self) -> int:
        """Extents that any codec can have now: free ones, and those that their codec could give up."""
        return len(self.free) + sum(len(user.idle) for user in self.users)

    @property
    def used(self) -> int:
        """Extents in which something is used or fenced."""
        return self.total - self.common - len(self.withheld)

    def idle_besides(self, user: ExtentUser) -> int:
        """Extents that the other codecs could give up."""
        return sum(len(other.idle) for other in self.users if other is not user)

    def longest_idle(self, besides: ExtentUser) -> tuple[int, int, ExtentUser] | None:
        """Of the extents that other codecs could give up, the one idle for longest.

        Returns:
            The clock when that began, the extent, and who holds it; None: there is none.
        """
        oldest: tuple[int, int, ExtentUser] | None = None
        for user in self.users:
            if user is not besides and user.idle:
                extent, clock = next(iter(user.idle.items()))
                if oldest is None or clock < oldest[0]:
                    oldest = clock, extent, user
        return oldest

    def reclaimable(self) -> dict[int, int]:
        """The extents of `common`, each with the clock when it was used last; 0 for those that hold nothing."""
        ages = dict.fromkeys(self.free, 0)
        for user in self.users:
            ages.update(user.idle)
        return ages

    def reclaim(self, extent: int) -> None:
        """Make an extent free if some codec could give it up."""
        for user in self.users:
            if extent in user.idle:
                user.give_up(extent)

    def withhold(self, extents: Iterable[int]) -> None:
        """Take free extents out of use until they are restored. O(total): for the rare time when memory is short.

        Raises:
            BlockStateError: an extent is not free; none was taken.
        """
        chosen = set(extents)
        left = [extent for extent in self.free if extent not in chosen]
        if len(left) + len(chosen) != len(self.free):
            taken = sorted(chosen.difference(self.free))
            raise BlockStateError(f"extents {taken[:5]} cannot be withheld: they are not free", extents=taken)
        self.free[:] = left  # the pools know this very list
        heapq.heapify(self.free)
        self.withheld |= chosen

    def restore(self, extents: Iterable[int]) -> None:
        """Make withheld extents free again; they have their memory back.

        Raises:
            BlockStateError: an extent is not withheld; none was restored.
        """
        chosen = set(extents)
        if not chosen <= self.withheld:
            strangers = sorted(chosen - self.withheld)
            raise BlockStateError(
                f"extents {strangers[:5]} cannot be restored: they are not withheld", extents=strangers
            )
        self.withheld -= chosen
        for extent in chosen:
            heapq.heappush(self.free, extent)

    def check(self) -> None:
        """Prove that every extent has one owner, and every block of every codec one state. O(units): for tests.

        Raises:
            BlockStateError: what does not add up.
        """
        problems = [problem for user in self.users for problem in user.problems()]
        free = set(self.free)
        if len(free) != len(self.free):
            problems.append("an extent is twice in the free heap")
        for extent in self._all:
            owners = (extent in free) + (extent in self.withheld) + sum(user.holds(extent) for user in self.users)
            if owners != 1:
                problems.append(f"extent {extent} has {owners} owners")
        if problems:
            raise BlockStateError("; ".join(problems[:5]), problems=problems)

    @property
    def _all(self) -> range:
        return range(0, self.total * self.units, self.units)

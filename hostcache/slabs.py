"""Blocks of a codec of which several fit into an extent."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from .blocks import BlockPool
from .codec import Codec
from .errors import UsageError
from .extents import ExtentPool
from .lowest_first import LowestFirst

__all__ = ["SlabPool", "block_pool"]


@dataclass(eq=False, slots=True)
class _Slab:
    """An extent that serves the codec.

    Attributes:
        free: bit i is set if its i-th block is free.
        busy: blocks that are used or fenced.
    """

    free: int
    busy: int = 0


class SlabPool(BlockPool):
    """Blocks that share extents, as a slab allocator's objects share pages.

    Extents that are partly used are filled before a free one is taken, the lowest first, and one goes back as soon as
    all of its blocks are free. Where nothing of an extent is used or fenced any more but some of it is cached, it is
    idle: other codecs may have it.

    Args:
        extents: where they come from.
        codec: whose blocks.
        block_tokens: tokens per block.
    """

    def __init__(self, extents: ExtentPool, codec: Codec, block_tokens: int) -> None:
        self.codec = codec
        super().__init__(extents.total * codec.blocks_per_extent, block_tokens, extents)
        self.idle: OrderedDict[int, int] = OrderedDict()
        self._slabs: dict[int, _Slab] = {}  # by extent
        self._whole = (1 << self.per_extent) - 1
        self._vacant = 0  # free blocks in `_slabs`
        self._partial = LowestFirst()  # extents with free blocks
        self._beside = LowestFirst()  # those with free blocks beside ones in use
        # A heap of cached blocks beside ones in use, by the clock when they were used last; others are passed over.
        self._kept_beside: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        """Blocks that hold nothing, those in free extents included."""
        return self._vacant + len(self._free) * self.per_extent

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        foreign = len(self._free) + self.extents.idle_besides(self)
        return self._vacant + len(self._cached) + foreign * self.per_extent

    @property
    def spare(self) -> int:
        """Of the available blocks, those in extents that this codec will not give up: in which something is in use."""
        return self._vacant + len(self._cached) - len(self.idle) * self.per_extent

    @property
    def held(self) -> int:
        """Extents in which this codec has blocks."""
        return len(self._slabs)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached blocks if need be.

        Raises:
            OutOfBlocks: fewer are available; nothing was taken.
        """
        thrifty = self.extents.thrifty
        if count > (self.available if thrifty else self.free):
            self._make_room(count)
        blocks = []
        for _ in range(count):
            block = self._take_spare() if thrifty and self.spare else self._take_free()
            self.refs[block] = 1
            self.generation[block] += 1
            blocks.append(block)
        return blocks

    def allocate_one(self) -> int:
        """As `allocate(1)`.

        Raises:
            OutOfBlocks: none is available.
        """
        return self.allocate(1)[0]

    def holds(self, extent: int) -> bool:
        """Whether the extent serves this codec."""
        return extent in self._slabs

    def busy_in(self, extent: int) -> int:
        """Blocks of an extent of this codec's that are used or fenced."""
        return self._slabs[extent].busy

    def give_up(self, extent: int) -> None:
        """Evict what is cached in an idle extent, which returns it."""
        for block in self._blocks_of(extent):
            self.evict_block(block)

    def problems(self) -> list[str]:
        """What does not add up in this codec's books. O(units)."""
        problems = []
        for extent in range(0, len(self.refs), self.extents.units):
            problems += self._problems_in(extent)
        vacant = sum(slab.free.bit_count() for slab in self._slabs.values())
        if vacant != self._vacant or not self.idle.keys() <= self._slabs.keys():
            problems.append(f"{vacant} free blocks counted as {self._vacant}, or an idle extent is not held")
        listed = set(self._kept_beside)
        beside = [(clock, block) for block, clock in self._cached.items() if self._is_kept_beside(clock, block)]
        if not listed.issuperset(beside) or len(self._kept_beside) > 2 * self.total + self.per_extent:
            problems.append(f"of {len(beside)} cached blocks beside others in use, some are lost among {len(listed)}")
        return problems

    def _problems_in(self, extent: int) -> list[str]:
        slab, blocks = self._slabs.get(extent), self._blocks_of(extent)
        strays = set(range(extent, extent + self.extents.units)).difference(() if slab is None else blocks)
        problems = []
        if any(self.refs[unit] or self._kept[unit] or self._fences[unit] or unit in self._cached for unit in strays):
            problems.append(f"extent {extent} has references, fences or content where no {self.codec.name} block is")
        if slab is None:
            return problems
        free = [block for index, block in enumerate(blocks) if slab.free >> index & 1]
        for block in blocks:
            problems += self._problems_of(block, free=block in free)
        busy = sum(self.refs[block] > 0 or block in self._fenced for block in blocks)
        cached = sum(block in self._cached for block in blocks)
        counts = f"extent {extent}: {busy} busy, {cached} cached, {len(free)} free"
        if busy != slab.busy or busy + cached + len(free) != self.per_extent:
            problems.append(f"{counts}, {slab.busy} counted as busy")
        if (extent in self.idle) != (busy == 0) or len(free) == self.per_extent:
            problems.append(f"{counts}, idle {extent in self.idle}")
        if free and (extent not in self._partial or (busy and extent not in self._beside)):
            problems.append(f"the free blocks of extent {extent} would never be found")
        return problems

    def _take_free(self) -> int:
        """The lowest free block of the extents held; of the lowest free one, if they have none; by evicting else."""
        while not self._vacant:
            if self._free:
                self._take_extent()
            else:
                self._evict_one()
        extent = self._partial.find(self._has_free)
        assert extent is not None  # `_vacant` says so
        return self._take_lowest(extent)

    def _take_spare(self) -> int:
        """A block in an extent that has others in use: the lowest free one, or the cached one used longest ago.

        O(log n) for each change of a block, as all of the books are.
        """
        extent = self._beside.find(lambda extent: self._has_free(extent) and self._slabs[extent].busy > 0)
        if extent is not None:
            return self._take_lowest(extent)
        heap = self._kept_beside
        while not self._is_kept_beside(*heap[0]):
            heapq.heappop(heap)
        block = heap[0][1]
        self.evict_block(block)
        extent = self.extent_of(block)
        return self._take(extent, self._bit(extent, block))

    def _has_free(self, extent: int) -> bool:
        slab = self._slabs.get(extent)
        return slab is not None and slab.free > 0

    def _is_kept_beside(self, clock: int, block: int) -> bool:
        return self._cached.get(block) == clock and self._slabs[self.extent_of(block)].busy > 0

    def _take_lowest(self, extent: int) -> int:
        free = self._slabs[extent].free
        return self._take(extent, free & -free)

    def _take(self, extent: int, bit: int) -> int:
        self._slabs[extent].free ^= bit
        self._vacant -= 1
        self._add_busy(extent)
        return extent + (bit.bit_length() - 1) * self.span

    def _add_busy(self, extent: int) -> None:
        """One block of an extent more is used or fenced."""
        slab = self._slabs[extent]
        slab.busy += 1
        if slab.busy == 1:
            self.idle.pop(extent, None)
            for block in self._blocks_of(extent):
                if block in self._cached:
                    self._note_kept_beside(block)
        if slab.free:
            self._beside.add(extent)

    def _note_kept_beside(self, block: int) -> None:
        """A cached block is beside one in use. What is out of date is swept when it is more than what is not."""
        heapq.heappush(self._kept_beside, (self._cached[block], block))
        if len(self._kept_beside) > 2 * len(self._cached) + self.per_extent:
            pairs = [(clock, block) for block, clock in self._cached.items()]  # ascending, which is a heap
            self._kept_beside = [pair for pair in pairs if self._is_kept_beside(*pair)]

    def _take_extent(self) -> None:
        extent = heapq.heappop(self._free)
        self._slabs[extent] = _Slab(self._whole)
        self._vacant += self.per_extent
        self._partial.add(extent)

    def _settle(self, block: int) -> None:
        if self._fences[block]:
            self._fenced.add(block)
            return
        self._slabs[self.extent_of(block)].busy -= 1
        if self._kept[block]:
            self._add_cached(block)
        else:
            self._add_free(block)

    def _add_cached(self, block: int) -> None:
        super()._add_cached(block)
        extent = self.extent_of(block)
        if self._slabs[extent].busy:
            self._note_kept_beside(block)
        else:
            self.idle[extent] = self.extents.clock

    def _add_free(self, block: int) -> None:
        extent = self.extent_of(block)
        slab = self._slabs[extent]
        slab.free |= self._bit(extent, block)
        self._vacant += 1
        if slab.free == self._whole:
            del self._slabs[extent]
            self.idle.pop(extent, None)
            self._vacant -= self.per_extent
            heapq.heappush(self._free, extent)
            return
        self._partial.add(extent)
        if slab.busy:
            self._beside.add(extent)
        elif extent not in self.idle:
            self.extents.clock += 1
            self.idle[extent] = self.extents.clock

    def _revive(self, block: int) -> None:
        was_cached = block in self._cached
        super()._revive(block)
        if was_cached:
            self._add_busy(self.extent_of(block))

    def _bit(self, extent: int, block: int) -> int:
        return 1 << (block - extent) // self.span

    def _blocks_of(self, extent: int) -> range:
        return range(extent, extent + self.extents.units, self.span)


def block_pool(extents: ExtentPool, codec: Codec, block_tokens: int) -> BlockPool:
    """The pool of a codec's blocks over these extents; one for each codec.

    Raises:
        UsageError: the extents are not cut finely enough for the codec.
    """
    if codec.blocks_per_extent > extents.units:
        raise UsageError(
            f"a pool whose extents are cut into {extents.units} holds no {codec.name} blocks, of which an extent has "
            f"{codec.blocks_per_extent}: open it for {codec.name}",
            codec=codec.name,
            units=extents.units,
        )
    if codec.blocks_per_extent == 1:
        return BlockPool(extents.total, block_tokens, extents)
    return SlabPool(extents, codec, block_tokens)

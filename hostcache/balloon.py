"""Lends the memory of unused blocks to the rest of the machine, as a guest's memory balloon does for its host."""

from __future__ import annotations

from .errors import RegionError
from .extents import ExtentPool
from .region import Region

__all__ = ["Balloon"]


class Balloon:
    """Gives pages of free and cached blocks back to the kernel, and has them back when there is room again.

    Memory goes and comes in granules: the smallest number of the region's pages that an extent fits into. A granule can
    go when nothing in the extents that touch it is used or fenced; from then on these are withheld, until all the
    granules they touch are populated again. What lies in used and fenced blocks is never touched, nor is a pinned
    block, which is used.

    Args:
        extents: who holds what.
        region: their bytes, extent 0 first.
        extent_bytes: bytes of one.

    Attributes:
        extents: as given.

    Example:
        >>> from hostcache import Balloon, BlockPool, Region
        >>> pool, region = BlockPool(total=8, block_tokens=16), Region.anonymous(8 * 65536)
        >>> balloon = Balloon(pool.extents, region, extent_bytes=65536)
        >>> balloon.inflate(100_000)  # bytes that went: whole granules, which are 64 KiB here
        131072
        >>> pool.free, pool.withheld
        (6, 2)
        >>> balloon.deflate(1 << 30), pool.free
        (131072, 8)
    """

    def __init__(self, extents: ExtentPool, region: Region, extent_bytes: int) -> None:
        self.extents = extents
        self._region = region
        self._extent_bytes = extent_bytes
        self._given: set[int] = set()
        self._granule_bytes = -(-extent_bytes // region.page_bytes) * region.page_bytes
        self._granules = min(region.nbytes, extents.total * extent_bytes) // self._granule_bytes

    @property
    def given_bytes(self) -> int:
        """Bytes that are lent out now."""
        return len(self._given) * self._granule_bytes

    @property
    def can_give(self) -> bool:
        """Whether the region gives memory back at all."""
        return self._granules > 0 and self._region.gives_back

    def inflate(self, nbytes: int, spare: int = 0) -> int:
        """Give back at least `nbytes`, or as much as there is.

        Free extents go first, then those with cached blocks that were used longest ago; among equals those with the
        highest numbers, which the pool hands out last.

        Args:
            nbytes: rounded up to granules.
            spare: extents that stay available whatever is asked for.

        Returns:
            Bytes that went; 0 if the region keeps its pages or every granule holds a block in use.
        """
        given = 0
        for granule in self._by_loss():
            if given >= nbytes:
                break
            lost = sum(extent not in self.extents.withheld for extent in self._extents_of(granule))
            if self.extents.common - lost < spare or not self._give(granule):
                break
            given += self._granule_bytes
        return given

    def deflate(self, nbytes: int) -> int:
        """Take back at most `nbytes`, lowest extents first; they count as free once their pages are there.

        Where the memory is short the kernel ends processes to find it, so ask what is available first.

        Returns:
            Bytes that came; less than could have if the kernel has no more.
        """
        taken = 0
        for granule in sorted(self._given):
            if taken + self._granule_bytes > nbytes:
                break
            try:
                self._region.populate(granule * self._granule_bytes, self._granule_bytes)
            except RegionError:  # the budget was wrong: what came, came
                break
            self._given.remove(granule)
            self.extents.restore(extent for extent in self._extents_of(granule) if self._is_whole(extent))
            taken += self._granule_bytes
        return taken

    def _by_loss(self) -> list[int]:
        """Granules that can go, those first whose going loses least."""
        age = self.extents.reclaimable() | dict.fromkeys(self.extents.withheld, 0)
        losses = []
        for granule in range(self._granules - 1, -1, -1):
            extents = self._extents_of(granule)
            if granule not in self._given and all(extent in age for extent in extents):
                losses.append((max(age[extent] for extent in extents), granule))
        losses.sort(key=lambda entry: entry[0])  # stable: highest first among equals
        return [granule for _, granule in losses]

    def _give(self, granule: int) -> bool:
        if not self._region.gives_back:
            return False
        extents = self._extents_of(granule)
        for extent in extents:
            self.extents.reclaim(extent)
        if not self._region.give_back(granule * self._granule_bytes, self._granule_bytes):
            return False
        self._given.add(granule)
        self.extents.withhold(extent for extent in extents if extent not in self.extents.withheld)
        return True

    def _extents_of(self, granule: int) -> range:
        """The extents that have bytes in a granule."""
        start, units = granule * self._granule_bytes, self.extents.units
        first, behind = start // self._extent_bytes, -(-(start + self._granule_bytes) // self._extent_bytes)
        return range(first * units, behind * units, units)

    def _is_whole(self, extent: int) -> bool:
        """Whether every granule that the extent has bytes in is there: one, or two that follow each other."""
        first = extent // self.extents.units * self._extent_bytes
        last = first + self._extent_bytes - 1
        return self._given.isdisjoint((first // self._granule_bytes, last // self._granule_bytes))

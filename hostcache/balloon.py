"""Lends the memory of unused blocks to the rest of the machine, as a guest's memory balloon does for its host."""

from __future__ import annotations

from .blocks import BlockPool
from .errors import RegionError
from .region import Region

__all__ = ["Balloon"]


class Balloon:
    """Gives pages of free and cached blocks back to the kernel, and has them back when there is room again.

    Memory goes and comes in granules: the smallest number of the region's pages that a block fits into. A granule can
    go when every block that touches it is free or cached; from then on these are withheld, until all the granules they
    touch are populated again. What lies in used and fenced blocks is never touched, nor is a pinned block, which is
    used.

    Args:
        pool: who owns the blocks.
        region: their bytes, block 0 first.
        block_bytes: bytes of one.

    Attributes:
        pool: as given.

    Example:
        >>> from hostcache import Balloon, BlockPool, Region
        >>> pool, region = BlockPool(total=8, block_tokens=16), Region.anonymous(8 * 65536)
        >>> balloon = Balloon(pool, region, block_bytes=65536)
        >>> balloon.inflate(100_000)  # bytes that went: whole granules, which are 64 KiB here
        131072
        >>> pool.free, pool.withheld
        (6, 2)
        >>> balloon.deflate(1 << 30), pool.free
        (131072, 8)
    """

    def __init__(self, pool: BlockPool, region: Region, block_bytes: int) -> None:
        self.pool = pool
        self._region = region
        self._block_bytes = block_bytes
        self._given: set[int] = set()
        self._granule_bytes = -(-block_bytes // region.page_bytes) * region.page_bytes
        self._granules = min(region.nbytes, pool.total * block_bytes) // self._granule_bytes

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

        Free blocks go first, then the cached ones that were used longest ago; among equals those with the highest
        numbers, which the pool hands out last.

        Args:
            nbytes: rounded up to granules.
            spare: blocks that stay available whatever is asked for.

        Returns:
            Bytes that went; 0 if the region keeps its pages or every granule holds a block in use.
        """
        given = 0
        for granule in self._by_loss():
            if given >= nbytes:
                break
            lost = sum(not self.pool.is_withheld(block) for block in self._blocks(granule))
            if self.pool.available - lost < spare or not self._give(granule):
                break
            given += self._granule_bytes
        return given

    def deflate(self, nbytes: int) -> int:
        """Take back at most `nbytes`, lowest blocks first; they count as free once their pages are there.

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
            self.pool.restore(block for block in self._blocks(granule) if self._is_whole(block))
            taken += self._granule_bytes
        return taken

    def _by_loss(self) -> list[int]:
        """Granules that can go, those first whose going loses least."""
        age = {block: number for number, block in enumerate(self.pool.cached_blocks())}
        losses = []
        for granule in range(self._granules - 1, -1, -1):
            blocks = self._blocks(granule)
            if granule not in self._given and all(self.pool.is_idle(block) for block in blocks):
                losses.append((max(age.get(block, -1) for block in blocks), granule))
        losses.sort(key=lambda entry: entry[0])  # stable: highest first among equals
        return [granule for _, granule in losses]

    def _give(self, granule: int) -> bool:
        if not self._region.gives_back:
            return False
        blocks = self._blocks(granule)
        for block in blocks:
            self.pool.evict_block(block)
        if not self._region.give_back(granule * self._granule_bytes, self._granule_bytes):
            return False
        self._given.add(granule)
        self.pool.withhold(block for block in blocks if not self.pool.is_withheld(block))
        return True

    def _blocks(self, granule: int) -> range:
        """The blocks that have bytes in a granule."""
        start = granule * self._granule_bytes
        return range(start // self._block_bytes, -(-(start + self._granule_bytes) // self._block_bytes))

    def _is_whole(self, block: int) -> bool:
        """Whether every granule that the block has bytes in is there: one, or two that follow each other."""
        first, last = block * self._block_bytes, (block + 1) * self._block_bytes - 1
        return self._given.isdisjoint((first // self._granule_bytes, last // self._granule_bytes))

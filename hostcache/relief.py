"""What it would bring if running requests gave their blocks back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .blocks import BlockPool
from .promises import Promises
from .request import Request

__all__ = ["Relief"]


class Relief:
    """Blocks that come free for one codec once some requests end, reckoned before any of them does.

    Of the requests that have the same codec each block counts that nobody else refers to. Of others only whole extents
    do: those in which nothing would be left in use, and those that need not be kept for what others were promised.

    Args:
        pool: of the codec that lacks blocks.
        promises: what has to be kept.
        ended: the requests that would give their blocks back.
        with_promised: whether what they were promised comes free, too.
    """

    def __init__(self, pool: BlockPool, promises: Promises, ended: Iterable[Request], *, with_promised: bool) -> None:
        self._pool = pool
        self._promises = promises
        self._with_promised = with_promised
        self._dropped: Counter[int] = Counter()  # references that go, by block
        self._freed: Counter[BlockPool] = Counter()  # blocks that come free
        self._freed_in: Counter[int] = Counter()  # the same by extent
        self._emptied: Counter[BlockPool] = Counter()  # extents in which nothing is left in use
        self._released: Counter[BlockPool] = Counter()  # blocks that need not be kept any more
        for request in ended:
            self.add(request)

    @property
    def blocks(self) -> int:
        """Blocks that come free for the codec."""
        own, extents = self._freed[self._pool] + self._released[self._pool], 0
        for other in (self._freed | self._released).keys() - {self._pool}:
            promised, emptied = self._promises.of(other), self._emptied[other]
            left = promised - self._released[other] - self._freed[other] + emptied * other.per_extent
            extents += emptied + other.extents_for(promised) - other.extents_for(left)
        return own + extents * self._pool.per_extent

    def add(self, request: Request) -> None:
        """One more would give its blocks back."""
        pool = request.pool
        if self._with_promised:
            self._released[pool] += request.promised
        for block in request.table.blocks:
            self._dropped[block] += 1
            if pool.would_free(block, self._dropped[block]):
                extent = pool.extent_of(block)
                self._freed[pool] += 1
                self._freed_in[extent] += 1
                self._emptied[pool] += self._freed_in[extent] == pool.busy_in(extent)

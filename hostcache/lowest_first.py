"""A heap whose members may stop to qualify without being taken out."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["LowestFirst"]


class LowestFirst:
    """Extents of which the lowest that still qualifies is wanted; those that do no more are passed over when met."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._listed: set[int] = set()  # what is in it, so that nothing is twice

    def __contains__(self, extent: int) -> bool:
        return extent in self._listed

    def add(self, extent: int) -> None:
        """An extent qualifies. O(log n), as often as it may be."""
        if extent not in self._listed:
            self._listed.add(extent)
            heapq.heappush(self._heap, extent)

    def find(self, qualifies: Callable[[int], bool]) -> int | None:
        """The lowest; None: there is none. O(log n) for each `add`."""
        heap = self._heap
        while heap and not qualifies(heap[0]):
            self._listed.remove(heapq.heappop(heap))
        return heap[0] if heap else None

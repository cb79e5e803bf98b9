"""What falls due for a request, and when."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .request import Request

__all__ = ["Timeline"]

PRUNE_SIZE = 64
"""Entries that are kept without asking whether they still matter."""


class Timeline:
    """Times with the request that each is for, earliest first. O(log n) to add and to take.

    Nothing is removed ahead of its time; entries that no longer matter are dropped when they are half of all.

    Args:
        matters: whether an entry still does.
    """

    def __init__(self, matters: Callable[[float, Request], bool]) -> None:
        self._matters = matters
        self._entries: list[tuple[float, int, Request]] = []  # a heap; equal times in order of arrival
        self._prune_at = PRUNE_SIZE

    def __len__(self) -> int:
        """Entries, those that no longer matter included."""
        return len(self._entries)

    def add(self, time: float, request: Request) -> None:
        """Something falls due for `request` at `time`."""
        heapq.heappush(self._entries, (time, request.id, request))
        if len(self._entries) > self._prune_at:
            self._entries = [entry for entry in self._entries if self._matters(entry[0], entry[2])]
            heapq.heapify(self._entries)
            self._prune_at = 2 * len(self._entries) + PRUNE_SIZE

    def due(self, now: float) -> Iterator[Request]:
        """Take out what has fallen due by `now`; more may be added meanwhile."""
        while self._entries and self._entries[0][0] <= now:
            time, _, request = heapq.heappop(self._entries)
            if self._matters(time, request):
                yield request

"""How fast bytes move, as measured while they do."""

from __future__ import annotations

__all__ = ["Bandwidth"]

REMEMBERED = 0.75
"""Weight of what was measured before against the newest copy, so that the last four make two thirds of the figure:
a card that slows down when its cache is full is noticed at once, one slow copy is not the end of swapping. A choice."""


class Bandwidth:
    """Bytes per second as measured, the newest measurements weighing most."""

    def __init__(self) -> None:
        self._nbytes = 0.0
        self._seconds = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """One copy of `nbytes` bytes took so long."""
        self._nbytes = self._nbytes * REMEMBERED + nbytes
        self._seconds = self._seconds * REMEMBERED + seconds

    def seconds_for(self, nbytes: int) -> float:
        """How long a copy of `nbytes` bytes will take; 0 before anything was measured."""
        return nbytes * self._seconds / self._nbytes if self._nbytes else 0.0

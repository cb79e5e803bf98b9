"""Memory that needs no syncing."""

from __future__ import annotations

__all__ = ["CoherentMemory"]


class CoherentMemory:
    """Device memory that host and device see alike, or that no device is behind."""

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Nothing to do."""

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Nothing to do."""

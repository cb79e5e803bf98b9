"""The memory all staging happens in: taken once, cut into equal buffers, never grown."""

from __future__ import annotations

from hostcache.errors import Misaligned, StagingError, UsageError
from hostcache.region import Region

from .buffer import BufferState, DeviceMemory, StagingBuffer

__all__ = ["PAGE", "StagingArena"]

PAGE = 4096
"""Bytes. Buffers start on pages, so that a device may map or pin one by itself."""


class StagingArena:
    """A fixed number of staging buffers. Its size depends on the model and the buckets, never on the sessions.

    Args:
        region: the memory; the arena owns it from now on and gives it back at `close()`.
        buffers: how many; two per NPU core let one be filled while the core works on the other.
        device: makes the region's bytes visible to the device and back.
        spare: bytes at the region's end that are left to others.

    Attributes:
        buffers: all of them, whatever their state.
        buffer_bytes: bytes of each.

    Raises:
        UsageError: the region does not hold a page for each buffer.
        Misaligned: the region does not start on a page.

    Example:
        >>> from unittest.mock import Mock  # in place of a device
        >>> from hostcache import Region
        >>> from staging import DeviceMemory, StagingArena
        >>> arena = StagingArena(Region.anonymous(8192), buffers=2, device=Mock(DeviceMemory))
        >>> buffer = arena.acquire()
        >>> arena.free, buffer.state
        (1, <BufferState.FILLING: 'filling'>)
    """

    def __init__(self, region: Region, buffers: int, device: DeviceMemory, spare: int = 0) -> None:
        memory = region.buffer
        nbytes = region.nbytes - spare
        if buffers < 1 or nbytes < buffers * PAGE:
            raise UsageError(
                f"an arena of {nbytes} bytes cannot be cut into {buffers} buffers of at least {PAGE}",
                nbytes=nbytes,
                buffers=buffers,
            )
        address = memory.__array_interface__["data"][0]
        if address % PAGE:
            raise Misaligned(f"the arena starts at {address:#x}, not on a page of {PAGE} bytes", address=address)
        self._region = region
        self.buffer_bytes = nbytes // buffers // PAGE * PAGE
        self.buffers = [
            StagingBuffer(index, start, memory[start : start + self.buffer_bytes], device)
            for index, start in enumerate(range(0, buffers * self.buffer_bytes, self.buffer_bytes))
        ]

    @staticmethod
    def bytes_for(buffers: int, buffer_bytes: int) -> int:
        """Bytes of a region that holds `buffers` buffers of at least `buffer_bytes` each.

        Raises:
            UsageError: no buffers are asked for.
        """
        if buffers < 1:
            raise UsageError(f"an arena needs at least one buffer, got {buffers}", buffers=buffers)
        return buffers * (-(-buffer_bytes // PAGE) * PAGE)

    @property
    def free(self) -> int:
        """Buffers that `acquire` could hand out."""
        return sum(buffer.state is BufferState.FREE for buffer in self.buffers)

    def acquire(self) -> StagingBuffer:
        """Hand out a free buffer, now FILLING; whoever gets it releases it.

        Raises:
            StagingError: every buffer is in use.
        """
        for buffer in self.buffers:
            if buffer.state is BufferState.FREE:
                buffer.acquire()
                return buffer
        states = ", ".join(buffer.state.value for buffer in self.buffers)
        raise StagingError(
            f"all {len(self.buffers)} staging buffers are in use ({states}): finish a job and release its buffer first",
            buffers=len(self.buffers),
        )

    def close(self) -> None:
        """Give the region back; its buffers hold nothing from then on. Safe to call twice.

        Raises:
            RegionError: somebody still holds a view of the memory.
        """
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []
        self._region.close()

"""Where swapped blocks lie: memory, or a file without a name. Slots of one unit's size, by number."""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import RegionError
from .region import Region

__all__ = ["FileStore", "MemoryStore", "SwapStore"]


class SwapStore(Protocol):
    """A fixed number of slots of one size."""

    def write(self, slot: int, content: NDArray[np.uint8]) -> None:
        """Keep bytes, at most as many as a slot holds, in a slot.

        Raises:
            OSError: they cannot be kept; the slot holds nothing.
        """

    def read(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes that were written, so many, all there when this returns; valid until the next write.

        Raises:
            OSError: they cannot be read, or are not those that were written.
        """

    def close(self) -> None:
        """Give memory or file back. Safe to call twice."""


class MemoryStore:
    """Slots in memory, taken at once.

    Args:
        slots: how many.
        slot_bytes: bytes of each.

    Raises:
        RegionError: the memory is not there.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._region = Region.anonymous(slots * slot_bytes)
        self._slot_bytes = slot_bytes

    def write(self, slot: int, content: NDArray[np.uint8]) -> None:
        """See `SwapStore.write`; memory never refuses."""
        self._slot(slot)[: len(content)] = content

    def read(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        """See `SwapStore.read`; memory never refuses."""
        return self._slot(slot)[:nbytes]

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._region.close()

    def _slot(self, slot: int) -> NDArray[np.uint8]:
        return self._region.buffer[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]


class FileStore:
    """Slots in a file that only this process knows: it has no name, so nothing is left of it however the process ends.

    Flash cards and their controllers do return wrong bytes without an error, so each slot has a CRC-32. It is there
    to notice an accident within one process's life; what outlives a process has a cryptographic digest.

    Args:
        slots: how many.
        slot_bytes: bytes of each.
        folder: where the file is made; a disk, or it costs the memory that it is to save.

    Raises:
        RegionError: the folder does not take so large a file.
    """

    def __init__(self, slots: int, slot_bytes: int, folder: Path) -> None:
        self._slot_bytes = slot_bytes
        self._sums = [0] * slots
        nbytes = slots * slot_bytes
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 - open until close()
            try:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)  # a full disk shows now, not under load
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise RegionError(
                f"cannot set {nbytes / 2**20:.1f} MiB aside for swapping in {folder} ({error.strerror}): "
                "give a folder with room, or ask for less",
                asked=nbytes,
                folder=str(folder),
            ) from error

    def write(self, slot: int, content: NDArray[np.uint8]) -> None:
        """See `SwapStore.write`."""
        left, offset = content.data, slot * self._slot_bytes
        self._sums[slot] = zlib.crc32(left)
        while left:
            written = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[written:], offset + written

    def read(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        """See `SwapStore.read`."""
        content = np.empty(nbytes, np.uint8)
        left, offset = content.data, slot * self._slot_bytes
        while left:
            got = os.preadv(self._file.fileno(), [left], offset)
            if not got:
                raise OSError(f"the swap file ends at byte {offset}")
            left, offset = left[got:], offset + got
        if zlib.crc32(content.data) != self._sums[slot]:
            raise OSError(f"slot {slot} of the swap file holds other bytes than were written")
        return content

    def close(self) -> None:
        """Give the file back, and with it its disk space. Safe to call twice."""
        self._file.close()

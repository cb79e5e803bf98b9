"""A region of memory that a device can be handed: taken from the kernel's DMA heaps."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from . import dma_buf
from .errors import DeviceError, RegionError, UsageError
from .memory_budget import meminfo_bytes, scarcest_budget
from .region import Region, map_memory

__all__ = ["CMA_HEAPS", "PREFERRED_HEAPS", "HeapRegion"]

CMA_HEAPS = ("cma", "linux,cma", "reserved", "default_cma_region", "default-pool")
"""What kernels call the heap whose memory is contiguous; a kernel has one of them, or none.

Rockchip's kernels say `cma`, mainline `linux,cma`, `reserved` or `default-pool` after the region's origin, since Linux
6.17 also `default_cma_region` (Documentation/userspace-api/dma-buf-heaps.rst).
"""

PREFERRED_HEAPS = (*CMA_HEAPS, "system")
"""Contiguous first, which an NPU can use without an IOMMU too; then pages from all over, for one that has an IOMMU."""

HEAPS = Path("/dev/dma_heap")

UNCACHED = "uncached"
"""In a heap's name: memory past the CPU's caches. Rockchip's librga had a report of rknn_inputs_set taking 15 to 20 ms
instead of 0.75 ms when the input lay in such a heap."""

WAYS_OUT = {
    errno.ENOMEM: "take it at start before others have cut the rest up, in more pieces, or boot with a larger cma=",
    errno.EACCES: 'let your group open the heaps (udev: SUBSYSTEM=="dma_heap", GROUP="video", MODE="0660")',
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class HeapRegion(Region):
    """A region that consists of equal dma-bufs, mapped one behind the other; it serves as its own `DeviceMemory`.

    The kernel syncs a dma-buf as a whole, and letting the CPU see what a device wrote throws away what the CPU's caches
    hold: bytes that are being written into the same dma-buf at that moment would be lost. So whatever is synced by
    itself, such as a staging buffer, needs a piece of its own. Pieces also ask less of a fragmented CMA area.

    The CPU may access the region from the start; `sync_to_device` ends that for the pieces it touches, and
    `sync_from_device` begins it again.

    Args:
        nbytes: a multiple of pages in each piece.
        pieces: dma-bufs; all come from the same heap.
        heaps: names to try, in this order; a single one refuses what that heap cannot give.
        directory: where the heaps' nodes are.

    Attributes:
        heap: name of the heap it came from.
        piece_bytes: bytes of each piece.

    Raises:
        RegionError: none of the heaps gives the memory; the message says why, for each, and what to change.
        UsageError: the bytes are not equal pieces of whole pages, or a heap is one of uncached memory.
    """

    heap: str
    piece_bytes: int

    def __init__(
        self,
        nbytes: int,
        pieces: int = 1,
        heaps: Sequence[str] = PREFERRED_HEAPS,
        directory: Path = HEAPS,
    ) -> None:
        if pieces < 1 or nbytes < 1 or nbytes % (pieces * mmap.PAGESIZE):
            raise UsageError(
                f"{nbytes} bytes are not {pieces} equal pieces of whole pages of {mmap.PAGESIZE} bytes: "
                "round each piece up to pages",
                nbytes=nbytes,
                pieces=pieces,
            )
        for name in heaps:
            if UNCACHED in name:
                raise UsageError(
                    f"heap {name} gives memory that the CPU does not cache, which would make filling it many times "
                    "slower: name a cached heap",
                    heap=name,
                )
        self.piece_bytes = nbytes // pieces
        self.heap, self._descriptors = _take(pieces, self.piece_bytes, heaps, directory)
        # Where close() fails since an error's frames hold views, the memory goes with them, and these with the region.
        self._close_descriptors = weakref.finalize(self, _close_all, self._descriptors)
        self._close_descriptors.atexit = False
        try:
            super().__init__("dma heap", nbytes, map_memory(nbytes))
            base = self.buffer.__array_interface__["data"][0]
            for index, descriptor in enumerate(self._descriptors):
                dma_buf.map_over(base + index * self.piece_bytes, self.piece_bytes, descriptor)
            self.sync_from_device(0, nbytes)
        except BaseException:
            self._close_descriptors()
            raise

    def dma_buf_at(self, offset: int) -> tuple[int, int]:
        """What to hand to a driver for the byte at `offset`.

        Returns:
            The descriptor of its piece, which stays the region's, and the byte's offset in the piece.

        Raises:
            UsageError: `offset` is outside the region, or that is closed.
        """
        (index,) = self._touched(offset, 1)
        return self._descriptors[index], offset - index * self.piece_bytes

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Make what the host wrote visible to devices, for each piece that the range touches.

        Raises:
            DeviceError: the kernel refuses.
            UsageError: the range is not in the region, or that is closed.
        """
        self._sync(dma_buf.end_cpu_access, offset, nbytes)

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Make what devices wrote visible to the host, for each piece that the range touches; raises as above."""
        self._sync(dma_buf.begin_cpu_access, offset, nbytes)

    def close(self) -> None:
        """Give the memory back, once no driver holds it either. Safe to call twice.

        Raises:
            RegionError: somebody still holds a view of `buffer`; nothing was given back.
        """
        super().close()
        self._close_descriptors()

    def _sync(self, call: Callable[[int], None], offset: int, nbytes: int) -> None:
        touched = self._touched(offset, nbytes)
        try:
            for index in touched:
                call(self._descriptors[index])
        except OSError as error:
            said, code = str(error), error.errno
        else:
            return
        # Outside of the handler: the kernel's error would keep its frames alive, and with them callers' views.
        raise DeviceError(
            f"DMA_BUF_IOCTL_SYNC of pieces {touched} from heap {self.heap} said: {said}; close the region and take a "
            "new one",
            heap=self.heap,
            pieces=touched,
            errno=code,
        )

    def _touched(self, offset: int, nbytes: int) -> range:
        """Indices of the pieces that hold `nbytes` at `offset`."""
        if not self._descriptors:
            raise UsageError("the region is closed: its memory has been given back")
        if offset < 0 or nbytes < 1 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"bytes {offset}..{offset + nbytes - 1} are not in a region of {self.nbytes}",
                offset=offset,
                nbytes=nbytes,
            )
        return range(offset // self.piece_bytes, -(-(offset + nbytes) // self.piece_bytes))


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _take(pieces: int, piece_bytes: int, heaps: Sequence[str], directory: Path) -> tuple[str, list[int]]:
    """Name and dma-bufs of the first heap that gives all pieces."""
    refused: dict[str, OSError] = {}
    for name in heaps:
        if not (directory / name).exists():
            continue
        answer = _allocate(directory / name, pieces, piece_bytes)
        if isinstance(answer, list):
            return name, answer
        refused[name] = answer
    asked = f"{pieces} x {piece_bytes / 2**20:.1f} MiB for DMA"
    if not refused:
        raise RegionError(
            f"cannot take {asked}: {directory} has none of {', '.join(heaps)}; use a kernel with "
            "CONFIG_DMABUF_HEAPS, hand the heaps to the container, or use ordinary memory if the runtime copies",
            asked=pieces * piece_bytes,
            heaps=tuple(heaps),
        )
    said = "; ".join(f"heap {name}: {error.strerror}{_why(directory / name, error)}" for name, error in refused.items())
    ways = dict.fromkeys(WAYS_OUT.get(error.errno or 0, "see the kernel's log") for error in refused.values())
    budget = scarcest_budget()
    raise RegionError(
        f"cannot take {asked} ({said}): {'; or '.join(ways)}",
        asked=pieces * piece_bytes,
        errno={name: error.errno for name, error in refused.items()},
        cma_free=meminfo_bytes("CmaFree"),
        available=None if budget is None else budget.available,
    )


def _allocate(heap: Path, pieces: int, piece_bytes: int) -> list[int] | OSError:
    """All pieces from one heap, or why it gives none."""
    budget = scarcest_budget()
    if heap.name not in CMA_HEAPS and budget is not None and pieces * piece_bytes > budget.available:
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # asking, the kernel would end processes to find it
    descriptors: list[int] = []
    try:
        opened = os.open(heap, os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(pieces):
                descriptors += [dma_buf.allocate(opened, piece_bytes)]
        finally:
            os.close(opened)
    except OSError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        return error
    return descriptors


def _why(heap: Path, error: OSError) -> str:
    """What stands behind a heap's refusal: whose its node is, or what the kernel says is left in it."""
    if error.errno == errno.EACCES:
        return f", {heap} is {stat.S_IMODE(heap.stat().st_mode):04o} {_owner(heap)}"
    field = "CmaFree" if heap.name in CMA_HEAPS else "MemAvailable"
    nbytes = meminfo_bytes(field)
    return "" if nbytes is None else f", {field} {nbytes / 2**20:.1f} MiB"


def _owner(node: Path) -> str:
    try:
        return f"{node.owner()}:{node.group()}"
    except KeyError:  # without names, as in a container
        found = node.stat()
        return f"{found.st_uid}:{found.st_gid}"

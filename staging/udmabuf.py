"""Scattered pages as one contiguous dma-buf, not copied: an experiment towards an NPU that reads the pool itself."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache import dma_buf
from hostcache.errors import DeviceError, Misaligned, UsageError
from hostcache.region import Region

__all__ = ["ContiguousView"]

DEVICE = Path("/dev/udmabuf")

PARAMETERS = Path("/sys/module/udmabuf/parameters")
"""`list_limit` (runs, 1024 by default) and `size_limit_mb` (64), which root may raise while the kernel runs."""

WAYS_OUT = {
    errno.ENOENT: "use a kernel with CONFIG_UDMABUF",
    errno.EACCES: 'let your group open it (udev: KERNEL=="udmabuf", GROUP="video", MODE="0660")',
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class ContiguousView:
    """Runs of whole pages of a memfd region, one behind the other: what a gather would copy, as a dma-buf.

    A row of a block (one layer's K or V of one head, 16 tokens) fills pages of 4 KiB at head dim 128 and its multiples;
    with other head dims the gather has to copy. A run may occur more than once. For a device the pages are in a row
    behind an IOMMU only.

    The view holds the pages for as long as it is open, whatever becomes of the region.

    Args:
        region: made by `Region.memfd`.
        runs: byte offset in the region and bytes of each run, in the order in which they shall lie.
        device: the kernel's node.
        parameters: the driver's, read to name a limit that is exceeded.

    Attributes:
        fd: the dma-buf, for a driver to import; -1 once closed.
        buffer: uint8 `[nbytes]`, read-only; shows what the region holds now.

    Raises:
        UsageError: the region has no memfd, no run is given, or one is outside the region, or they are more than the
            driver's limits allow.
        Misaligned: a run is not whole pages.
        DeviceError: the kernel has no udmabuf, keeps it closed, or refuses.
    """

    def __init__(
        self,
        region: Region,
        runs: Sequence[tuple[int, int]],
        device: Path = DEVICE,
        parameters: Path = PARAMETERS,
    ) -> None:
        if region.fd is None:
            raise UsageError(f"a region of kind {region.kind!r} has no memfd: use Region.memfd", kind=region.kind)
        _check_runs(region, runs)
        nbytes = sum(size for _, size in runs)
        self.fd = _create(region.fd, runs, device, parameters)
        try:
            # The driver lists the pages for devices when the CPU first begins an access; to end one without is EINVAL.
            dma_buf.begin_cpu_access(self.fd)
            self._map = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            # Linux 6.1 reports a bad page cache when a memfd goes whose pages are still mapped by way of a dma-buf.
            self._memfd = os.dup(region.fd)
        except OSError as error:
            os.close(self.fd)
            raise DeviceError(f"a dma-buf of {nbytes} bytes from {device} cannot be mapped: {error}") from error
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._region = region
        region.hold_pages()  # in a hole, the memfd would get other pages than the view has

    def sync_to_device(self) -> None:
        """Make what the host wrote to the region visible to a device that reads the view.

        Raises:
            DeviceError: the kernel refuses.
            UsageError: the view is closed.
        """
        if self.fd < 0:
            raise UsageError("the view is closed: its pages were let go")
        try:
            dma_buf.end_cpu_access(self.fd)
        except OSError as error:
            raise DeviceError(f"DMA_BUF_IOCTL_SYNC of a view said: {error}; make a new one", fd=self.fd) from error

    def close(self) -> None:
        """Let go of the pages. Safe to call twice.

        Raises:
            UsageError: somebody still holds a view of `buffer`; nothing was let go.
        """
        if self.fd < 0:
            return
        self.buffer = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError as error:
            self.buffer = np.frombuffer(self._map, dtype=np.uint8)
            raise UsageError("the view is still in use: drop every view of its buffer before close()") from error
        os.close(self.fd)
        os.close(self._memfd)
        self._region.let_pages_go()
        self.fd = -1


def _check_runs(region: Region, runs: Sequence[tuple[int, int]]) -> None:
    if not runs:
        raise UsageError("a view needs at least one run of pages")
    for offset, nbytes in runs:
        if offset % mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
            raise Misaligned(
                f"{nbytes} bytes at {offset} are not whole pages of {mmap.PAGESIZE} bytes: gather them instead",
                offset=offset,
                nbytes=nbytes,
            )
        if offset < 0 or nbytes < 1 or offset + nbytes > region.nbytes:
            raise UsageError(
                f"{nbytes} bytes at {offset} are not in a region of {region.nbytes}", offset=offset, nbytes=nbytes
            )


def _create(memfd: int, runs: Sequence[tuple[int, int]], device: Path, parameters: Path) -> int:
    _check_limit(parameters / "list_limit", len(runs), "runs")
    _check_limit(parameters / "size_limit_mb", -(-sum(size for _, size in runs) // 2**20), "MiB")
    try:
        opened = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            return dma_buf.create_list(opened, memfd, runs)
        finally:
            os.close(opened)
    except OSError as error:
        way = WAYS_OUT.get(error.errno or 0, "see the kernel's log")
        raise DeviceError(
            f"{device} gives no view of {len(runs)} runs: {error.strerror}; {way}, or gather",
            device=str(device),
            errno=error.errno,
        ) from error


def _check_limit(parameter: Path, needed: int, unit: str) -> None:
    """Refuse what the driver would, which says EINVAL and not why; without the file, ask the driver."""
    try:
        limit = int(parameter.read_text())
    except OSError:
        return
    if needed > limit:
        raise UsageError(
            f"a view of {needed} {unit} is above the kernel's limit of {limit}: stage a smaller bucket, "
            f"or as root: echo {needed} > {parameter}",
            needed=needed,
            limit=limit,
        )

"""The pool's memory: taken once at start, touched so that it is really there, never grown."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import RegionError, UsageError
from .memory_budget import scarcest_budget

if TYPE_CHECKING:
    from .dma_heap import HeapRegion

__all__ = ["Region"]

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page with 4 KiB base pages (x86-64, and arm64 with 4 KiB granules)."""

MADV_POPULATE_WRITE = 23
"""include/uapi/asm-generic/mman-common.h, Linux 5.14; Python's mmap module does not name it."""

MADV_WIPEONFORK = 18
"""include/uapi/asm-generic/mman-common.h, Linux 4.14; for private memory only."""

UNPOPULATED = (errno.ENOMEM, errno.EFAULT)
"""What madvise(2) says when pages cannot be had; touching them would end the process. Else it knows no populating."""


class Region:
    """A fixed range of memory that this object owns until `close()`.

    Made by `Region.anonymous`, `Region.memfd` or `Region.dma_heap`. The memory is really there before any of them
    returns: a board that lacks it says so at start and not in the middle of a conversation.

    A process forked off later finds zeros in an anonymous region (a kernel older than 4.14 gives it a copy): no
    conversation leaks into it, and writing on in the parent does not copy the pool page by page.

    Parts of it can go back to the kernel for a while (`give_back`), and come again (`populate`).

    Args:
        kind: as below.
        nbytes: as below.
        mapping: holds the region's bytes; the region owns it from now on.
        start: their first byte in it.
        fd: as below; the region owns it once the constructor has returned.

    Attributes:
        nbytes: usable bytes, as asked for.
        buffer: uint8 `[nbytes]`; valid until `close()`.
        kind: `"anonymous"`, `"memfd"` or `"dma heap"`.
        fd: the memfd, or None.
        huge_pages: whether the kernel accepted the advice to back the range with huge pages.
    """

    def __init__(self, kind: str, nbytes: int, mapping: mmap.mmap, start: int = 0, fd: int | None = None) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.fd = fd
        self.huge_pages = False
        self._gives_back = kind != "dma heap"  # a driver may use its pages at any time
        self._users = 0  # of its pages, other than this process
        self._map = mapping
        self._start = start
        self.buffer: NDArray[np.uint8] = self._view()

    @classmethod
    def anonymous(cls, nbytes: int) -> Region:
        """Take private memory, backed by huge pages where the kernel allows it.

        Raises:
            RegionError: the memory is not there; the message says what was asked and what is available.
            UsageError: `nbytes` is not positive.
        """
        require_available(nbytes)
        # A huge page must start at a multiple of its size, and mmap only promises base pages:
        # map one huge page more and start inside. The slack is never touched, so it costs no memory.
        mapping = map_memory(nbytes + HUGE_PAGE)
        start = -_address(mapping) % HUGE_PAGE
        region = cls("anonymous", nbytes, mapping, start)
        with contextlib.suppress(OSError):  # a kernel that cannot: the child has a copy, as of all other memory
            mapping.madvise(MADV_WIPEONFORK)
        region._take_pages()
        return region

    @classmethod
    def memfd(cls, nbytes: int, name: str = "rockpage") -> Region:
        """Take memory behind a file descriptor, so that another process or driver can map the same pages.

        It is sealed: nobody it is shared with can take pages away.

        Raises:
            RegionError: the memory is not there, or the kernel has no memfd.
            UsageError: `nbytes` is not positive.
        """
        require_available(nbytes)
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise RegionError(f"cannot create a memfd: {error}; use an anonymous region", error=error) from error
        try:
            region = cls("memfd", nbytes, map_memory(nbytes, fd), fd=fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            region._take_pages()
        except BaseException:
            os.close(fd)
            raise
        return region

    @staticmethod
    def dma_heap(nbytes: int, pieces: int = 1, heaps: Sequence[str] | None = None) -> HeapRegion:
        """Take memory that devices can be handed, from the first of some DMA heaps that gives it.

        See `HeapRegion`, whose arguments and errors these are.
        """
        from .dma_heap import PREFERRED_HEAPS, HeapRegion  # noqa: PLC0415 - a HeapRegion is a Region: it comes later

        return HeapRegion(nbytes, pieces, PREFERRED_HEAPS if heaps is None else heaps)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, in whose multiples memory goes back to the kernel.

        Of a huge page that is given back in part the kernel frees nothing until it finds the time to split it, so
        where there may be huge pages only whole ones go.
        """
        return HUGE_PAGE if self.huge_pages else mmap.PAGESIZE

    @property
    def gives_back(self) -> bool:
        """Whether pages can go back to the kernel: not a DMA heap's, nor locked ones, nor while a device uses them."""
        return self._gives_back and not self._users and not self._map.closed

    def give_back(self, offset: int, nbytes: int) -> bool:
        """Give pages back to the kernel: whoever reads there finds zeros, and memory is taken again on a touch.

        Args:
            offset: of the first byte in `buffer`; a multiple of `page_bytes`.
            nbytes: a multiple of it, too.

        Returns:
            Whether they are gone. If not they are as they were; `gives_back` is false from now on if they are locked,
            or the kernel knows no such call.

        Raises:
            UsageError: the range is not in the region, or not of whole pages.
        """
        if not self.gives_back:
            return False
        page = self.page_bytes
        if offset % page or nbytes % page or nbytes < 1 or not 0 <= offset <= self.nbytes - nbytes:
            raise UsageError(
                f"{nbytes} bytes at {offset} cannot be given back: whole pages of {page} among {self.nbytes} can",
                offset=offset,
                nbytes=nbytes,
                page_bytes=page,
            )
        advice = mmap.MADV_DONTNEED if self.fd is None else mmap.MADV_REMOVE
        try:
            self._map.madvise(advice, self._start + offset, nbytes)
        except OSError:
            self._gives_back = False
        return self._gives_back

    def populate(self, offset: int, nbytes: int) -> None:
        """Have the pages of a range there, those that were given back as zeros; what lies in the others stays.

        Where the memory is short, the kernel may end processes to find it: ask what is available first.

        Raises:
            RegionError: they cannot be had.
        """
        first_page = (self._start + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._map.madvise(MADV_POPULATE_WRITE, first_page, self._start + offset + nbytes - first_page)
        except OSError as error:
            if error.errno in UNPOPULATED:
                raise refusal(nbytes, f"its pages cannot be had: {error.strerror}") from error
            # Before Linux 5.14: touch each page ourselves.
            self.buffer[offset : offset + nbytes : mmap.PAGESIZE] |= 0
            self.buffer[offset + nbytes - 1] |= 0  # the range may begin in the middle of a page, and so end in one more

    def hold_pages(self) -> None:
        """Somebody else uses the very pages, such as a device: none is given back before `let_pages_go`."""
        self._users += 1

    def let_pages_go(self) -> None:
        """One who called `hold_pages` uses them no longer."""
        self._users -= 1

    def close(self) -> None:
        """Give the memory back. Safe to call twice.

        Raises:
            RegionError: somebody still holds a view of `buffer`; nothing was given back.
        """
        if self._map.closed:
            return
        self.buffer = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError as error:
            self.buffer = self._view()
            raise RegionError("the region is still in use: drop every view of its buffer before close()") from error
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _view(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._map, dtype=np.uint8, count=self.nbytes, offset=self._start)

    def _take_pages(self) -> None:
        self.huge_pages = self._advise_huge_pages()
        self.populate(0, self.nbytes)

    def _advise_huge_pages(self) -> bool:
        if self.nbytes < HUGE_PAGE:
            return False
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them: base pages serve as well, only slower
            return False
        return True


def require_available(nbytes: int) -> None:
    """Do nothing if a region of `nbytes` makes sense and the kernel has as much.

    Raises:
        UsageError: `nbytes` is not positive.
        RegionError: the kernel has less available.
    """
    if nbytes < 1:
        raise UsageError(f"a region needs at least one byte, got {nbytes}", nbytes=nbytes)
    budget = scarcest_budget()
    if budget is not None and nbytes > budget.available:
        raise refusal(nbytes, f"{budget.owner} has {budget.available / 2**20:.1f} MiB left")


def map_memory(nbytes: int, fd: int | None = None) -> mmap.mmap:
    """Map private memory, or a new memfd, made as long as that.

    Raises:
        RegionError: the address space, or the memfd's file system, has not as much.
    """
    try:
        if fd is None:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        raise refusal(nbytes, f"mmap said: {error}") from error


def refusal(nbytes: int, why: str) -> RegionError:
    """The error for memory that cannot be had."""
    budget = scarcest_budget()
    return RegionError(
        f"cannot take {nbytes / 2**20:.1f} MiB for the pool ({why}): ask for a smaller pool or free memory first",
        asked=nbytes,
        available=None if budget is None else budget.available,
    )


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0])

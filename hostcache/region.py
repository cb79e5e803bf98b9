"""The pool's memory: taken once at start, touched so that it is really there, never grown."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from .errors import RegionError, UsageError
from .memory_budget import MemoryBudget, scarcest_budget

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

    Made by `Region.anonymous` or `Region.memfd`. Every page is touched before the constructor returns: a board
    that lacks the memory says so at start and not in the middle of a conversation.

    A process forked off later finds zeros in an anonymous region (a kernel older than 4.14 gives it a copy): no
    conversation leaks into it, and writing on in the parent does not copy the pool page by page.

    Attributes:
        nbytes: usable bytes, as asked for.
        buffer: uint8 `[nbytes]`; valid until `close()`.
        kind: `"anonymous"` or `"memfd"`.
        fd: the memfd, or None.
        huge_pages: whether the kernel accepted the advice to back the range with huge pages.
    """

    def __init__(self, kind: str, nbytes: int, fd: int | None) -> None:
        if nbytes < 1:
            raise UsageError(f"a region needs at least one byte, got {nbytes}", nbytes=nbytes)
        self.kind = kind
        self.nbytes = nbytes
        self.fd = fd
        budget = scarcest_budget()
        if budget is not None and nbytes > budget.available:
            self._refuse(f"{budget.owner} has {budget.available / 2**20:.1f} MiB left", budget)
        # A huge page must start at a multiple of its size, and mmap only promises base pages:
        # map one huge page more and start inside. The slack is never touched, so it costs no memory.
        try:
            if fd is None:
                self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                os.ftruncate(fd, nbytes)
                self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        except (OSError, ValueError, OverflowError) as error:
            self._refuse(f"mmap said: {error}", budget)
        address = np.frombuffer(self._map, dtype=np.uint8).__array_interface__["data"][0]
        self._start = -address % HUGE_PAGE if fd is None else 0
        self.buffer = self._usable()
        self.huge_pages = self._advise_huge_pages()
        if fd is None:
            with contextlib.suppress(OSError):  # a kernel that cannot: the child has a copy, as of all other memory
                self._map.madvise(MADV_WIPEONFORK)
        self._populate(budget)

    @classmethod
    def anonymous(cls, nbytes: int) -> Region:
        """Take private memory, backed by huge pages where the kernel allows it.

        Raises:
            RegionError: the memory is not there; the message says what was asked and what is available.
            UsageError: `nbytes` is not positive.
        """
        return cls("anonymous", nbytes, None)

    @classmethod
    def memfd(cls, nbytes: int, name: str = "rockpage") -> Region:
        """Take memory behind a file descriptor, so that another process or driver can map the same pages.

        Raises:
            RegionError: the memory is not there, or the kernel has no memfd.
            UsageError: `nbytes` is not positive.
        """
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise RegionError(f"cannot create a memfd: {error}; use an anonymous region", error=error) from error
        try:
            return cls("memfd", nbytes, fd)
        except BaseException:
            os.close(fd)
            raise

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
            self.buffer = self._usable()
            raise RegionError("the region is still in use: drop every view of its buffer before close()") from error
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _usable(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._map, np.uint8, self.nbytes, self._start)

    def _advise_huge_pages(self) -> bool:
        if self.nbytes < HUGE_PAGE:
            return False
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them: base pages serve as well, only slower
            return False
        return True

    def _populate(self, budget: MemoryBudget | None) -> None:
        first_page = self._start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._map.madvise(MADV_POPULATE_WRITE, first_page, self._start + self.nbytes - first_page)
        except OSError as error:
            if error.errno in UNPOPULATED:
                self._refuse(f"its pages cannot be had: {error.strerror}", budget)
            # Before Linux 5.14: touch each page ourselves.
            self.buffer[:: mmap.PAGESIZE] = 0

    def _refuse(self, why: str, budget: MemoryBudget | None) -> NoReturn:
        raise RegionError(
            f"cannot take {self.nbytes / 2**20:.1f} MiB for the pool ({why}): "
            "ask for a smaller pool or free memory first",
            asked=self.nbytes,
            available=None if budget is None else budget.available,
        )

"""Stands in for the kernel's ioctls where a machine has no DMA heaps: memfds for dma-bufs, a budget for each heap.

Heaps are plain files in a directory, so opening, permissions and names are real, and so is the mapping. `make test-vm`
does without: it has real ones.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hostcache import dma_buf


class FakeHeaps:
    """Heaps in `directory`; each call's effect is noted.

    Attributes:
        directory: where the heaps' nodes are.
        budget: bytes each heap still gives.
        handed_out: descriptors of dma-bufs, in the order they were taken.
        synced: `"begin"` or `"end"` and the index in `handed_out`, for each sync.
        refusal: errno that every sync fails with; 0 lets them pass.
    """

    def __init__(self, directory: Path, budget: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.budget = budget
        self.handed_out: list[int] = []
        self.synced: list[tuple[str, int]] = []
        self.refusal = 0
        directory.mkdir()
        for name in budget:
            (directory / name).touch()
        monkeypatch.setattr(dma_buf, "allocate", self._allocate)
        monkeypatch.setattr(dma_buf, "begin_cpu_access", lambda fd: self._sync("begin", fd))
        monkeypatch.setattr(dma_buf, "end_cpu_access", lambda fd: self._sync("end", fd))
        monkeypatch.setattr(dma_buf, "create_list", self._create_list)

    def _allocate(self, heap: int, nbytes: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{heap}")).name
        if nbytes > self.budget[name]:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.budget[name] -= nbytes
        fd = os.memfd_create(name)
        os.ftruncate(fd, nbytes)
        self.handed_out.append(fd)
        return fd

    def _create_list(self, _udmabuf: int, memfd: int, runs: Sequence[tuple[int, int]]) -> int:
        """A copy, unlike the kernel's, which shares the pages: good for the order of runs and nothing else."""
        fd = os.memfd_create("view")
        os.write(fd, b"".join(os.pread(memfd, nbytes, offset) for offset, nbytes in runs))
        self.handed_out.append(fd)
        return fd

    def _sync(self, which: str, fd: int) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        self.synced.append((which, self.handed_out.index(fd)))


def open_descriptors() -> int:
    """Descriptors this process holds."""
    return len(os.listdir("/proc/self/fd"))

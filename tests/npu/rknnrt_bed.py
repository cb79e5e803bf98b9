"""A board for the rknnrt runtime on any machine: the stub of the vendor's library, and DMA heaps that forgive nothing.

What the CPU writes to a dma-buf reaches the device by a sync only, and the other way round; and a sync towards the CPU
replaces what the CPU wrote in the meantime, as throwing bytes out of its caches does.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from hostcache import dma_heap
from npu.discovery import discover
from npu.machine import Machine
from tests.board.stub import Stub
from tests.hostcache.fake_heaps import FakeHeaps

__all__ = ["STUB_SOURCE", "RknnrtBed", "ShadowHeaps", "compile_stub"]

STUB_SOURCE = Path(__file__).parents[1] / "board" / "stub_librknnrt.c"


def compile_stub(library: Path, *options: str) -> Path:
    """Compile the stub for this machine."""
    flags = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread")
    subprocess.run(["cc", *flags, *options, str(STUB_SOURCE), "-o", str(library), "-lm"], check=True)
    return library


class ShadowHeaps(FakeHeaps):
    """Heaps whose dma-bufs the device sees by shadows of them, which hold NaN until the first sync.

    Args:
        directory: where their nodes shall be.
        stub: that is told of the shadows.
        monkeypatch: puts them in the kernel's place.
        budget: bytes of the one heap.
    """

    def __init__(self, directory: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, budget: int = 64 << 20) -> None:
        super().__init__(directory, {"cma": budget}, monkeypatch)
        self._stub = stub
        self._shadows: dict[int, int] = {}

    def _allocate(self, heap: int, nbytes: int) -> int:
        fd = super()._allocate(heap, nbytes)
        if (old := self._shadows.pop(fd, None)) is not None:  # the number is used again
            os.close(old)
        self._shadows[fd] = os.memfd_create("seen by the device")
        os.pwrite(self._shadows[fd], b"\xff" * nbytes, 0)
        self._stub.shadow(fd, self._shadows[fd])
        return fd

    def _sync(self, which: str, fd: int) -> None:
        super()._sync(which, fd)
        source, target = (fd, self._shadows[fd]) if which == "end" else (self._shadows[fd], fd)
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)

    def close(self) -> None:
        """Close the shadows."""
        while self._shadows:
            os.close(self._shadows.popitem()[1])


class RknnrtBed:
    """Puts a board in the place of this machine, whose NPU says nothing of itself.

    Args:
        library: the stub.
        folder: for whatever is written.
        monkeypatch: puts it there.

    Attributes:
        stub: the library.
        heaps: the kernel's.
    """

    def __init__(self, library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stub = Stub(library)
        self.stub.fail("")
        self.heaps = ShadowHeaps(folder / "dma_heap", self.stub, monkeypatch)
        monkeypatch.setattr("npu.device_lock.lock_folders", lambda: [folder])
        monkeypatch.setattr("npu.runtimes.discover", lambda: discover(Machine(folder / "nothing")))
        monkeypatch.setattr("npu.runtimes.LIBRARY", library)
        monkeypatch.setattr(
            "npu.rknnrt_device.HeapRegion", partial(dma_heap.HeapRegion, directory=self.heaps.directory)
        )

    def close(self) -> None:
        """See that nothing is left in the library."""
        self.stub.fail("")
        self.heaps.close()
        assert (self.stub.contexts, self.stub.memories) == (0, 0)

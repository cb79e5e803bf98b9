"""The stub of the vendor's library, in a process that has it as /usr/lib/librknnrt.so, or compiled for this machine."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from npu.rknnrt import LIBRARY

__all__ = ["Stub"]


class Stub:
    """Says what goes wrong in it, and looks into it.

    Args:
        path: of its file.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        self._library = ctypes.CDLL(str(path))

    def fail(self, faults: str) -> None:
        """Set what goes wrong, see `stub_librknnrt.c`; calls are counted from now. Not while one is running."""
        os.environ["ROCKPAGE_STUB_FAULTS"] = faults
        self._library.stub_count_anew()

    @property
    def contexts(self) -> int:
        """Contexts that are alive."""
        return int(self._library.stub_contexts())

    @property
    def memories(self) -> int:
        """Memories that were made of dma-bufs and not destroyed."""
        return int(self._library.stub_memories())

    def calls(self, name: str) -> int:
        """How often a call came since `fail`."""
        return int(self._library.stub_calls(name.encode()))

    def shadow(self, dma_buf: int, seen: int) -> None:
        """Let the device see a dma-buf as the file `seen` has it, when it is imported."""
        self._library.stub_shadow(dma_buf, seen)

"""The stub of the vendor's library, in a process that has it as /usr/lib/librknnrt.so."""

from __future__ import annotations

import ctypes
import os

__all__ = ["Stub"]


class Stub:
    """Says what goes wrong in it, and looks into it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("/usr/lib/librknnrt.so")

    def fail(self, faults: str) -> None:
        """Set what goes wrong, see `stub_librknnrt.c`; calls are counted from now. Not while one is running."""
        os.environ["ROCKPAGE_STUB_FAULTS"] = faults
        self._library.stub_count_anew()

    @property
    def contexts(self) -> int:
        """Contexts that are alive."""
        return int(self._library.stub_contexts())

"""The self-test's step for memory that devices can be handed: is it there, does it hold what is written?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hostcache.dma_heap import UNCACHED, HeapRegion
from hostcache.errors import DeviceError, RegionError

from .board import Heap
from .selftest_report import Step

__all__ = ["heaps"]

_NBYTES, _PIECES = 2 << 20, 2


def heaps(found: Sequence[Heap], folder: Path) -> Step:
    """Take some memory from each heap that is open, write it, sync it both ways, read it, and give it back.

    Args:
        found: the machine's.
        folder: where their nodes are.
    """
    name = "heaps"
    answers = {heap.name: _try(heap, folder) for heap in found}
    words = "; ".join(f"{heap} {answer}" for heap, answer in answers.items())
    if any(answer.startswith("FAILED") for answer in answers.values()):
        return Step(name, "failed", words)
    if _HOLDS in answers.values():
        return Step(name, "proved", words)
    return Step(name, "not run", words or "the kernel has no DMA heaps; rknnlite needs none", needed=False)


_HOLDS = f"gives {_NBYTES >> 20} MiB, which hold what is written over a sync"


def _try(heap: Heap, folder: Path) -> str:
    if UNCACHED in heap.name:
        return "is left alone: the CPU does not cache it"
    if not heap.node.usable:
        return "is closed to this user" if heap.node.kind == "device" else f"has no node ({heap.node.kind})"
    try:
        region = HeapRegion(_NBYTES, _PIECES, [heap.name], folder)
        try:
            return _HOLDS if _holds(region) else "FAILED: its memory holds something else than was written"
        finally:
            region.close()
    except RegionError as error:
        return f"gives nothing: {error}"
    except DeviceError as error:
        return f"FAILED: {error}"


def _holds(region: HeapRegion) -> bool:
    """Whether bytes are what they were after a sync to devices and back."""
    pattern = np.random.default_rng(0).integers(0, 256, _NBYTES, np.uint8)
    region.buffer[...] = pattern
    region.sync_to_device(0, _NBYTES)
    region.sync_from_device(0, _NBYTES)
    return bool(np.array_equal(region.buffer, pattern))

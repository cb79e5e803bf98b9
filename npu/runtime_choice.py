"""What `auto` means on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hostcache.dma_heap import CMA_HEAPS, PREFERRED_HEAPS

from .board import Board, Npu

__all__ = ["choose", "heaps_for", "vendor_npu"]


def vendor_npu(board: Board) -> Npu | None:
    """The NPU, if the vendor's runtime can use it."""
    return board.npu if board.npu is not None and board.npu.driver == "rknpu" else None


def heaps_for(npu: Npu | None) -> Sequence[str]:
    """DMA heaps whose memory an NPU sees: without an IOMMU, contiguous memory only."""
    return PREFERRED_HEAPS if npu is None or npu.iommu else CMA_HEAPS


def choose(board: Board, *, graphs: bool, library: Path, resident: bool = False) -> tuple[list[str], str]:
    """Runtimes to try on a machine, the best first.

    Args:
        board: the machine.
        graphs: whether the model's attention graphs are given.
        library: where librknnrt.so should be.
        resident: whether sequences are to stay staged, which no runtime that copies can stand in for.

    Returns:
        Their names, and why it is these.
    """
    npu = vendor_npu(board)
    if npu is None:
        return ["cpu"], "there is no NPU with the vendor's driver"
    if not graphs:
        return ["cpu"], f"no graphs were given for {npu.name}"
    if not library.exists():
        return ["rknnlite"], f"{library} is not there to be called"
    usable = heaps_for(npu)
    heaps = [heap for heap in board.heaps if heap.name in usable]
    if not any(heap.node.usable for heap in heaps):
        found = ", ".join(str(heap.node) for heap in heaps) or f"none of {', '.join(usable)} is there"
        return ["rknnlite"], f"no DMA heap is open to this user: {found}"
    names = ["rknnrt"] if resident else ["rknnrt", "rknnlite"]
    return names, f"{npu.name}, its graphs, {library} and an open DMA heap are there"

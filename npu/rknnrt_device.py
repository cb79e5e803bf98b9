"""The vendor's C library as an attention device: the NPU reads K and V where they were gathered."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.dma_heap import PREFERRED_HEAPS, HeapRegion
from hostcache.errors import DeviceError, RegionError, UsageError
from staging import TILE_CHANNELS, StagingLayout

from .board_device import CORES, JOB_SECONDS, BoardDevice, BoardRun, require_cores
from .board_graphs import BoardGraphs
from .device import AttentionJob
from .rknnrt import LIBRARY, Library
from .rknnrt_context import Operand, RknnrtContext

__all__ = ["ADDRESSES", "RknnrtDevice"]

ADDRESSES = 1 << 32
"""Bytes that an NPU behind its IOMMU can tell apart: the vendor's driver gives it 32 bits, and the library its first
domain only."""

_OFFSETS = 1 << 31
"""Bytes of a dma-buf that the library can be pointed to: its offset is an int32."""

_TILE = np.dtype(np.complex128)
"""Stands for the bytes of `TILE_CHANNELS` fp16: whole tiles are moved, whatever is in them."""


class RknnrtDevice(BoardDevice[RknnrtContext]):
    """A `BoardDevice` that hands the NPU the arena's own memory, in tiles.

    K and V, which are nearly all of a launch, are read in place. The query, the mask and the result are small; the
    core's thread lays them out in tiles in memory of its own, so that only K and V have to be staged in that order.

    **Sync.** The arena consists of dma-bufs, which the kernel syncs as a whole: `DMA_BUF_IOCTL_SYNC` writes back what
    the CPU's caches hold for every device that has imported one, and importing does the same. The library's own
    `rknn_mem_sync` cannot serve here: the vendor's driver (0.9.8, `rknpu_gem_sync_ioctl`) refuses what is not marked as
    cacheable, and what it imports is not; that is also why the library is told not to sync by itself. Ranges are
    collected, and the dma-bufs they touch are synced once when a job is submitted, however many ranges there were.
    The NPU only reads the arena. It writes into a dma-buf of the core's, and only there bytes are thrown out of the
    caches, by the one thread that ever writes there: so no sync can lose what another thread is writing.

    Args:
        folder: what `rockpage export attention` wrote.
        kv_heads: of the model; likewise the others.
        heads: query heads.
        head_dim: elements per head.
        cores: NPU cores to use.
        seconds: a run that takes longer is given up.
        library: path of librknnrt.so.
        heaps: DMA heaps to take memory from, see `hostcache.dma_heap.HeapRegion`.

    Attributes:
        name: `"rknnrt"`.
        tiled: always.
        reads_in_place: always.

    Raises:
        UsageError: the folder has no graphs of attention, they are not for this model, or no cores.
        BadModelFile: the folder is damaged, or of another version of rockpage.
        RegionError: no heap is open to this user, or none has the memory.
        DeviceError: a call of the vendor's failed, its library is of another version than the compiler or of one that
            is not known, it lays operands out in another way, a bucket is not whole tiles, or another process has the
            NPU.
    """

    name = "rknnrt"
    tiled = True
    reads_in_place = True

    def __init__(
        self,
        folder: Path,
        kv_heads: int,
        heads: int,
        head_dim: int,
        *,
        cores: int = CORES,
        seconds: float = JOB_SECONDS,
        library: Path = LIBRARY,
        heaps: Sequence[str] = PREFERRED_HEAPS,
    ) -> None:
        require_cores(cores)
        graphs = BoardGraphs(folder, kv_heads, heads, head_dim)
        layouts = _layouts(graphs)
        self._library = Library(library)
        self._heaps = tuple(heaps)
        self._arena: HeapRegion | None = None  # its own, see `take`; this is a view
        self._unsynced: set[int] = set()  # dma-bufs of the arena that the host wrote to
        side_bytes = _whole_pages(max(_side_bytes(layout) for layout in layouts))
        self._side = HeapRegion(cores * side_bytes, cores, self._heaps)  # a dma-buf for each core
        try:
            super().__init__(graphs, cores, seconds)
        except BaseException:
            self._side.close()
            raise
        try:
            for layout in layouts:
                self._contexts[0][layout.rows, bool(layout.mask_rows)].prepare(layout)
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int, piece_bytes: int) -> HeapRegion:
        """Take the arena's memory; whoever gets it closes it, after this device.

        Args:
            nbytes: at least.
            piece_bytes: of each dma-buf, whole pages.

        Raises:
            RegionError: no heap gives the memory, or the NPU cannot address it.
            UsageError: the device has an arena already.
        """
        if self._arena is not None:
            raise UsageError("this device has an arena already: open another device for another one")
        pieces = -(-nbytes // piece_bytes)
        if piece_bytes >= _OFFSETS or pieces * piece_bytes + self._side.nbytes > ADDRESSES:
            raise RegionError(
                f"an arena of {pieces} x {piece_bytes / 2**20:.1f} MiB is beyond the {ADDRESSES >> 30} GiB that the "
                f"NPU addresses, or the {_OFFSETS >> 30} GiB of one dma-buf: keep less staged, or export smaller "
                "buckets",
                asked=nbytes,
                piece_bytes=piece_bytes,
            )
        self._arena = HeapRegion(pieces * piece_bytes, pieces, self._heaps)
        return self._arena

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Note what was written; `submit` syncs it."""
        piece_bytes = self._region().piece_bytes
        self._unsynced.update(range(offset // piece_bytes, -(-(offset + nbytes) // piece_bytes)))

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the core's thread has brought the result when the run has ended."""

    def submit(self, job: AttentionJob, core: int) -> BoardRun:
        """Sync what was written, and give the job to a core.

        Raises:
            DeviceError: the kernel refuses to sync; the job was not started.
            StagingError: as `BoardDevice.submit`.
        """
        region = self._region()
        while self._unsynced:
            region.sync_to_device(self._unsynced.pop() * region.piece_bytes, 1)
        return super().submit(job, core)

    def close(self) -> None:
        """End the threads and give back what the NPU holds, in so far as no run uses it. Safe to call twice."""
        super().close()
        with contextlib.suppress(RegionError):  # a run that hangs, or an error, holds views: it goes with them
            self._side.close()

    def _open(self, graph: Path, core: int) -> RknnrtContext:
        return RknnrtContext(self._library, graph, core)

    def _run(self, context: RknnrtContext, job: AttentionJob, core: int) -> None:
        side, layout = self._side, job.buffer.layout
        start = core * side.piece_bytes
        operands = {
            name: side.buffer[start + offset : start + offset + nbytes]
            for name, offset, nbytes in (
                ("query", 0, job.query.nbytes),
                ("mask", layout.mask_offset - layout.query_offset, job.mask.nbytes),
                ("out", layout.out_offset - layout.query_offset, job.out.nbytes),
            )
        }
        _tiles(operands["query"], job.query.shape)[...] = job.query.view(_TILE)
        if layout.mask_rows:
            _tiles(operands["mask"], job.mask.shape)[...] = job.mask.view(_TILE)
        side.sync_to_device(start, side.piece_bytes)
        arena = self._region()
        places = [_place(side, operands["query"]), _place(arena, job.keys), _place(arena, job.values)]
        if layout.mask_rows:
            places.append(_place(side, operands["mask"]))
        context.run(layout, [*places, _place(side, operands["out"])])
        side.sync_from_device(start, side.piece_bytes)
        job.out.view(_TILE)[...] = _tiles(operands["out"], job.out.shape)

    def _region(self) -> HeapRegion:
        if self._arena is None:
            raise UsageError("this device has no arena: its memory must come from `take`")
        return self._arena


def _layouts(graphs: BoardGraphs) -> list[StagingLayout]:
    """Of every launch that was exported, in tiles."""
    layouts = [
        replace(graphs.manifest.graph(file.tile).layout(launch.batch, launch.tokens), tiled=True)
        for file in graphs.manifest.files
        for launch in file.launches
    ]
    for layout in layouts:
        if layout.tokens % TILE_CHANNELS:
            raise DeviceError(
                f"a bucket of {layout.tokens} tokens does not fill tiles of {TILE_CHANNELS}, in which a mask lies: "
                "export other buckets, or use the rknnlite runtime",
                tokens=layout.tokens,
            )
    return layouts


def _side_bytes(layout: StagingLayout) -> int:
    """Of a launch's query, mask and result, which follow each other in a layout."""
    return layout.nbytes - layout.query_offset


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _tiles(memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.complex128]:
    """Memory that holds an operand of `[n, rows, channels]` as `[n, channels / 8, rows]` tiles, seen by rows."""
    batch, rows, channels = shape
    tiles: NDArray[np.complex128] = memory.view(_TILE).reshape(batch, channels // TILE_CHANNELS, rows)
    return tiles.swapaxes(1, 2)


def _place(region: HeapRegion, operand: NDArray[np.uint8] | NDArray[np.float16]) -> Operand:
    """Where an operand lies for the driver."""
    address: int = operand.__array_interface__["data"][0]
    descriptor, offset = region.dma_buf_at(address - region.buffer.__array_interface__["data"][0])
    return Operand(descriptor, address - offset, offset, operand.nbytes)

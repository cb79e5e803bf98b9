"""The vendor's Python runtime as an attention device: a board's three cores, each with contexts of its own."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import threading
from concurrent import futures
from pathlib import Path

import numpy as np

from hostcache.errors import DeviceError, UsageError
from staging import BufferState

from .attention_export import launch_sizes
from .attention_manifest import AttentionManifest
from .contract import check_operands
from .core_worker import CoreWorker
from .device import AttentionJob
from .device_lock import DeviceLock
from .rknn_manifest import read_manifest
from .rknnlite import LiteContext

__all__ = ["CORES", "NPU", "RknnLiteDevice", "RknnLiteRun"]

CORES = 3
"""Of an RK3588's NPU; an RK3583's has two."""

NPU = "fdab0000.npu"
"""The RK3588's NPU in its device tree: what a process holds while it uses it."""

JOB_SECONDS = 10.0
"""The vendor's driver gives a job up after 6 s (0.9.8) and says so; this is for a driver that does not."""

_log = logging.getLogger(__name__)


class RknnLiteDevice:
    """Runs jobs on the cores of a board, each in a thread of its own: `rknn_run` releases the interpreter.

    The wheel copies what it is given and what it gives back, so that the arena is the host's alone and needs no sync.

    A run leaves cycles of references behind (18 objects in the wheel's version 2.5.0; up to 2.3.2 the operands, too).
    They are collected whenever no run is left in flight: then all of them are young, and that costs some microseconds.

    Args:
        folder: what `rockpage export attention` wrote.
        kv_heads: of the model; likewise the others.
        heads: query heads.
        head_dim: elements per head.
        cores: NPU cores to use.
        seconds: a run that takes longer is given up.

    Attributes:
        name: `"rknnlite"`.
        numerics: the name, librknnrt's version and a digest of the graphs.
        cores: as given.
        tiled: never: the wheel lays out K and V itself.
        reads_in_place: never: for that it copies them.
        buckets: tokens that the graphs were exported for.
        batches: sequences of a decode launch that the graphs were exported for.
        driver: version of the kernel's driver.

    Raises:
        UsageError: the folder has no graphs of attention, they are not for this model, or no cores.
        BadModelFile: the folder is damaged, or of another version of rockpage.
        MissingExtra: rknn-toolkit-lite2 is not installed.
        DeviceError: a call of the vendor's failed, its library is of another version than the compiler, or another
            process has the NPU.
    """

    name = "rknnlite"
    tiled = False
    reads_in_place = False

    def __init__(
        self,
        folder: Path,
        kv_heads: int,
        heads: int,
        head_dim: int,
        *,
        cores: int = CORES,
        seconds: float = JOB_SECONDS,
    ) -> None:
        if cores < 1:
            raise UsageError(f"a device needs at least one core, got {cores}", cores=cores)
        manifest = read_manifest(AttentionManifest, folder)
        _check_geometry(folder, manifest, kv_heads, heads, head_dim)
        self.buckets, self.batches = _sizes(folder, manifest)
        self.cores = cores
        self._seconds = seconds
        self._process = os.getpid()
        self._running = 0  # jobs that were handed over and have not ended
        self._running_lock = threading.Lock()
        self._contexts: list[dict[tuple[int, bool], LiteContext]] = []  # by core; by rows, and whether there is a mask
        self._workers: list[CoreWorker] = []
        self._lock = DeviceLock(NPU)
        try:
            for core in range(cores):
                self._contexts.append({})
                for file in manifest.files:
                    context = LiteContext(folder / file.rknn.file, core)
                    self._contexts[core][file.rows, manifest.graph(file.tile).masked] = context
                    _check_version(manifest, context)
                self._workers.append(CoreWorker(f"rockpage-npu-{core}"))  # as nice as this thread is by now
        except BaseException:
            self.close()
            raise
        self.driver = context.driver
        digest = hashlib.sha256("".join(file.rknn.sha256 for file in manifest.files).encode()).hexdigest()
        self.numerics = f"{self.name}-{context.version}-{digest[:12]}"

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the wheel is handed the buffer's own bytes, and copies them."""

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the result is in the buffer when the run has ended."""

    def submit(self, job: AttentionJob, core: int) -> RknnLiteRun:
        """Give a job to a core; its buffer is in flight until the run has ended.

        Raises:
            WrongState: the buffer is not READY.
            StagingError: the operands break the contract, see `npu.contract.check_operands`: the wheel checks nothing.
        """
        job.buffer.require(BufferState.READY)
        check_operands(job)
        layout = job.buffer.layout
        context = self._contexts[core][layout.rows, bool(layout.mask_rows)]
        job.buffer.launch()
        with self._running_lock:
            self._running += 1
        future = self._workers[core].submit(lambda: _run(context, job))
        future.add_done_callback(self._ended)
        return RknnLiteRun(future, core, self._seconds)

    def close(self) -> None:
        """End the threads and give back what the NPU holds. Safe to call twice.

        What belongs to a core whose run never ended is left to the end of the process, since the vendor's library is
        still using it.
        """
        contexts, self._contexts = self._contexts, []
        workers, self._workers = self._workers, []
        if os.getpid() == self._process:  # a forked child has neither the threads nor the NPU
            for worker in workers:
                worker.stop()
            for core, of_core in enumerate(contexts):
                if core < len(workers) and not workers[core].stopped(self._seconds):
                    _log.error("NPU core %d still works on a job: its memory stays until this process ends", core)
                    continue
                for context in of_core.values():
                    context.release()
        self._lock.release()

    def _ended(self, _: futures.Future[None]) -> None:
        with self._running_lock:
            self._running -= 1
            alone = not self._running
        if alone:
            gc.collect(0)


class RknnLiteRun:
    """A submitted job. Made by `RknnLiteDevice.submit`."""

    def __init__(self, future: futures.Future[None], core: int, seconds: float) -> None:
        self._future = future
        self._core = core
        self._seconds = seconds

    @property
    def ended(self) -> bool:
        """Whether the core is done with the job's buffer."""
        return self._future.done()

    def wait(self) -> None:
        """Return when the job has ended.

        Raises:
            DeviceError: the run failed, or did not end in time.
        """
        try:
            self._future.result(self._seconds)
        except futures.TimeoutError:
            began = not self._future.cancel()
            state = "has not ended" if began else "has not begun, since the one before it has not ended"
            raise DeviceError(
                f"a job on core {self._core} {state} in {self._seconds:g} s: the NPU or its driver hangs, see the "
                "kernel's log",
                core=self._core,
                seconds=self._seconds,
            ) from None


def _run(context: LiteContext, job: AttentionJob) -> None:
    """In the core's thread."""
    inputs = [operand[:, np.newaxis] for operand in (job.query, job.keys, job.values)]
    if job.mask.size:
        inputs.append(job.mask[:, np.newaxis])  # its channels are the tokens
    heads, rows, head_dim = job.out.shape
    result = context.run(inputs, (heads, head_dim, 1, rows))
    with np.errstate(over="ignore", invalid="ignore"):  # whatever it is, the canary judges
        job.out[...] = result[:, :, 0].swapaxes(1, 2)


def _check_geometry(folder: Path, manifest: AttentionManifest, kv_heads: int, heads: int, head_dim: int) -> None:
    exported = (manifest.kv_heads, manifest.kv_heads * manifest.group, manifest.head_dim)
    if exported != (kv_heads, heads, head_dim):
        raise UsageError(
            f"the graphs in {folder} are for {exported[0]} KV heads and {exported[1]} heads of {exported[2]}, the "
            f"model has {kv_heads} and {heads} of {head_dim}: rockpage export attention MODEL --out another folder",
            exported=exported,
            model=(kv_heads, heads, head_dim),
        )


def _sizes(folder: Path, manifest: AttentionManifest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Buckets and batches of exported graphs."""
    launches = {
        manifest.graph(file.tile): {(launch.batch, launch.tokens) for launch in file.launches}
        for file in manifest.files
    }
    every = set().union(*launches.values())
    buckets, batches = (tuple(sorted({size[axis] for size in every})) for axis in (1, 0))
    for graph, sizes in launch_sizes(tuple(launches), buckets, batches).items():
        if missing := set(sizes) - launches[graph]:
            raise UsageError(
                f"the graph {graph.kind} in {folder} lacks launches of sequences x tokens {sorted(missing)}: "
                "export it again with this version of rockpage",
                missing=sorted(missing),
            )
    return buckets, batches


def _check_version(manifest: AttentionManifest, context: LiteContext) -> None:
    if context.version != manifest.toolkit:
        raise DeviceError(
            f"librknnrt.so is {context.version}, the graphs were compiled by rknn-toolkit2 {manifest.toolkit}: put "
            f"librknnrt.so {manifest.toolkit} into /usr/lib, or export them by rknn-toolkit2 {context.version}",
            runtime=context.version,
            toolkit=manifest.toolkit,
        )

"""What the ways to a board's NPU have in common: contexts and a thread for each core, jobs, and how those end."""

from __future__ import annotations

import logging
import os
import threading
from concurrent import futures
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hostcache.errors import DeviceError, UsageError
from staging import BufferState

from .board_graphs import BoardGraphs
from .contract import check_operands
from .core_worker import CoreWorker
from .device import AttentionJob
from .device_lock import DeviceLock

__all__ = ["CORES", "JOB_SECONDS", "NPU", "BoardContext", "BoardDevice", "BoardRun", "require_cores"]

CORES = 3
"""Of an RK3588's NPU; an RK3583's has two."""

NPU = "fdab0000.npu"
"""The RK3588's NPU in its device tree: what a process holds while it uses it."""

JOB_SECONDS = 10.0
"""The vendor's driver gives a job up after 6 s (0.9.8) and says so; this is for a driver that does not."""

_log = logging.getLogger(__name__)


class BoardContext(Protocol):
    """A graph, loaded for one core.

    Attributes:
        version: of librknnrt.so.
        driver: version of the kernel's driver.
    """

    version: str
    driver: str

    def release(self) -> None:
        """Give back what the NPU holds. Safe to call twice."""


_Context = TypeVar("_Context", bound=BoardContext)


class BoardDevice(Generic[_Context]):
    """Runs jobs on the cores of a board, each in a thread of its own: `rknn_run` releases the interpreter.

    A subclass says how a graph is opened, and how a job is run by it.

    Args:
        graphs: one context of each for each core.
        cores: NPU cores to use.
        seconds: a run that takes longer is given up.

    Attributes:
        numerics: the name, librknnrt's version and a digest of the graphs.
        cores: as given.
        buckets: tokens that the graphs were exported for.
        batches: sequences of a decode launch that the graphs were exported for.
        driver: version of the kernel's driver.

    Raises:
        UsageError: no cores.
        DeviceError: a call of the vendor's failed, its library is of another version than the compiler, or another
            process has the NPU.
    """

    name: str

    def __init__(self, graphs: BoardGraphs, cores: int, seconds: float) -> None:
        require_cores(cores)
        self.buckets, self.batches = graphs.buckets, graphs.batches
        self.cores = cores
        self._seconds = seconds
        self._process = os.getpid()
        self._running = 0  # jobs that were handed over and have not ended
        self._running_lock = threading.Lock()
        self._contexts: list[dict[tuple[int, bool], _Context]] = []  # by core; by rows, and whether there is a mask
        self._workers: list[CoreWorker] = []
        self._lock = DeviceLock(NPU)
        try:
            for core in range(cores):
                self._contexts.append({})
                for file in graphs.manifest.files:
                    context = self._open(graphs.path(file), core)
                    self._contexts[core][file.rows, graphs.manifest.graph(file.tile).masked] = context
                    graphs.check_version(context.version)
                self._workers.append(CoreWorker(f"rockpage-npu-{core}"))  # as nice as this thread is by now
        except BaseException:
            self.close()
            raise
        self.driver = context.driver
        self.numerics = f"{self.name}-{context.version}-{graphs.digest}"

    def submit(self, job: AttentionJob, core: int) -> BoardRun:
        """Give a job to a core; its buffer is in flight until the run has ended.

        Raises:
            WrongState: the buffer is not READY.
            StagingError: the operands break the contract, see `npu.contract.check_operands`: the vendor checks nothing.
        """
        job.buffer.require(BufferState.READY)
        check_operands(job)
        layout = job.buffer.layout
        context = self._contexts[core][layout.rows, bool(layout.mask_rows)]
        job.buffer.launch()
        with self._running_lock:
            self._running += 1
        future = self._workers[core].submit(lambda: self._run(context, job, core))
        future.add_done_callback(self._ended)
        return BoardRun(future, core, self._seconds)

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

    def _open(self, graph: Path, core: int) -> _Context:
        """Load a graph for a core."""
        raise NotImplementedError

    def _run(self, context: _Context, job: AttentionJob, core: int) -> None:
        """Run a job and bring its result into its buffer; in the core's thread."""
        raise NotImplementedError

    def _idle(self) -> None:
        """Called, in whatever thread, when no run is left in flight."""

    def _ended(self, _: futures.Future[None]) -> None:
        with self._running_lock:
            self._running -= 1
            alone = not self._running
        if alone:
            self._idle()


def require_cores(cores: int) -> None:
    """Do nothing if there are any.

    Raises:
        UsageError: there are none.
    """
    if cores < 1:
        raise UsageError(f"a device needs at least one core, got {cores}", cores=cores)


class BoardRun:
    """A submitted job. Made by `BoardDevice.submit`."""

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

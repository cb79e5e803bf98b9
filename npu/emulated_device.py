"""An NPU that is not there: memory of its own, a contract it enforces, faults on demand."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError, NotSynced, UsageError
from staging import BufferState

from .contract import check_content, check_operands
from .device import AttentionJob
from .fp16 import Rounding, attention, check_rounding

__all__ = ["EmulatedDevice", "EmulatedRun", "Faults"]


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and when. Runs are numbered from 0 in the order of their submission.

    Attributes:
        failing: runs that end with an error.
        stale: runs that report success and write nothing.
        torn: runs that report success and write the first head's rows only, as when a core drops out.
        hanging: runs that do not end while somebody waits.
        dead_cores: cores whose every run ends with an error.
        latency: seconds every run takes beyond its arithmetic.
    """

    failing: Collection[int] = ()
    stale: Collection[int] = ()
    torn: Collection[int] = ()
    hanging: Collection[int] = ()
    dead_cores: Collection[int] = ()
    latency: float = 0.0


class EmulatedDevice:
    """Runs attention jobs over a memory, and sees that memory only as of the last sync.

    The device keeps a shadow of the memory. `sync_to_device` copies into it, jobs read and write nothing else, and
    `sync_from_device` copies back. Bytes that the host changed without a sync are found by comparing the two.

    A core runs one job at a time, in order. Its arithmetic is done when somebody waits for it, so results do not depend
    on timing; only injected latency overlaps.

    Args:
        memory: uint8; the arena. The caller owns it; the device lets go of it at `close()`.
        rounding: where the arithmetic rounds to fp16.
        cores: NPU cores; the RK3588 has three.
        faults: what to inject.
        tiled: K and V come in the NPU's own order.

    Attributes:
        name: `"emulated"`.
        numerics: the name and the rounding.
        cores: as given.
        tiled: as given.
        reads_in_place: always.
        faults: as given.

    Raises:
        UsageError: no cores, or an unknown rounding.
    """

    name = "emulated"
    reads_in_place = True

    def __init__(
        self,
        memory: NDArray[np.uint8],
        rounding: Rounding = "output",
        cores: int = 3,
        faults: Faults | None = None,
        *,
        tiled: bool = False,
    ) -> None:
        if cores < 1:
            raise UsageError(f"a device needs at least one core, got {cores}", cores=cores)
        check_rounding(rounding)
        self.numerics = f"{self.name}-{rounding}"
        self.cores = cores
        self.tiled = tiled
        self._memory = memory
        # 0xffff is NaN in fp16: whatever was never synced poisons a result instead of passing for zeros.
        self._shadow = np.full(len(memory), 0xFF, np.uint8)
        self._rounding = rounding
        self.faults = faults or Faults()
        self._runs = 0
        self._core_free_at = [0.0] * cores

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Let the device see `nbytes` at `offset` as the host left them."""
        self._shadow[offset : offset + nbytes] = self._memory[offset : offset + nbytes]

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Let the host see `nbytes` at `offset` as the device left them."""
        self._memory[offset : offset + nbytes] = self._shadow[offset : offset + nbytes]

    def submit(self, job: AttentionJob, core: int) -> EmulatedRun:
        """Check a job and give it to a core; its buffer is in flight from now on.

        Raises:
            WrongState: the buffer is not READY.
            NotSynced: the host wrote to an operand after the last sync.
            StagingError: another breach of the contract; `check_operands` and `check_content` list them.
            In every case the job was not started and its buffer keeps its state.
        """
        job.buffer.require(BufferState.READY)
        check_operands(job)
        for name, operand in job.operands():
            self._check_synced(name, operand)
        check_content(job.buffer.layout, *(self._seen(o) for o in (job.query, job.keys, job.values, job.mask)))

        job.buffer.launch()
        due = max(self._core_free_at[core], time.monotonic()) + self.faults.latency
        self._core_free_at[core] = due
        number = self._runs
        self._runs += 1
        return EmulatedRun(self, job, number, core, due)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = self._shadow = np.empty(0, np.uint8)

    def _execute(self, job: AttentionJob, number: int, core: int) -> None:
        job.buffer.require(BufferState.IN_FLIGHT)
        if number in self.faults.failing or core in self.faults.dead_cores:
            raise DeviceError(f"run {number} returned -1: an injected fault", run=number, returned=-1)
        if number in self.faults.stale:
            return
        layout = job.buffer.layout
        keys, values = (
            np.ascontiguousarray(layout.by_token(self._seen(operand))).reshape(layout.heads, layout.tokens, -1)
            for operand in (job.keys, job.values)
        )
        mask = self._seen(job.mask) if layout.mask_rows else None
        result = attention(self._seen(job.query), keys, values, mask, self._rounding)
        written = slice(0, 1) if number in self.faults.torn else slice(None)
        self._seen(job.out)[written] = result[written]

    def _seen(self, operand: NDArray[np.float16]) -> NDArray[np.float16]:
        """The device's view of an operand inside the arena."""
        start = operand.__array_interface__["data"][0] - self._memory.__array_interface__["data"][0]
        return self._shadow[start : start + operand.nbytes].view(np.float16).reshape(operand.shape)

    def _check_synced(self, name: str, operand: NDArray[np.float16]) -> None:
        # As bytes: NaN differs from itself.
        if not np.array_equal(operand.view(np.uint16), self._seen(operand).view(np.uint16)):
            raise NotSynced(
                f"the host wrote to {name} after the last sync: call sync_to_device when all operands are in place",
                name=name,
            )


class EmulatedRun:
    """A submitted job. Made by `EmulatedDevice.submit`.

    Attributes:
        number: of the run, counted from 0 in the order of submission.
        ended: whether the device is done with the buffer; a run that hangs never is.
    """

    def __init__(self, device: EmulatedDevice, job: AttentionJob, number: int, core: int, due: float) -> None:
        self.number = number
        self.ended = False
        self._device = device
        self._job: AttentionJob | None = job
        self._core = core
        self._due = due  # on the monotonic clock
        self._hangs = number in device.faults.hanging

    def wait(self) -> None:
        """Return when the job has ended; the result is in device memory. Wait once.

        Raises:
            DeviceError: the run failed, or hangs.
            WrongState: the buffer was released while the job was in flight.
        """
        remaining = self._due - time.monotonic()
        if remaining > 0:  # sleep(0) would give the processor away
            time.sleep(remaining)
        if self._hangs:
            raise DeviceError(f"run {self.number} did not end: an injected fault", run=self.number)
        self.ended = True
        job, self._job = self._job, None  # its operands are views of the arena
        if job is not None:
            self._device._execute(job, self.number, self._core)

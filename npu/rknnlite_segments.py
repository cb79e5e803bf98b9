"""Dense segments on one core of a board's NPU, by the vendor's Python runtime."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError, UsageError

from .board_device import JOB_SECONDS, NPU
from .checks import check_process
from .core_worker import CoreWorker
from .decoder import Floats
from .dense_manifest import DenseManifest, SegmentFile
from .dense_probe import PROBE_ROWS, QUESTIONS, Probe
from .device_lock import DeviceLock
from .rknn_errors import require_version
from .rknn_manifest import graphs_digest
from .rknnlite import LiteContext

__all__ = ["RknnLiteSegments"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Segment:
    """A segment that is loaded."""

    file: SegmentFile
    context: LiteContext
    probe: Probe


class RknnLiteSegments:
    """A `npu.dense_decoder.SegmentRunner` on a board.

    All segments are on one core. One reads what the one before it wrote, so that more cores would make no step faster;
    but the wheel cannot share weights between cores, and all cores live in one domain of addresses. Attention, which
    runs between two segments and never beside one, has all cores.

    A launch that fails, or whose result is not proven fresh, is done once more. If that fails too, it is an error: the
    weights are in the NPU's memory and nowhere else, and what another arithmetic made of a step would stand in the
    cache beside the NPU's. The engine then takes the step back, and no request is lost.

    Args:
        folder: what `rockpage export dense` wrote.
        manifest: of the folder, checked.
        core: NPU core to use.
        seconds: a run that takes longer is given up.

    Attributes:
        row_counts: the manifest's, less the row that proves a launch.
        numerics: what can change a bit of a result: librknnrt's version, the precision, and a digest of the graphs.

    Raises:
        UsageError: the segments take one row only.
        MissingExtra: rknn-toolkit-lite2 is not installed.
        DeviceError: a call of the vendor's failed, its library is of another version than the compiler, another process
            has the NPU, or a segment does not compute.
    """

    def __init__(self, folder: Path, manifest: DenseManifest, *, core: int = 0, seconds: float = JOB_SECONDS) -> None:
        self.row_counts = tuple(rows - PROBE_ROWS for rows in manifest.rows if rows > PROBE_ROWS)
        if not self.row_counts:
            raise UsageError(
                f"the segments in {folder} take {manifest.rows[0]} row, and one row of a launch is for its proof: "
                "rockpage export dense --rows 4,16,64",
                rows=manifest.rows,
            )
        self._seconds = seconds
        self._process = os.getpid()
        self._segments: list[_Segment] = []
        self._running: futures.Future[None] | None = None
        self._lock = DeviceLock(NPU, shared=True)
        self._worker = CoreWorker(f"rockpage-dense-{core}")
        try:
            # The last one is the largest by far: loaded first, what its file takes meanwhile does not come on top.
            for file in reversed(manifest.segments):
                context = LiteContext(folder / file.rknn.file, core)
                segment = _Segment(file, context, Probe([port.channels for port in file.inputs]))
                self._segments.insert(0, segment)
                require_version(context.version, manifest.toolkit, "segments")
                self._prove(segment)
        except BaseException:
            self.close()
            raise
        self.numerics = f"rknnlite-dense-{context.version}-{manifest.precision}-{graphs_digest(manifest)}"

    def run(self, index: int, inputs: Sequence[Floats]) -> list[Floats]:
        """Run one segment; see `npu.dense_decoder.SegmentRunner`.

        Raises:
            DeviceError: it failed twice.
            UsageError: this process is a fork of the one that opened the NPU.
        """
        check_process(self._process)
        segment = self._segments[index]
        try:
            return self._attempt(segment, inputs)
        except DeviceError as error:
            _log.warning("dense segment %s is run again: %s", segment.file.name, error)
        try:
            return self._attempt(segment, inputs)
        except DeviceError as error:
            raise DeviceError(
                f"dense segment {segment.file.name} failed twice, and its weights are on the NPU alone: {error}; take "
                "the step again, or load the model without its dense segments",
                segment=segment.file.name,
            ) from error

    def close(self) -> None:
        """End the thread and give back what the NPU holds. Safe to call twice.

        What a run that never ended uses is left to the end of the process.
        """
        segments, self._segments = self._segments, []
        if os.getpid() == self._process:  # a forked child has neither the thread nor the NPU
            self._worker.stop()
            if self._worker.stopped(self._seconds):
                for segment in segments:
                    segment.context.release()
            elif segments:
                _log.error("the NPU still works on a dense segment: their memory stays until this process ends")
        self._lock.release()

    def _prove(self, segment: _Segment) -> None:
        """Learn a segment's answers, and hear each of them once more for every number of rows."""

        def ask(number: int, rows: int) -> list[Floats]:
            nothing = [np.zeros((rows, port.channels), np.float32) for port in segment.file.inputs]
            return [output[-1] for output in self._launch(segment, nothing, number)]

        try:
            segment.probe.learn(lambda number: ask(number, self.row_counts[0]))
            for rows in self.row_counts:
                for number in range(QUESTIONS):
                    segment.probe.check(number, rows, ask(number, rows))
        except DeviceError as error:
            raise DeviceError(
                f"dense segment {segment.file.name} does not compute on this NPU: {error}", segment=segment.file.name
            ) from error

    def _attempt(self, segment: _Segment, inputs: Sequence[Floats]) -> list[Floats]:
        rows = len(inputs[0])
        number = segment.probe.next(rows)
        outputs = self._launch(segment, inputs, number)
        segment.probe.check(number, rows, [output[-1] for output in outputs])
        return [output[:-PROBE_ROWS] for output in outputs]

    def _launch(self, segment: _Segment, inputs: Sequence[Floats], number: int) -> list[Floats]:
        """Run rows and a question behind them; float32 `[rows + 1, channels]` of each output."""
        rows = len(inputs[0]) + PROBE_ROWS
        operands = []
        for port, tokens, question in zip(segment.file.inputs, inputs, segment.probe.questions[number], strict=True):
            operand = np.empty((1, 1, rows, port.channels), np.float16)
            with np.errstate(over="ignore"):  # what fp16 cannot hold is infinite, and the sampler refuses its row
                operand[0, 0, :-PROBE_ROWS] = tokens
            operand[0, 0, -PROBE_ROWS:] = question
            operands.append(operand)
        shapes = [(1, port.channels, 1, rows) for port in segment.file.outputs]
        return [out[0, :, 0].T for out in self._in_time(lambda: segment.context.run_all(operands, shapes))]

    def _in_time(self, run: Callable[[], list[NDArray[np.float32]]]) -> list[NDArray[np.float32]]:
        """Run something in the core's thread, once what was given up before has ended.

        Raises:
            DeviceError: it failed, or did not end in time.
        """
        results: list[NDArray[np.float32]] = []
        try:
            if self._running is not None and not futures.wait([self._running], self._seconds).done:
                raise futures.TimeoutError
            self._running = self._worker.submit(lambda: results.extend(run()))
            self._running.result(self._seconds)
        except futures.TimeoutError:
            raise DeviceError(
                f"a run has not ended in {self._seconds:g} s: the NPU or its driver hangs, see the kernel's log",
                seconds=self._seconds,
            ) from None
        finally:
            gc.collect(0)  # a run leaves cycles of references behind, see `npu.rknnlite_device`
        return results

"""The vendor's Python runtime as an attention device: a board's three cores, each with contexts of its own."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from .board_device import CORES, JOB_SECONDS, BoardDevice
from .board_graphs import BoardGraphs
from .device import AttentionJob
from .rknnlite import LiteContext

__all__ = ["RknnLiteDevice"]


class RknnLiteDevice(BoardDevice[LiteContext]):
    """A `BoardDevice` whose wheel copies what it is given and what it gives back: the arena is the host's alone.

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
        tiled: never: the wheel lays out K and V itself.
        reads_in_place: never: for that it copies them.

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
        super().__init__(BoardGraphs(folder, kv_heads, heads, head_dim), cores, seconds)

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the wheel is handed the buffer's own bytes, and copies them."""

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the result is in the buffer when the run has ended."""

    def _open(self, graph: Path, core: int) -> LiteContext:
        return LiteContext(graph, core)

    def _run(self, context: LiteContext, job: AttentionJob, core: int) -> None:  # noqa: ARG002 - others need the core
        inputs = [operand[:, np.newaxis] for operand in (job.query, job.keys, job.values)]
        if job.mask.size:
            inputs.append(job.mask[:, np.newaxis])  # its channels are the tokens
        heads, rows, head_dim = job.out.shape
        result = context.run(inputs, (heads, head_dim, 1, rows))
        with np.errstate(over="ignore", invalid="ignore"):  # whatever it is, the canary judges
            job.out[...] = result[:, :, 0].swapaxes(1, 2)

    def _idle(self) -> None:
        gc.collect(0)

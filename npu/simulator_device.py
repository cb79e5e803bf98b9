"""The vendor's simulator as an attention device: the staged buffers, through the compiler's own graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staging import DEFAULT_BUCKETS, BufferState

from .attention_export import launch_sizes
from .attention_graph import attention_graphs
from .contract import check_operands
from .device import AttentionJob
from .rknn_simulator import Simulator

__all__ = ["SimulatorDevice"]


class SimulatorDevice:
    """Runs jobs one at a time, when somebody waits for them. Slow: for short texts.

    Args:
        kv_heads: of the model; likewise the others.
        heads: query heads.
        head_dim: elements per head.
        buckets: tokens.
        python: the interpreter that has the toolkit, see `npu.rknn_toolkit.find_python`.

    Attributes:
        name: `"simulator"`.
        numerics: the name and the toolkit's version.
        cores: 1.
        tiled: never.
        reads_in_place: never.

    Raises:
        MissingExtra: there is no interpreter with the toolkit, or no `onnx` here.
        DeviceError: the toolkit's process did not start.
    """

    name = "simulator"
    cores = 1
    tiled = False
    reads_in_place = False

    def __init__(
        self,
        kv_heads: int,
        heads: int,
        head_dim: int,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        python: Path | str | None = None,
    ) -> None:
        graphs = attention_graphs(kv_heads, heads, head_dim)
        self._kinds = {graph.rows: graph.kind for graph in graphs if graph.masked}
        self._simulator = Simulator(launch_sizes(graphs, buckets), python)
        self.numerics = f"{self.name}-{self._simulator.version}"

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the simulator is handed the buffer's own bytes."""

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Nothing: the result is in the buffer when the run has ended."""

    def submit(self, job: AttentionJob, core: int) -> SimulatorRun:  # noqa: ARG002 - there is one core
        """Take a job; its buffer is in flight until it has been waited for.

        Raises:
            WrongState: the buffer is not READY.
            StagingError: the operands break the contract, see `npu.contract.check_operands`.
        """
        job.buffer.require(BufferState.READY)
        check_operands(job)
        job.buffer.launch()
        return SimulatorRun(self._simulator, self._kind(job), job)

    def close(self) -> None:
        """End the vendor's process. Safe to call twice."""
        self._simulator.close()

    def _kind(self, job: AttentionJob) -> str:
        layout = job.buffer.layout
        return self._kinds[layout.rows] if layout.mask_rows else "decode"


class SimulatorRun:
    """A submitted job. Made by `SimulatorDevice.submit`.

    Attributes:
        ended: whether it was waited for.
    """

    def __init__(self, simulator: Simulator, kind: str, job: AttentionJob) -> None:
        self.ended = False
        self._simulator = simulator
        self._kind = kind
        self._job: AttentionJob | None = job

    def wait(self) -> None:
        """Run the job. Wait once.

        Raises:
            DeviceError: the simulator failed.
        """
        self.ended = True
        job, self._job = self._job, None  # its operands are views of the arena
        if job is None:
            return
        mask: NDArray[np.float16] | None = job.mask if job.mask.size else None
        with np.errstate(over="ignore"):  # beyond fp16 is infinity, as on a board
            job.out[...] = self._simulator.run(self._kind, job.query, job.keys, job.values, mask).astype(np.float16)

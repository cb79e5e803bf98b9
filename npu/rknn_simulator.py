"""Attention in the vendor's simulator: the graphs that `rockpage export attention` writes, on this machine's CPU.

The simulator runs the compiler's optimised graph and rounds every operator's output to fp16; what an operator does
inside is computed in float32 (rknn-toolkit2 2.5.0). So it says what the fused operator should give, not what a board's
NPU gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

from .attention_export import Sizes, attention_job
from .attention_graph import AttentionGraph
from .rknn_toolkit import RknnToolkit

__all__ = ["Simulator"]


class Simulator:
    """Runs launches of one geometry's graphs, one at a time.

    A graph is built when it is first run; that takes seconds. If the vendor's process ends, the call that was running
    fails, and the next one starts another.

    Args:
        sizes: graphs with their launches, as from `npu.attention_export.launch_sizes`.
        python: the interpreter that has the toolkit, see `npu.rknn_toolkit.find_python`.

    Attributes:
        version: of rknn-toolkit2.

    Raises:
        MissingExtra: there is no interpreter with the toolkit, or no `onnx` here.
        DeviceError: its process did not start.
    """

    def __init__(self, sizes: Mapping[AttentionGraph, Sizes], python: Path | str | None = None) -> None:
        self._graphs = {graph.kind: (graph, attention_job(graph, launches)) for graph, launches in sizes.items()}
        self._python = python
        self._toolkit = RknnToolkit(python)
        self._handles: dict[str, int] = {}
        self._closed = False
        self.version = self._toolkit.version

    def __enter__(self) -> Simulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        kind: str,
        q: NDArray[np.float16],
        k: NDArray[np.float16],
        v: NDArray[np.float16],
        mask: NDArray[np.float16] | None = None,
    ) -> NDArray[np.float32]:
        """Run one launch; batch and bucket are told by the shapes.

        Args:
            kind: `decode`, `prefill16` and so on.
            q: fp16 `[heads, rows, channels]`, scaled.
            k: fp16 `[heads, tokens, channels]`.
            v: fp16 `[heads, tokens, head_dim]`.
            mask: fp16 `[1, rows, tokens]`; None for `decode`, whose K carries it.

        Returns:
            float32 `[heads, rows, head_dim]`, rounded to fp16 by the simulator; the caller's own.

        Raises:
            UsageError: no such graph or launch, or the simulator is closed.
            DeviceError: the simulator failed.
        """
        if self._closed:
            raise UsageError("this simulator is closed: make a new one")
        if kind not in self._graphs:
            raise UsageError(f"there is no graph {kind!r}, only {', '.join(self._graphs)}", kind=kind)
        graph, job = self._graphs[kind]
        inputs = graph.inputs(q, k, v, mask)
        shapes = tuple(array.shape for array in inputs)
        if shapes not in job.shapes:
            raise UsageError(f"{kind} has no launch of inputs with the shapes {shapes}", shapes=shapes)
        if self._toolkit.ended:
            self._toolkit.close()
            self._handles.clear()
            self._toolkit = RknnToolkit(self._python)
        if kind not in self._handles:
            self._handles[kind] = self._toolkit.build(job)
        (out,) = self._toolkit.run(self._handles[kind], [array.astype(np.float32) for array in inputs])
        return np.ascontiguousarray(out[:, :, 0].swapaxes(1, 2))

    def close(self) -> None:
        """End the vendor's process. Safe to call twice."""
        self._closed = True
        self._toolkit.close()

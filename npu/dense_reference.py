"""Dense segments in float32 on this machine's CPU: compiled ones are measured by it, and int8 is calibrated by it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import MissingExtra

from .decoder import Floats
from .dense_decoder import SegmentedDecoder
from .dense_graph import DenseSegments, Smoothing, as_channels, as_rows
from .model import ModelConfig
from .source import ModelSource

__all__ = ["ReferenceRunner", "record"]


class ReferenceRunner:
    """Runs segments by ONNX Runtime, holding the weights of one at a time, and remembers what went in and out.

    Args:
        segments: of the model.
        rows: of every run.

    Attributes:
        row_counts: `rows` alone.
        inputs: of every run of each segment, float32 `[rows, channels]` each.
        outputs: likewise.

    Raises:
        MissingExtra: onnxruntime is not installed.
    """

    def __init__(self, segments: DenseSegments, rows: int) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # see npu.segments
        try:
            import onnxruntime  # type: ignore[import-untyped] # noqa: PLC0415 - comes with an extra, ships no types
        except ModuleNotFoundError as error:
            raise MissingExtra("calibrating needs onnxruntime: pip install 'rockpage[model]'") from error
        self.row_counts = (rows,)
        self.inputs: list[list[list[Floats]]] = [[] for _ in range(len(segments))]
        self.outputs: list[list[list[Floats]]] = [[] for _ in range(len(segments))]
        self._segments = segments
        self._peaks: list[dict[str, Floats]] = [{} for _ in range(len(segments))]
        self._session_of = onnxruntime.InferenceSession
        self._current = -1
        self._session: Any = None  # of the current segment

    def run(self, index: int, inputs: Sequence[Floats]) -> list[Floats]:
        """Run one segment; see `npu.dense_decoder.SegmentRunner`."""
        if index != self._current:
            graph = self._segments.onnx(index, np.float32, probed=True)
            self._session = self._session_of(graph, providers=["CPUExecutionProvider"])
            self._current = index
        feed = dict(zip(self._segments.inputs(index), map(as_channels, inputs), strict=True))
        results = [as_rows(out) for out in self._session.run(None, feed)]
        outputs = results[: len(self._segments.outputs(index))]
        for name, value in zip(self._segments.readers(index), results[len(outputs) :], strict=True):
            peak = np.abs(value).max(axis=0)
            self._peaks[index][name] = np.maximum(peak, self._peaks[index].get(name, peak))
        self.inputs[index].append([x.copy() for x in inputs])
        self.outputs[index].append(outputs)
        return outputs

    def close(self) -> None:
        """Let go of the segment whose weights are held."""
        self._current, self._session = -1, None

    def smoothing(self, index: int) -> Smoothing:
        """What evens out the channels of a segment's values and of the weights that read them, by what was run.

        Each channel is divided by the root of its peak over its weights' peak: half of the spread goes to the weights.
        """
        factors = {}
        for name, readers in self._segments.readers(index).items():
            weight_peak = np.max([np.abs(self._segments.tensor(reader)).max(axis=0) for reader in readers], axis=0)
            ratio = np.sqrt(np.maximum(self._peaks[index][name], _LEAST) / np.maximum(weight_peak, _LEAST))
            factors[name] = (ratio / np.exp(np.log(ratio).mean())).astype(np.float32)  # around 1: fp16 has few digits
        return factors


_LEAST = 1e-5  # a channel that was never seen to be anything


def record(source: ModelSource, config: ModelConfig, tokens: NDArray[np.int32]) -> ReferenceRunner:
    """Run a model over some texts and keep what each segment read and wrote.

    Args:
        source: the open model.
        config: its dimensions.
        tokens: int32 `[texts, rows]`; each text starts at position 0.

    Raises:
        MissingExtra: onnx or onnxruntime is not installed.
        UsageError: a token id is beyond the vocabulary, or a text longer than the model's context.
    """
    texts, rows = tokens.shape
    runner = ReferenceRunner(DenseSegments(source, config), rows)
    decoder = SegmentedDecoder(source, config, runner, max_rows=tokens.size)

    def attend(_: int, q: Floats, k: Floats, v: Floats, out: Floats) -> None:
        for text in range(texts):
            own = np.s_[text * rows : (text + 1) * rows]
            out[own] = _causal_attention(q[own], k[own], v[own])

    positions = np.tile(np.arange(rows, dtype=np.int32), texts)
    decoder.forward(tokens.reshape(-1), positions, np.arange(tokens.size), attend)
    return runner


def _causal_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Attention of `[m, heads, d]` over the same m tokens `[m, kv_heads, d]`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat(group, axis=1).swapaxes(0, 1) for x in (k, v))
    scores = q.swapaxes(0, 1) @ keys.swapaxes(1, 2) * np.float32(q.shape[2] ** -0.5)
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    result: Floats = (weights / weights.sum(axis=2, keepdims=True) @ values).swapaxes(0, 1)
    return result

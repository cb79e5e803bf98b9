"""A decoder whose dense segments run elsewhere: on the NPU, in its simulator, or in a stand-in.

What stays on the host is the embedding, and what q and k need when they come out: the norm of each head in families
that have it, and rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .decoder import Attend, Floats, check_step, embedder
from .dense_graph import DenseSegments
from .model import ModelConfig
from .source import ModelSource

__all__ = ["SegmentRunner", "SegmentedDecoder"]


class SegmentRunner(Protocol):
    """Runs the segments of one model, see `npu.dense_graph`."""

    @property
    def row_counts(self) -> Sequence[int]:
        """Numbers of rows that can be run at once, ascending; fewer are padded."""

    def run(self, index: int, inputs: Sequence[Floats]) -> Sequence[Floats]:
        """Run one segment.

        Args:
            index: which, from 0.
            inputs: float32 `[rows, channels]` each, in the segment's order; rows is one of `row_counts`.

        Returns:
            Its outputs, likewise; valid until the next run.
        """

    def close(self) -> None:
        """Give back what it holds. Safe to call twice."""


class SegmentedDecoder:
    """A `npu.decoder.DenseModel` over a runner of segments. One step at a time.

    Args:
        source: the open model; it must stay open while norms of heads are read, and may be closed afterwards.
        config: its dimensions.
        runner: of its segments; owned from now on.
        fingerprint: of the model.
        numerics: of the runner: whatever can change a bit of K or V.
        max_rows: most tokens of one step.

    Attributes:
        fingerprint: as given.
        numerics: as given.
    """

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        runner: SegmentRunner,
        *,
        fingerprint: str = "",
        numerics: str = "",
        max_rows: int = 256,
    ) -> None:
        self.fingerprint = fingerprint
        self.numerics = numerics
        self._config = config
        self._runner = runner
        self._max_rows = max_rows
        self._embed = embedder(source, config)
        self._frequencies = config.rope.frequencies(config.head_dim)
        self._norms = _head_norms(source, config)

    def forward(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], logit_rows: NDArray[np.int64], attend: Attend
    ) -> Floats:
        """Compute one step, as `npu.decoder.Decoder.forward` does.

        Raises:
            UsageError: shapes do not match, or an id, a position or a row is out of its range.
            DeviceError: the runner failed.
        """
        config = self._config
        check_step(config, self._max_rows, tokens, positions, logit_rows)
        angles = (positions[:, None] * self._frequencies)[:, None]  # [m, 1, d / 2]
        cos, sin = (np.float32(config.rope.attention) * f(angles).astype(np.float32) for f in (np.cos, np.sin))
        residual = self._embed(tokens)
        inputs = [residual]
        for layer in range(config.layers):
            *onward, q, k, v = self._run(layer, inputs)
            residual = onward[0] if onward else residual
            q, k, v = (x.reshape(len(tokens), -1, config.head_dim) for x in (q, k, v))
            q, k = (self._rotate(self._norm(layer, name, x), cos, sin) for name, x in (("q", q), ("k", k)))
            attended = np.empty(q.shape, np.float32)
            attend(layer, q, k, v, attended)
            inputs = [attended.reshape(len(tokens), -1), residual]
        if not len(logit_rows):
            return np.empty((0, config.vocab), np.float32)
        (logits,) = self._run(config.layers, [x[logit_rows] for x in inputs])
        return logits

    def close(self) -> None:
        """Give back what the runner holds. Safe to call twice."""
        self._runner.close()

    def _run(self, index: int, inputs: Sequence[Floats]) -> list[Floats]:
        """A segment over any number of rows: in the largest pieces there are, the last one padded with zeros."""
        rows, counts = len(inputs[0]), self._runner.row_counts
        pieces = []
        for start in range(0, rows, counts[-1]):
            used = min(rows - start, counts[-1])
            count = next(count for count in counts if count >= used)
            padded = [np.zeros((count, x.shape[1]), np.float32) for x in inputs]
            for place, x in zip(padded, inputs, strict=True):
                place[:used] = x[start : start + used]
            pieces.append([out[:used].copy() for out in self._runner.run(index, padded)])
        return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]

    def _norm(self, layer: int, name: str, heads: Floats) -> Floats:
        """RMSNorm of each head by itself, where the family has it; all heads share one weight."""
        weight = self._norms.get((layer, name))
        if weight is None:
            return heads
        mean = np.square(heads).mean(axis=2, keepdims=True)
        normed: Floats = heads / np.sqrt(mean + np.float32(self._config.eps)) * weight
        return normed

    def _rotate(self, heads: Floats, cos: Floats, sin: Floats) -> Floats:
        """Turn each pair of elements of `[m, heads, d]`; pairs are neighbours or halves, as the family has it."""
        half = self._config.head_dim // 2
        interleaved = self._config.family.interleaved
        first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
        turned = np.empty(heads.shape, np.float32)
        turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
        turned[..., second] = heads[..., second] * cos + heads[..., first] * sin
        return turned


def _head_norms(source: ModelSource, config: ModelConfig) -> dict[tuple[int, str], Floats]:
    """Weights of the norms of q's and k's heads, by layer; none in most families."""
    if not config.family.qk_norm:
        return {}
    segments = DenseSegments(source, config)
    names = ((layer, name) for layer in range(config.layers) for name in ("q", "k"))
    return {(layer, name): segments.tensor(f"blk.{layer}.attn_{name}_norm.weight")[0] for layer, name in names}

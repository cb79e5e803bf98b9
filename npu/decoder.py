"""Runs the dense parts of a decoder on the CPU by ONNX Runtime; attention is the caller's."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry

from .cache_room import open_in_use
from .ggml import dequantize
from .graphs import SegmentGraphs
from .machine_identity import machine_identity
from .model import ModelConfig
from .onnx_graph import WEIGHTS_FILE
from .segments import SegmentBinding, SegmentBuffers, Segments
from .source import ModelSource
from .weights import Activations, plan_weights
from .weights_cache import FORM_VERSION, default_cache_dir, model_digest, weights_folder

__all__ = ["Attend", "Decoder", "DenseModel", "Floats", "check_limits", "check_step", "embedder"]

Floats: TypeAlias = NDArray[np.float32]
"""Rows of float32."""

Attend: TypeAlias = Callable[[int, Floats, Floats, Floats, Floats], None]
"""`attend(layer, q, k, v, out)`: store k and v `[m, kv_heads, d]`, attend q `[m, heads, d]` into out `[m, heads, d]`.

All are C-contiguous float32 views of the decoder's buffers, valid only during the call; q and k are rotated.
"""

_MOST_THREADS = 64
"""Every session has threads of its own, and where one cannot be started ONNX Runtime waits for ever (1.32)."""

_BINDINGS_KEPT = 32  # row counts whose bindings are kept; one costs about 1 ms to make and 0.1 MB to keep


class DenseModel(Protocol):
    """What an engine needs of a decoder: everything but attention."""

    fingerprint: str
    numerics: str

    def forward(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], logit_rows: NDArray[np.int64], attend: Attend
    ) -> Floats:
        """Run all layers; see `Decoder.forward`."""

    def close(self) -> None:
        """Give back what a device holds. Safe to call twice."""


class Decoder:
    """A loaded model. One step at a time: `forward` is not for two threads at once.

    Attributes:
        config: the model's dimensions.
        fingerprint: SHA-256 of the model file, in hex.
        numerics: names everything here that can change a bit of K or V: libraries, machine, forms of weights, graphs,
            activations, rotation and windows.
        weights_bytes: bytes of the repacked weights.
        max_rows: most tokens of one step.
    """

    def __init__(
        self,
        config: ModelConfig,
        segments: Segments,
        embed: Callable[[NDArray[np.int32]], Floats],
        *,
        fingerprint: str,
        numerics: str,
        weights_bytes: int,
        max_rows: int,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.numerics = numerics
        self.weights_bytes = weights_bytes
        self.max_rows = max_rows
        self._segments = segments
        self._embed = embed
        self._buffers = SegmentBuffers(config, max_rows)
        self._bindings: OrderedDict[int, SegmentBinding] = OrderedDict()
        self._frequencies = config.rope.frequencies(config.head_dim)

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        activations: Activations = "int8",
        threads: int = 1,
        max_rows: int = 256,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> Decoder:
        """Repack a model's weights if the cache does not have them yet, and load them.

        Args:
            source: the open model; it may be closed afterwards.
            activations: `int8` quantises the inputs of products (fast; on x86-64 a token gets the same bits in a step
                of any size); `fp32` keeps them (a step of one token differs from longer ones by 1e-6, relatively, where
                weights are quantised).
            threads: threads of a product; they never spin.
            max_rows: most tokens of one step; buffers are allocated for as many.
            cache_dir: root of the weights cache; None for `$XDG_CACHE_HOME/rockpage`.

        Raises:
            UsageError: an argument is out of its range, or the weights fit nowhere on disk.
            BadModelFile: the model contradicts itself.
            UnsupportedModel: an architecture, variant or tensor type that rockpage does not run.
            MissingExtra: onnx or onnxruntime is not installed.
        """
        check_limits(threads, max_rows)
        config = ModelConfig.from_gguf(source)
        plan = plan_weights(source, config, activations)
        root = default_cache_dir() if cache_dir is None else Path(cache_dir)
        fingerprint = model_digest(source, root)
        graphs = SegmentGraphs(source, config, plan, activations)
        with weights_folder(source, plan, fingerprint, activations, root) as folder:
            segments = Segments(graphs, config.layers, folder, threads)
            # What is mapped would take its room until we end even if it were removed from the cache.
            weakref.finalize(segments, open_in_use(folder / WEIGHTS_FILE).close)
        return cls(
            config,
            segments,
            embedder(source, config),
            fingerprint=fingerprint,
            numerics="/".join(
                (
                    f"onnxruntime-{segments.runtime_version}",
                    f"numpy-{np.__version__}",
                    machine_identity(),
                    f"forms-{FORM_VERSION}",
                    activations,
                    config.positions_identity,
                )
            ),
            weights_bytes=plan.nbytes,
            max_rows=max_rows,
        )

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the model's KV cache."""
        return self.config.geometry

    def forward(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], logit_rows: NDArray[np.int64], attend: Attend
    ) -> Floats:
        """Compute one step: any mix of prefill chunks and decodes, one row per token.

        Args:
            tokens: int32 `[m]`, 1 <= m <= `max_rows`; token ids.
            positions: int32 `[m]`; each token's position in its own sequence.
            logit_rows: int64 `[r]`; rows whose logits are wanted. The last layer's output projection, its MLP and the
                head run for these rows only, and not at all if r is 0.
            attend: called once per layer, in order.

        Returns:
            float32 `[r, vocab]`, the caller's own.

        Raises:
            UsageError: shapes do not match, or an id, a position or a row is out of its range.
        """
        check_step(self.config, self.max_rows, tokens, positions, logit_rows)
        buffers, binding = self._buffers, self._binding(len(tokens))
        m, d = len(tokens), self.config.head_dim
        buffers.residuals[0][:m] = self._embed(tokens)
        self.config.rope.write_angles(positions, self._frequencies, buffers.cos, buffers.sin)
        q, k, v, attended = (b[:m].reshape(m, -1, d) for b in (buffers.q, buffers.k, buffers.v, buffers.attended))
        for layer in range(self.config.layers):
            binding.run(layer)
            attend(layer, q, k, v, attended)
        logits = np.empty((len(logit_rows), self.config.vocab), np.float32)
        if len(logit_rows):
            binding.run_last(logit_rows, logits)
        return logits

    def close(self) -> None:
        """Nothing: what it holds is memory, and goes with it."""

    def _binding(self, rows: int) -> SegmentBinding:
        binding = self._bindings.pop(rows, None) or SegmentBinding(self._segments, self._buffers, rows)
        self._bindings[rows] = binding  # most recently used at the end
        if len(self._bindings) > _BINDINGS_KEPT:
            self._bindings.popitem(last=False)
        return binding


def check_limits(threads: int, max_rows: int) -> None:
    """Refuse what no decoder can be loaded with.

    Raises:
        UsageError: a number is below 1, or there are more than 64 threads.
    """
    for name, value in (("threads", threads), ("max_rows", max_rows)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}", name=name, value=value)
    if threads > _MOST_THREADS:
        raise UsageError(f"threads must be at most {_MOST_THREADS}, got {threads}", threads=threads)


def check_step(
    config: ModelConfig,
    max_rows: int,
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    logit_rows: NDArray[np.int64],
) -> None:
    """Refuse what `DenseModel.forward` cannot compute.

    Raises:
        UsageError: shapes do not match, or an id, a position or a row is out of its range.
    """
    m = len(tokens)
    if not 1 <= m <= max_rows:
        raise UsageError(f"a step has 1 to {max_rows} tokens, got {m}", tokens=m, max_rows=max_rows)
    if positions.shape != (m,):
        raise UsageError(f"{m} tokens need {m} positions, got shape {positions.shape}", shape=positions.shape)
    if len(logit_rows) > m:
        raise UsageError(f"{len(logit_rows)} logit rows are wanted of {m} tokens", wanted=len(logit_rows), rows=m)
    for name, values, limit, what in (
        ("token id", tokens, config.vocab, "vocabulary"),
        ("position", positions, config.context_length, "context length"),
        ("logit row", logit_rows, m, "number of tokens"),
    ):
        if len(values) and not 0 <= (low := int(values.min())) <= (high := int(values.max())) < limit:
            bad = low if low < 0 else high
            raise UsageError(f"{name} {bad} is not within 0 to {limit - 1} (the {what})", name=name, value=bad)


def embedder(source: ModelSource, config: ModelConfig) -> Callable[[NDArray[np.int32]], Floats]:
    """A function from token ids to rows of the embedding, decoded from the mapped model."""
    info = source.tensors["token_embd.weight"]
    table = source.data("token_embd.weight").reshape(config.vocab, -1)
    return lambda tokens: dequantize(info.type, table[tokens])

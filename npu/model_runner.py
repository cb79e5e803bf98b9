"""From a step's plan to logits: dense parts, KV into the cache, attention over it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.codec import FP16, INT4, Codec
from hostcache.step import StepPlan

from .attention import AttentionBatch, AttentionRuntime
from .decoder import DenseModel
from .interrupts import deliver_signals
from .key_balance import KeyBalance

__all__ = ["CODEC_VERSION", "ModelRunner"]

CODEC_VERSION = 2
"""Of int8 and int4: raise it whenever a row's bytes come to mean something else, were it by a rounding."""


class ModelRunner:
    """Runs one model over one cache.

    Args:
        decoder: the dense parts.
        cache: where K and V go.
        runtime: attention over that cache.
        balance: the form in which sequences in int4 store their keys; None: as they are, at a cost in quality.
    """

    def __init__(
        self,
        decoder: DenseModel,
        cache: PagedKVCache,
        runtime: AttentionRuntime,
        balance: KeyBalance | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._runtime = runtime
        self._balance = balance

    def numerics(self, codec: Codec = FP16) -> str:
        """Names everything that can change a bit of KV in that codec, in hex."""
        form = codec.name
        if codec.scaled:
            form += f"-{CODEC_VERSION}"
        if codec is INT4 and self._balance is not None:
            form += f"-{self._balance.digest}"
        # Attention results feed the next layer's K and V, so the runtime is part of what names KV bytes.
        decoder = self._decoder
        named = f"{decoder.fingerprint}|{decoder.numerics}|attention={self._runtime.numerics}|kv={form}"
        return hashlib.sha256(named.encode()).hexdigest()

    def compute(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run the model over a plan's rows; between two layers, signal handlers may end it.

        Returns:
            float32 `[len(plan.logit_rows), vocabulary]`.
        """
        codecs = plan.row_codecs
        balance = self._balance if codecs is not None and (codecs == INT4.code).any() else None

        def attend(
            layer: int,
            q: NDArray[np.float32],
            keys: NDArray[np.float32],
            values: NDArray[np.float32],
            out: NDArray[np.float32],
        ) -> None:
            deliver_signals()  # here a step can be given up
            if balance is not None and codecs is not None:
                keys, q = balance.keys(layer, codecs, keys), balance.queries(layer, codecs, q)
            feedback = None if balance is None else balance.feedback[layer]
            self._cache.write(layer, plan.slots, keys, values, codecs, feedback=feedback)
            self._runtime.attend(layer, q, out)

        try:
            self._runtime.begin_step(
                AttentionBatch(plan.query_starts, plan.context_lens, plan.tables, plan.windows, plan.sinks, plan.codecs)
            )
            return self._decoder.forward(plan.tokens, plan.positions, plan.logit_rows, attend)
        finally:
            self._runtime.end_step()

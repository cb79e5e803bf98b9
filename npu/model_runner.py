"""From a step's plan to logits: dense parts, KV into the cache, attention over it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.step import StepPlan

from .attention import AttentionBatch, AttentionRuntime
from .decoder import DenseModel
from .interrupts import deliver_signals

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs one model over one cache.

    Args:
        decoder: the dense parts.
        cache: where K and V go.
        runtime: attention over that cache.

    Attributes:
        numerics: names everything that can change a bit of KV, in hex.
    """

    def __init__(self, decoder: DenseModel, cache: PagedKVCache, runtime: AttentionRuntime) -> None:
        self._decoder = decoder
        self._cache = cache
        self._runtime = runtime
        # Attention results feed the next layer's K and V, so the runtime is part of what names KV bytes.
        named = f"{decoder.fingerprint}|{decoder.numerics}|attention={runtime.numerics}|kv=fp16"
        self.numerics = hashlib.sha256(named.encode()).hexdigest()

    def compute(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run the model over a plan's rows; between two layers, signal handlers may end it.

        Returns:
            float32 `[len(plan.logit_rows), vocabulary]`.
        """

        def attend(
            layer: int,
            q: NDArray[np.float32],
            keys: NDArray[np.float32],
            values: NDArray[np.float32],
            out: NDArray[np.float32],
        ) -> None:
            deliver_signals()  # here a step can be given up
            self._cache.write(layer, plan.slots, keys, values)
            self._runtime.attend(layer, q, out)

        try:
            self._runtime.begin_step(
                AttentionBatch(plan.query_starts, plan.context_lens, plan.tables, plan.windows, plan.sinks)
            )
            return self._decoder.forward(plan.tokens, plan.positions, plan.logit_rows, attend)
        finally:
            self._runtime.end_step()

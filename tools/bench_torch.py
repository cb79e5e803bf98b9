"""Torch's attention as a peer: float32, one thread, in its fastest form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hostcache import KVGeometry

__all__ = ["NO_TORCH", "Torch"]

NO_TORCH = "torch is not installed, so there is no peer: pip install 'rockpage[bench]'"

MOST_BYTES = 256 << 20
"""Of K and V that take turns: more than the CPU's caches hold, and no more than a laptop has to spare."""


@dataclass(frozen=True)
class Torch:
    """The module, where it is installed."""

    module: Any

    @classmethod
    def load(cls) -> Torch | None:
        """None: it is not installed."""
        try:
            import torch
        except ImportError:
            return None
        torch.set_num_threads(1)
        return cls(torch)

    def attention(
        self, geometry: KVGeometry, heads: int, sequences: int, context: int, rows: int = 1
    ) -> tuple[Callable[[], object], int]:
        """Attention of each sequence's last rows over its context, causal.

        The rows of all query heads of a KV head stand side by side, so that K and V are read once; more than one row
        needs a mask.

        Returns:
            A call that attends over some layers in turn, and how many.
        """
        torch, group = self.module, heads // geometry.kv_heads
        layer_bytes = sequences * geometry.kv_heads * context * geometry.head_dim * 2 * 4
        layers = max(2, min(geometry.layers, MOST_BYTES // layer_bytes))
        shape = (layers, sequences, geometry.kv_heads, context, geometry.head_dim)
        k, v = torch.randn(shape), torch.randn(shape)
        q = torch.randn(sequences, geometry.kv_heads, group * rows, geometry.head_dim)
        mask = None
        if rows > 1:
            seen = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
            mask = torch.zeros(rows, context).masked_fill(~seen, float("-inf")).repeat(group, 1)
        attend = torch.nn.functional.scaled_dot_product_attention

        def sweep() -> None:
            for layer in range(layers):
                attend(q, k[layer], v[layer], attn_mask=mask)

        return sweep, layers

"""The ledger: what a token, a block and a session cost in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

__all__ = ["BLOCK_TOKENS", "KVGeometry"]

BLOCK_TOKENS = 16
"""Tokens in a block, for every codec. The NPU's fp16 tiles hold 16 tokens, so a block never splits one."""


@dataclass(frozen=True)
class KVGeometry:
    """Shape of one model's KV cache and the byte layout of a block.

    A block is one contiguous chunk `[layer][k|v][kv_head][token][head_dim]`, so that it can be copied,
    spilled or given back with one call, while each (layer, k|v, head) row of a block is one run for the gather.

    Attributes:
        layers: attention layers that own KV.
        kv_heads: KV heads per layer (GQA: query heads are a multiple).
        head_dim: elements per head.
        block_tokens: tokens per block.
        itemsize: bytes per element; 2 for fp16.

    Raises:
        UsageError: a field is not a positive integer.

    Example:
        >>> from hostcache import KVGeometry
        >>> geometry = KVGeometry(layers=24, kv_heads=2, head_dim=128)
        >>> geometry.bytes_per_token  # 24 layers * (K and V) * 2 heads * 128 * 2 bytes
        24576
        >>> geometry.block_bytes  # of 16 tokens
        393216
        >>> geometry.blocks_for(33)
        3
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS
    itemsize: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "itemsize"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a positive integer, got {value!r}", name=name, value=value)

    @property
    def row_bytes(self) -> int:
        """Bytes of one (layer, k|v, head) row of a block: the unit the gather copies."""
        return self.block_tokens * self.head_dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of all heads' K (or V) of one layer of a block: the step from K to V."""
        return self.kv_heads * self.row_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer of a block: the step from a layer to the next."""
        return 2 * self.kv_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers: the step from a block to the next."""
        return self.layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """`layers * 2 * kv_heads * head_dim * itemsize`."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

"""Where the bytes of a block lie, for each codec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .codec import SCALE_BYTES, Codec
from .errors import UsageError
from .geometry import KVGeometry

__all__ = ["BlockLayout"]

ROW_ALIGNMENT = 16
"""Bytes; rows of a scaled codec are padded to it, so that a vector load of codes never straddles two rows."""

MOST_HEAD_DIM = 1024
"""Elements of a head that is quantised, at most: `RP_MOST_HEAD_DIM` of `_codec.h`, whose buffers hold as many."""


@dataclass(frozen=True)
class BlockLayout:
    """The byte layout of one block: one contiguous chunk `[layer][k|v][kv_head]` of rows.

    A row holds one head's K or V of `block_tokens` tokens: first the codes, `[token][head_dim]`, then the scales, fp16
    `[token][groups]`, then padding to a multiple of 16 bytes. In int4 a group of n elements is n / 2 bytes: byte i has
    element i in its low four bits and element i + n / 2 in its high ones. fp16 has neither scales nor padding, and the
    layout is `KVGeometry`'s.

    Attributes:
        geometry: shape of the model's KV.
        codec: how an element is stored.

    Raises:
        UsageError: `head_dim` is odd and the codec puts two elements into a byte, it is beyond 1024 and not fp16, or
            codes of an odd size would leave scales at odd addresses.

    Example:
        >>> from hostcache import KVGeometry
        >>> from hostcache.block_layout import BlockLayout
        >>> from hostcache.codec import INT4
        >>> layout = BlockLayout(KVGeometry(layers=24, kv_heads=2, head_dim=128), INT4)
        >>> layout.scale_bytes  # 16 tokens * 4 groups * 2 bytes
        128
        >>> layout.row_bytes  # 16 tokens * 128 / 2 bytes of codes, and the scales
        1152
    """

    geometry: KVGeometry
    codec: Codec

    def __post_init__(self) -> None:
        head_dim, bits = self.geometry.head_dim, self.codec.bits
        if self.codec.scaled and head_dim > MOST_HEAD_DIM:
            raise UsageError(
                f"{self.codec.name} quantises heads of up to {MOST_HEAD_DIM} elements, not {head_dim}: use fp16",
                head_dim=head_dim,
            )
        if head_dim * bits % 8:
            raise UsageError(
                f"{self.codec.name} puts two elements into a byte, and a head has {head_dim}: use int8 or fp16",
                head_dim=head_dim,
            )
        if self.codec.scaled and self.payload_bytes % SCALE_BYTES:
            raise UsageError(
                f"{self.geometry.block_tokens} tokens of {self.token_bytes} bytes in {self.codec.name} leave the "
                "scales behind them at an odd address: give a block an even number of tokens",
                block_tokens=self.geometry.block_tokens,
                token_bytes=self.token_bytes,
            )

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.codec.group(self.geometry.head_dim)

    @property
    def groups(self) -> int:
        """Scales of one token's row of one head; 0 for fp16."""
        return self.geometry.head_dim // self.group if self.codec.scaled else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's codes in one row."""
        return self.geometry.head_dim * self.codec.bits // 8

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row's codes: the step from a row's start to its scales."""
        return self.geometry.block_tokens * self.token_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales; 0 for fp16."""
        return self.geometry.block_tokens * self.groups * SCALE_BYTES

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one (layer, k|v, head) row of 16 tokens, scales and padding included."""
        used = self.payload_bytes + self.scale_bytes
        return -(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT if self.codec.scaled else used

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of all heads' K (or V) of one layer: the step from K to V."""
        return self.geometry.kv_heads * self.row_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer: the step from a layer to the next."""
        return 2 * self.kv_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return self.geometry.layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> float:
        """What a token costs in a full block, scales and padding included."""
        return self.block_bytes / self.geometry.block_tokens

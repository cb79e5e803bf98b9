"""Where each operand of an attention launch lies in a staging buffer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

__all__ = ["ALIGNMENT", "MARK_CHANNELS", "MASKED", "TILE_CHANNELS", "TOKEN_MULTIPLE", "Place", "StagingLayout"]

ALIGNMENT = 64
"""Bytes. One cache line, of the RK3588's cores too: a sync of one operand never touches its neighbour's bytes."""

TOKEN_MULTIPLE = 4
"""Tokens. Lengths the vendor compiler takes without inserting a convolution to pad them (rknn-toolkit2 2.5.0)."""

TILE_CHANNELS = 8
"""Channels of fp16 that the RK3588's NPU keeps together: its native order is `[channels / 8, tokens, 8]`."""

MARK_CHANNELS = TILE_CHANNELS
"""Channels behind the head's own that carry a token's mask: a whole tile, of which the first says it all."""

MASKED = np.float16(-1e4)
"""Added to the score of a token that a row must not see. Exact in fp16, and finite: -inf turns a row into NaN."""

FP16_BYTES = 2

_Element = TypeVar("_Element", bound=np.generic)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    """How the tokens of K or of V lie in memory: the fields of `rp_place`, which `_gather.h` explains."""

    head_stride: int
    token_stride: int
    piece_stride: int
    piece_bytes: int
    pieces: int
    mark_bytes: int


@dataclass(frozen=True)
class StagingLayout:
    """Shapes and byte offsets of one launch's operands, all fp16, one after the other.

        keys    [batch * kv_heads, tokens, key_channels]
        values  [batch * kv_heads, tokens, head_dim]
        query   [batch * kv_heads, rows,   key_channels]
        mask    [batch,            mask_rows, tokens]
        out     [batch * kv_heads, rows,   head_dim]

    Everything that one job reads or writes is one range of memory, so one sync each way serves it.

    A mask is an operand of its own where rows see different tokens. Where all rows of a sequence see the same
    (`mask_rows` 0), K carries it: `MARK_CHANNELS` more channels, the first of them `MASKED` for a token that is not
    seen and 0 for one that is, so that a 1 in the query's adds it to the score. That spares the operand, and sequences
    of different lengths share a launch.

    Attributes:
        batch: sequences.
        kv_heads: KV heads of each.
        tokens: the bucket: tokens each sequence is padded to.
        rows: query rows of each KV head.
        head_dim: elements per head, a multiple of 8.
        mask_rows: `rows`, or 0 if K carries the mask.
        tiled: K and V lie as the NPU keeps them, `[batch * kv_heads, channels / 8, tokens, 8]`.

    Raises:
        UsageError: head_dim is not a multiple of 8.
    """

    batch: int
    kv_heads: int
    tokens: int
    rows: int
    head_dim: int
    mask_rows: int
    tiled: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % TILE_CHANNELS:
            raise UsageError(
                f"a head of {self.head_dim} channels cannot be staged: the NPU takes multiples of {TILE_CHANNELS}",
                head_dim=self.head_dim,
            )

    @property
    def heads(self) -> int:
        """Leading dimension of keys, values, query and out."""
        return self.batch * self.kv_heads

    @property
    def key_channels(self) -> int:
        """Channels of keys and of query."""
        return self.head_dim + (0 if self.mask_rows else MARK_CHANNELS)

    @property
    def keys_shape(self) -> tuple[int, ...]:
        """Shape of keys as they lie."""
        return self._kv_shape(self.key_channels)

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values as they lie."""
        return self._kv_shape(self.head_dim)

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """Shape of query."""
        return self.heads, self.rows, self.key_channels

    @property
    def mask_shape(self) -> tuple[int, int, int]:
        """Shape of the additive mask: the channels of the compiled graph's mask are the tokens."""
        return self.batch, self.mask_rows, self.tokens

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Shape of out."""
        return self.heads, self.rows, self.head_dim

    @property
    def keys_offset(self) -> int:
        """Byte offset of keys, as the following are of the other operands."""
        return 0

    @cached_property
    def values_offset(self) -> int:  # noqa: D102 - see keys_offset
        return _aligned(self.heads * self.tokens * self.key_channels * FP16_BYTES)

    @cached_property
    def query_offset(self) -> int:  # noqa: D102 - see keys_offset
        return self.values_offset + _aligned(self.heads * self.tokens * self.head_dim * FP16_BYTES)

    @cached_property
    def mask_offset(self) -> int:  # noqa: D102 - see keys_offset
        return self.query_offset + _aligned(self.heads * self.rows * self.key_channels * FP16_BYTES)

    @cached_property
    def out_offset(self) -> int:  # noqa: D102 - see keys_offset
        return self.mask_offset + _aligned(self.batch * self.tokens * self.mask_rows * FP16_BYTES)

    @cached_property
    def out_bytes(self) -> int:
        """Bytes of out, up to the next cache line."""
        return _aligned(self.heads * self.rows * self.head_dim * FP16_BYTES)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all operands together."""
        return self.out_offset + self.out_bytes

    @property
    def keys_place(self) -> Place:
        """Where a token of keys goes."""
        return self._place(self.key_channels, marked=not self.mask_rows)

    @property
    def values_place(self) -> Place:
        """Where a token of values goes."""
        return self._place(self.head_dim, marked=False)

    def by_token(self, operand: NDArray[_Element]) -> NDArray[_Element]:
        """Keys or values as they lie, seen as `[heads, tokens, channels / 8, 8]`: a view, whatever the order."""
        if self.tiled:
            return operand.transpose(0, 2, 1, 3)
        return operand.reshape(self.heads, self.tokens, -1, TILE_CHANNELS)

    def _kv_shape(self, channels: int) -> tuple[int, ...]:
        if self.tiled:
            return self.heads, channels // TILE_CHANNELS, self.tokens, TILE_CHANNELS
        return self.heads, self.tokens, channels

    def _place(self, channels: int, *, marked: bool) -> Place:
        token_bytes, mark_bytes = channels * FP16_BYTES, MARK_CHANNELS * FP16_BYTES * marked
        if self.tiled:
            tile_bytes = TILE_CHANNELS * FP16_BYTES
            pieces = self.head_dim // TILE_CHANNELS
            tile_stride = self.tokens * tile_bytes
            return Place(self.tokens * token_bytes, tile_bytes, tile_stride, tile_bytes, pieces, mark_bytes)
        own_bytes = self.head_dim * FP16_BYTES
        return Place(self.tokens * token_bytes, token_bytes, own_bytes, own_bytes, 1, mark_bytes)

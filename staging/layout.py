"""Where each operand of an attention launch lies in a staging buffer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "TOKEN_MULTIPLE", "StagingLayout"]

ALIGNMENT = 64
"""Bytes. One cache line, of the RK3588's cores too: a sync of one operand never touches its neighbour's bytes."""

TOKEN_MULTIPLE = 4
"""Tokens. Lengths the vendor compiler takes without inserting a convolution to pad them (rknn-toolkit2 2.5.0)."""

FP16_BYTES = 2


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StagingLayout:
    """Shapes and byte offsets of one launch's operands, all fp16, one after the other.

        keys    [batch * kv_heads, tokens, head_dim]
        values  [batch * kv_heads, tokens, head_dim]
        query   [batch * kv_heads, rows,   head_dim]
        mask    [batch,            tokens, mask_rows]
        out     [batch * kv_heads, rows,   head_dim]

    Everything that one job reads or writes is one range of memory, so one sync each way serves it.

    The order of K's and V's bytes, token-major here, is known to `kv_shape`, `gather_rows` and `tail_runs` and to
    nothing else in this package. The NPU's own tiles `[batch * kv_heads, head_dim / 8, tokens, 8]` would be another
    class with the same three members.

    Attributes:
        batch: sequences.
        kv_heads: KV heads of each.
        tokens: the bucket: tokens each sequence is padded to.
        rows: query rows of each KV head.
        head_dim: elements per head.
        mask_rows: 1 when all rows of a sequence see the same tokens, else `rows`.
    """

    batch: int
    kv_heads: int
    tokens: int
    rows: int
    head_dim: int
    mask_rows: int

    @property
    def heads(self) -> int:
        """Leading dimension of keys, values, query and out."""
        return self.batch * self.kv_heads

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of keys and of values."""
        return self.heads, self.tokens, self.head_dim

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """Shape of query and of out."""
        return self.heads, self.rows, self.head_dim

    @property
    def mask_shape(self) -> tuple[int, int, int]:
        """Shape of the additive mask: token-major, which the vendor compiler takes as it lies."""
        return self.batch, self.tokens, self.mask_rows

    @property
    def token_bytes(self) -> int:
        """Bytes of one head's key (or value) of one token."""
        return self.head_dim * FP16_BYTES

    @property
    def keys_offset(self) -> int:
        """Byte offset of keys, as the following are of the other operands."""
        return 0

    @property
    def values_offset(self) -> int:  # noqa: D102 - see keys_offset
        return self._kv_bytes

    @property
    def query_offset(self) -> int:  # noqa: D102 - see keys_offset
        return 2 * self._kv_bytes

    @property
    def mask_offset(self) -> int:  # noqa: D102 - see keys_offset
        return self.query_offset + self._query_bytes

    @property
    def out_offset(self) -> int:  # noqa: D102 - see keys_offset
        return self.mask_offset + _aligned(self.batch * self.tokens * self.mask_rows * FP16_BYTES)

    @property
    def out_bytes(self) -> int:
        """Bytes of out, up to the next cache line."""
        return self._query_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all operands together."""
        return self.out_offset + self.out_bytes

    @property
    def _kv_bytes(self) -> int:
        return _aligned(self.heads * self.tokens * self.token_bytes)

    @property
    def _query_bytes(self) -> int:
        return _aligned(self.heads * self.rows * self.token_bytes)

    def gather_rows(
        self, source: NDArray[np.int64], head: NDArray[np.int64], token: NDArray[np.int64], count: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Copies that bring runs of `count` tokens `[count, head_dim]` of one head to their place.

        Args:
            source: int64, any shape; byte offset of each run in the pool.
            head: where the run goes: index into the leading dimension of keys. This and the next two broadcast
                to the shape of `source`.
            token: where the run goes: its first token.
            count: tokens in the run.

        Returns:
            int64 `[copies, 3]`: source offset, destination offset from the start of keys (or values), bytes.
        """
        rows = np.empty((*source.shape, 3), np.int64)
        rows[..., 0] = source
        rows[..., 1] = (head * self.tokens + token) * self.token_bytes
        rows[..., 2] = count * self.token_bytes
        return rows.reshape(-1, 3)

    def tail_runs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """What lies behind the valid tokens of every head.

        Args:
            lengths: int64 `[batch]`; valid tokens of each sequence.

        Returns:
            int64 `[runs, 2]`: offset from the start of keys (or values), bytes. No run is empty.
        """
        valid = np.repeat(lengths, self.kv_heads)
        first = np.arange(self.heads, dtype=np.int64) * self.tokens + valid
        runs = np.stack([first, self.tokens - valid], axis=1) * self.token_bytes
        return np.ascontiguousarray(runs[valid < self.tokens])

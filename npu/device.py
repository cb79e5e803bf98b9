"""What an attention job hands to an NPU, and how its result is proven fresh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError
from staging import StagingBuffer

__all__ = ["MASKED", "MAX_DIMENSION", "ROW_MULTIPLE", "AttentionJob", "poison", "require_fresh"]

MAX_DIMENSION = 8191
"""The NPU's size registers hold 13 bits; the vendor runtime rejects 0x2010 = 8208 against a limit of 0x1fff."""

ROW_MULTIPLE = 4
"""Query rows per KV head are padded to a multiple of this; else rknn-toolkit2 2.5.0 inserts a convolution."""

MASKED = np.float16(-1e4)
"""Added to the score of a token that a row must not see. Exact in fp16, and finite: -inf turns a row into NaN."""

_POISON = np.uint16(0x7F5A)
"""A NaN whose payload no arithmetic makes: an overflow gives the canonical NaN, 0x7E00 or 0xFE00."""


@dataclass(frozen=True)
class AttentionJob:
    """One launch: `out = softmax(query @ keys^T + mask) @ values`, for each leading index.

    The operands are fp16 views of the buffer's memory; the query is scaled already.

    Attributes:
        buffer: READY; in flight until the job has ended.
        query: `[batch * kv_heads, rows, head_dim]`.
        keys: `[batch * kv_heads, tokens, head_dim]`.
        values: like keys.
        mask: `[batch, tokens, 1 or rows]`; each element 0 or `MASKED`.
        out: like query; poisoned before the buffer was synced.
    """

    buffer: StagingBuffer
    query: NDArray[np.float16]
    keys: NDArray[np.float16]
    values: NDArray[np.float16]
    mask: NDArray[np.float16]
    out: NDArray[np.float16]

    @classmethod
    def over(cls, buffer: StagingBuffer) -> AttentionJob:
        """The job whose operands are the buffer's own."""
        return cls(buffer, buffer.query, buffer.keys, buffer.values, buffer.mask, buffer.out)

    def operands(self) -> Iterator[tuple[str, NDArray[np.float16]]]:
        """Each operand with its name, `out` last."""
        for name in ("query", "keys", "values", "mask", "out"):
            yield name, getattr(self, name)


def poison(out: NDArray[np.float16]) -> None:
    """Fill the place of a result with a pattern that no result contains, before it is synced to the device.

    A run that reports success and writes nothing, a core that drops out, and a missing sync from the device all
    leave the pattern where the result should be. It proves freshness because the device writes into this very
    memory; a runtime that hands back arrays of its own needs another proof.
    """
    out.view(np.uint16)[...] = _POISON


def require_fresh(out: NDArray[np.float16]) -> None:
    """Prove that the device wrote every row of a result since `poison`.

    One look per row, at its last element: rows are written whole and in ascending order.

    Raises:
        DeviceError: a row still holds the poison.
    """
    stale = int(np.count_nonzero(out.view(np.uint16)[..., -1] == _POISON))
    if stale:
        rows = out.shape[0] * out.shape[1]
        raise DeviceError(
            f"the run reported success but left {stale} of {rows} result rows unwritten: "
            "a core dropped out, or memory was not synced from the device",
            stale=stale,
            rows=rows,
        )

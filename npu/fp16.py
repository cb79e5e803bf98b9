"""Attention as an fp16 device computes it, in numpy."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

__all__ = ["Rounding", "attention", "check_rounding", "widen"]

Rounding = Literal["op", "output"]
"""`"op"` rounds the result of every operation to fp16; `"output"` computes in float32 and rounds the result once.

The vendor's simulator does the latter for a fused attention (rknn-toolkit2 2.5.0) and the former for separate
operations. What the hardware does inside its fused operation is not documented, so the two are an optimistic and a
pessimistic bound.
"""

_EXPONENT = np.uint16(0x7C00)


def check_rounding(rounding: str) -> None:
    """Refuse an unknown rounding.

    Raises:
        UsageError: `rounding` is not one of `Rounding`.
    """
    if rounding not in get_args(Rounding):
        raise UsageError(f"rounding must be one of {get_args(Rounding)}, got {rounding!r}", rounding=rounding)


def widen(half: NDArray[np.float16]) -> NDArray[np.float32]:
    """Convert fp16 to float32 exactly.

    numpy converts one element at a time. Moved to their float32 places, the exponent and mantissa read as the value
    times 2^-112, subnormals too, and multiplying it away is exact; whole vectors at once, this is several times
    faster. Infinities and NaN would become numbers, so an operand that holds any takes numpy's way.

    Args:
        half: fp16, any shape, C-contiguous.

    Returns:
        float32 of the same shape, owned by the caller.
    """
    if ((half.view(np.uint16) & _EXPONENT) == _EXPONENT).any():
        return half.astype(np.float32)
    bits = half.view(np.int16).astype(np.int32)  # sign extension puts the sign where float32 has it
    bits <<= 13
    bits &= np.int32(-0x70000001)  # 0x8fffffff: clear the copies of the sign above the exponent
    wide: NDArray[np.float32] = bits.view(np.float32)
    wide *= np.float32(2.0**112)
    return wide


def attention(
    query: NDArray[np.float16],
    keys: NDArray[np.float16],
    values: NDArray[np.float16],
    mask: NDArray[np.float16] | None,
    rounding: Rounding,
) -> NDArray[np.float16]:
    """`softmax(query @ keys^T + mask) @ values`, with the softmax as its own steps.

    Sums (of products, of weights) accumulate in float32 in both modes, as an operation's inside. What exceeds fp16
    becomes infinity, and what follows from it NaN, as in the device; nothing is clamped.

    Args:
        query: fp16 `[batch * kv_heads, rows, key_channels]`, scaled.
        keys: fp16 `[batch * kv_heads, tokens, key_channels]`.
        values: fp16 `[batch * kv_heads, tokens, head_dim]`.
        mask: fp16 `[batch, 1 or rows, tokens]`, added to the scores; None adds nothing.
        rounding: where to round.

    Returns:
        fp16 `[batch * kv_heads, rows, head_dim]`.
    """
    by_op = rounding == "op"
    with np.errstate(over="ignore", invalid="ignore"):
        scores = np.matmul(widen(query), widen(keys).transpose(0, 2, 1))
        _round(scores, by_op)
        if mask is not None:
            by_sequence = scores.reshape(len(mask), -1, *scores.shape[1:])  # a view
            by_sequence += widen(mask)[:, np.newaxis]
            _round(scores, by_op)
        scores -= scores.max(axis=2, keepdims=True)
        _round(scores, by_op)
        weights = np.exp(scores, out=scores)
        _round(weights, by_op)
        sums = weights.sum(axis=2, keepdims=True)
        _round(sums, by_op)
        weights /= sums
        _round(weights, by_op)
        result: NDArray[np.float32] = np.matmul(weights, widen(values))
        return result.astype(np.float16)


def _round(array: NDArray[np.float32], wanted: bool) -> None:
    """Round in place to what fp16 can hold."""
    if wanted:
        array[...] = array.astype(np.float16)

"""How a launch is proven fresh: every head carries a question whose answer takes each operand of this launch.

The vendor's Python runtime ignores what its run returns (rknn-toolkit-lite2 2.5.0), so that a job that failed hands
back what the buffer held before, and it looks valid. So the last two tokens of every head are none of the context.
Their values are nonces of +1 and -1, and the last query rows see these two and nothing else. The scores of the two
differ by a sum of shifts, one each from K, the query and, where it is an operand, the mask. A row's answer is

    first + sigmoid(key shift + query shift + mask shift) * (second - first)

and nonces and shifts are drawn anew for each launch. An old result, or an old V, shows in about half of the channels of
every head. An old K shows in a head unless its old shift is the new one, which it is in one of 8: it passes in a launch
of `h` heads with a chance of 8^-h. The query is as good with one row, and better with four. A mask has a shift for
each of a tile's four rows, common to all heads, so that an old one passes with 8^-4. Several old operands at once pass
more seldom still. The next launch asks anew, and a core that fails three times in a row gets no more jobs: a device
that goes on using what is old is found out, whatever passed once.

That takes two slots of a bucket, and rows that are mostly padding anyway; asking and checking take some tens of
microseconds, a launch several hundred. Rows that are wrong while the question's own are right are not seen.
"""

from __future__ import annotations

import functools
import hashlib
import itertools

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError
from staging import MASKED, TILE_CHANNELS, StagingBuffer, StagingLayout

from .device import ROW_MULTIPLE

__all__ = [
    "CANARY_ROWS",
    "CANARY_SCORE",
    "CANARY_TOKENS",
    "SCORE_CHANNEL",
    "SHIFTS",
    "SHIFT_CHANNEL",
    "Canary",
    "canary_keys",
    "canary_query",
    "canary_rows",
    "shift_channel",
]

CANARY_TOKENS = 2
"""Slots at the end of a bucket that hold no token of the context."""

CANARY_ROWS = 1
"""Query rows at the end of a launch that ask the question, at least; `canary_rows` says how many."""

SCORE_CHANNEL = 1
"""Mark channel that gives a canary row its scores; channel 0 is the mask's."""

SHIFT_CHANNEL = 2
"""Mark channel that carries K's shift, for which the query has 1; the next one carries the query's, and K has 1."""

CANARY_SCORE = np.float16(64)
"""Of the canary's tokens against 0 of all others: exp(-62) is 1e-27, nothing beside 1 in fp16 and float32."""

SHIFTS = ((np.arange(8) - 3.5) / 4).astype(np.float16)
"""That a shift is drawn from: -0.875 to 0.875 in steps of 1/4.

A sum of them is exact in fp16, with `CANARY_SCORE`, too, where fp16's step is 1/16. Three add up to 2.625 at most, so
two sums that differ change a channel by 2 * (sigmoid(2.625) - sigmoid(2.375)) = 0.035 at least."""

_TOLERANCE = 0.015
"""What an answer may be off by, which is less than half of 0.035.

The vendor's simulator is off by 5e-4, op by op rounding by 1e-3, and the self-test allows 2e-3
(`npu.selftest_oracle.LARGEST_ERROR`). So an old shift shows on any device that is off by less than 0.02."""

_SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).astype(np.float16)
"""`[256, 8]`: a byte's bits as +1 and -1."""

_OPPOSED = np.array([0, 1] * (TILE_CHANNELS // 2), np.float16)
"""In which channels of a tile the nonces differ: the others show that a result is new, these which of the two it is."""

_launches = itertools.count()  # of the process: a question is never asked twice, whatever runtime launches


def canary_rows(layout: StagingLayout) -> int:
    """Query rows that ask: one of a decode launch. A tile has a multiple of `ROW_MULTIPLE`, with one more as many."""
    return ROW_MULTIPLE if layout.mask_rows else CANARY_ROWS


def shift_channel(layout: StagingLayout) -> int:
    """Channel of keys and query that K's shift is in: without marks, the head's first."""
    return 0 if layout.mask_rows else layout.head_dim + SHIFT_CHANNEL


@functools.lru_cache(maxsize=256)  # more than the layouts of one model
def canary_keys(layout: StagingLayout) -> NDArray[np.float16]:
    """The canary's keys, fp16 `[CANARY_TOKENS, key_channels]`, read only; K's shift is added to the second."""
    keys = np.zeros((CANARY_TOKENS, layout.key_channels), np.float16)
    if not layout.mask_rows:
        keys[:, layout.head_dim] = MASKED
        keys[:, layout.head_dim + SCORE_CHANNEL] = CANARY_SCORE
    keys[-1, shift_channel(layout) + 1] = 1
    keys.flags.writeable = False
    return keys


@functools.lru_cache(maxsize=256)
def canary_query(layout: StagingLayout) -> NDArray[np.float16]:
    """A canary row's query, fp16 `[key_channels]`, read only; the query's shift is added behind K's channel."""
    query = np.zeros(layout.key_channels, np.float16)
    if not layout.mask_rows:
        query[layout.head_dim + SCORE_CHANNEL] = 1
    query[shift_channel(layout)] = 1
    query.flags.writeable = False
    return query


class Canary:
    """The question of one launch.

    Args:
        layout: of the launch's operands.

    Attributes:
        answer: float32 `[heads, canary_rows, head_dim]`; what the canary's rows must come out as.
    """

    def __init__(self, layout: StagingLayout) -> None:
        heads, rows = layout.heads, canary_rows(layout)
        tiles, asked = layout.head_dim // TILE_CHANNELS, heads * rows
        hidden = layout.batch * rows if layout.mask_rows else 0
        number = next(_launches).to_bytes(8, "little")
        drawn = np.frombuffer(hashlib.shake_128(number).digest(tiles + heads + asked + hidden), np.uint8)
        self._first = _SIGNS[drawn[:tiles]]
        shifts = SHIFTS[drawn[tiles:] % len(SHIFTS)]
        self._key = shifts[:heads]
        self._query = shifts[heads : heads + asked].reshape(heads, rows)
        self._mask = shifts[heads + asked :].reshape(-1, rows)
        difference = (self._query + self._key[:, np.newaxis]).astype(np.float32)
        if hidden:
            difference += self._mask.repeat(layout.kv_heads, axis=0)
        odds: NDArray[np.float32] = np.exp(difference)
        second = (odds / (1 + odds))[..., np.newaxis, np.newaxis]  # its weight
        answer = self._first * (1 - 2 * second * _OPPOSED)
        self.answer = answer.reshape(heads, rows, layout.head_dim)

    def write(self, buffer: StagingBuffer) -> None:
        """Put the question into a buffer whose K, V, query and mask are written already."""
        layout = buffer.layout
        rows, channel = canary_rows(layout), shift_channel(layout)
        keys, values = layout.by_token(buffer.keys), layout.by_token(buffer.values)
        keys[:, -CANARY_TOKENS:] = canary_keys(layout).reshape(CANARY_TOKENS, -1, TILE_CHANNELS)
        keys[:, -1, channel // TILE_CHANNELS, channel % TILE_CHANNELS] = self._key
        values[:, -2] = self._first
        values[:, -1] = self._first * (1 - 2 * _OPPOSED)
        query = buffer.query
        query[:, -rows:] = canary_query(layout)
        query[:, -rows:, channel + 1] = self._query
        if layout.mask_rows:
            mask = buffer.mask
            mask[:, -rows:] = MASKED
            mask[:, -rows:, -2] = 0  # both are hidden from all other rows already: they lie behind every context
            mask[:, -rows:, -1] = self._mask

    def errors(self, out: NDArray[np.float16]) -> NDArray[np.float32]:
        """What a result's answers are off by at most, float32 `[heads]`; NaN where it is no number.

        Args:
            out: fp16 `[heads, rows, head_dim]`.
        """
        with np.errstate(invalid="ignore"):  # it may be anything
            off: NDArray[np.float32] = np.abs(out[:, -self.answer.shape[1] :] - self.answer).max(axis=(1, 2))
        return off

    def check(self, out: NDArray[np.float16]) -> None:
        """Prove that the device computed every head of this launch, of this launch's operands.

        Args:
            out: fp16 `[heads, rows, head_dim]`.

        Raises:
            DeviceError: some head's answer is another.
        """
        stale = int(np.count_nonzero(~(self.errors(out) <= _TOLERANCE)))  # NaN is not
        if stale:
            raise DeviceError(
                f"the run reported success, but {stale} of {len(out)} heads do not answer this launch: their result or "
                "an operand is an old one, a core dropped out, memory was not synced, or K or V is not finite",
                stale=stale,
                heads=len(out),
            )

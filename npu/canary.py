"""How a result is proven fresh: every head of every launch carries a question whose answer is new.

The vendor's Python runtime ignores what its run returns (rknn-toolkit-lite2 2.5.0), so that a job that failed hands
back what the buffer held before, and it looks valid. So the last token of every head is not a token: its value is a
nonce of +1 and -1, another for every launch, and the last query row sees it and nothing else. Its result is the nonce,
exactly, if the device computed this launch, and nothing like it if the run, V or the result is an older one. What K,
the query and the mask hold for it is the same in every launch: that one of these is an older one by itself, with V and
the result this launch's, is not seen. That takes one slot of a bucket, and a row that is mostly padding anyway;
checking it costs some microseconds, a launch several hundred.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError
from staging import MASKED, StagingBuffer

__all__ = ["CANARY_ROWS", "CANARY_SCORE", "CANARY_TOKENS", "SCORE_CHANNEL", "Canary"]

CANARY_TOKENS = 1
"""Slots at the end of a bucket that hold no token of the context."""

CANARY_ROWS = 1
"""Query rows at the end of a launch that ask for the nonce."""

SCORE_CHANNEL = 1
"""Mark channel that gives the canary row its score; channel 0 is the mask's."""

CANARY_SCORE = np.float16(64)
"""Of the canary token against 0 of all others: exp(-64) is 1.6e-28, nothing beside 1 in fp16 and float32."""

_TOLERANCE = 0.25
"""A device whose exponential is approximate answers not quite 1; a sign is a sign up to here."""

_launches = itertools.count()  # of the process: a nonce is never used twice, whatever runtime launches


class Canary:
    """The question of one launch.

    Args:
        head_dim: channels of the answer, a multiple of 8.

    Attributes:
        nonce: fp16 `[head_dim]`, each +1 or -1.
    """

    def __init__(self, head_dim: int) -> None:
        number = next(_launches).to_bytes(8, "little")
        bits = np.unpackbits(np.frombuffer(hashlib.shake_128(number).digest(head_dim // 8), np.uint8))
        self.nonce: NDArray[np.float16] = (bits.astype(np.float16) * 2 - 1).astype(np.float16)

    def write(self, buffer: StagingBuffer) -> None:
        """Put the question into a buffer whose K, V, query and mask are written already."""
        layout = buffer.layout
        keys, values = layout.by_token(buffer.keys), layout.by_token(buffer.values)
        keys[:, -1] = 0
        values[:, -1] = self.nonce.reshape(values.shape[2:])
        buffer.query[:, -1] = 0
        if layout.mask_rows:
            buffer.mask[:, -1] = MASKED
            buffer.mask[:, -1, -1] = 0  # hidden from all other rows already: it lies behind every context
        else:
            keys[:, -1, -1, 0] = MASKED
            keys[:, -1, -1, SCORE_CHANNEL] = CANARY_SCORE
            buffer.query[:, -1, layout.head_dim + SCORE_CHANNEL] = 1

    def check(self, out: NDArray[np.float16]) -> None:
        """Prove that the device computed every head of this launch.

        Args:
            out: fp16 `[heads, rows, head_dim]`.

        Raises:
            DeviceError: some head's answer is not the nonce.
        """
        with np.errstate(invalid="ignore"):  # it may be anything
            wrong = np.abs(out[:, -1].astype(np.float32) - self.nonce) > _TOLERANCE
        stale = int(np.count_nonzero((wrong | np.isnan(out[:, -1])).any(axis=1)))
        if stale:
            raise DeviceError(
                f"the run reported success, but {stale} of {len(out)} heads do not answer this launch: their result is "
                "an old one, a core dropped out, memory was not synced, or K or V is not finite",
                stale=stale,
                heads=len(out),
            )

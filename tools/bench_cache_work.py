"""What both sides of `rockpage bench cache` work on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

__all__ = ["APPENDS", "BLOCKS", "DECODING", "PREFIX", "PROMPT", "REPEATS", "make_prompt", "require_hit"]

PREFIX = 512
"""Tokens that are found."""

BLOCKS = 4096
"""In either pool: 64 Ki tokens in blocks of 16."""

REPEATS = 10
"""Lookups that are timed together: one takes microseconds."""

APPENDS = 512
"""Tokens appended to a table together: one takes less than reading the clock. Blocks of 16 and 256 divide it."""

DECODING = 128
"""Sequences that append at once."""

PROMPT = 64
"""Tokens that each of these begins with, and one more than its neighbour, up to a block."""


def make_prompt() -> NDArray[np.int32]:
    """Tokens of no pattern: the prefix, and one behind it, which is left to compute."""
    return np.random.default_rng(512).integers(0, 32_000, PREFIX + 1).astype(np.int32)


def require_hit(tokens: int) -> None:
    """Prove that a lookup found what it was to find.

    Raises:
        UsageError: it found less, as blocks that do not divide the prefix do.
    """
    if tokens != PREFIX:
        raise UsageError(f"{tokens} of {PREFIX} tokens were found: the block size must divide {PREFIX}", found=tokens)

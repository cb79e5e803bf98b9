"""Token ids that come from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostcache.errors import RequestRefused, UsageError

__all__ = ["as_ids"]


def as_ids(tokens: ArrayLike, vocabulary: int) -> NDArray[Any]:
    """Token ids as an array of integers, all of them in the vocabulary.

    Shape and length are not looked at: what they may be differs between a prompt and a text to score.

    Args:
        tokens: what the caller gave.
        vocabulary: number of ids there are.

    Raises:
        RequestRefused: they are no integers.
        UsageError: one is outside the vocabulary.
    """
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError) as error:  # ragged, or nothing that has numbers in it
        raise RequestRefused(f"a prompt is text or a list of token ids: {error}") from error
    if not ids.size:
        return ids.astype(np.int64)  # numpy takes an empty list for floats
    if ids.dtype.kind not in "iu":
        raise RequestRefused(f"a prompt is text or a list of token ids, got {ids.dtype}", dtype=ids.dtype)
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise UsageError(f"token id {wrong} is outside 0..{vocabulary - 1}", token=wrong)
    return ids

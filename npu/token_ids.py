"""Token ids that come from outside."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

__all__ = ["check_ids"]


def check_ids(tokens: NDArray[np.generic], vocab_size: int) -> NDArray[np.generic]:
    """Refuse ids outside the vocabulary; anything else about a prompt is the scheduler's to refuse.

    Returns:
        The argument.

    Raises:
        UsageError: an id is outside `0 <= id < vocab_size`.
    """
    if tokens.size and tokens.dtype.kind in "iu":
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise UsageError(f"token id {wrong} is outside 0..{vocab_size - 1}", token=wrong)
    return tokens

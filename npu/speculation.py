"""Guesses what an answer says next from what its prompt and itself have said before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

__all__ = ["PromptLookup"]


class PromptLookup:
    """Proposes the tokens that followed the last few ones when those occurred before: prompt lookup decoding.

    After Saxena, "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding). It needs no second
    model, and pays where answers repeat their prompt: summaries, corrections, code. What it proposes is computed beside
    a sequence's newest token and compared with what the model says there, so answers are the same with and without it.

    Args:
        most: tokens proposed at a time, at most.
        longest: tokens that are looked up, at most; longer matches go first.
        shortest: tokens that must match at least.

    Raises:
        UsageError: a number is below 1, or `shortest` exceeds `longest`.

    Example:
        >>> import numpy as np
        >>> from npu.speculation import PromptLookup
        >>> PromptLookup(most=3).propose(np.array([1, 2, 3, 4, 5, 9, 2, 3], np.int32)).tolist()
        [4, 5, 9]
    """

    def __init__(self, most: int, *, longest: int = 3, shortest: int = 2) -> None:
        if most < 1 or not 1 <= shortest <= longest:
            raise UsageError(
                f"prompt lookup proposes at least one token behind {shortest} to {longest} that match, not {most}: "
                "give it a positive number, and a range",
                most=most,
                longest=longest,
                shortest=shortest,
            )
        self._most = most
        self._sizes = range(longest, shortest - 1, -1)

    def propose(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """What may follow a sequence.

        Args:
            tokens: int32, prompt and answer so far; only read.

        Returns:
            int32, at most `most` tokens, none if nothing matches; a view of `tokens`.
        """
        for size in self._sizes:
            if size >= len(tokens):
                continue
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            places = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
            if places.size:
                behind = int(places[-1]) + size
                return tokens[behind : behind + self._most]
        return tokens[:0]

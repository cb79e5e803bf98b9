"""Token ids that come from outside."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostcache.errors import RequestRefused, UsageError

from .tokenizer import Tokenizer

__all__ = ["as_ids", "prompt_ids"]


def prompt_ids(prompt: str | ArrayLike, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """A prompt as ids: of a text, in which special tokens are plain text, or as they were given.

    Raises:
        UsageError: no valid Unicode, or as `as_ids`, as is `RequestRefused`.
    """
    return tokenizer.encode(prompt) if isinstance(prompt, str) else as_ids(prompt, tokenizer.vocab_size)


def as_ids(tokens: ArrayLike, vocabulary: int) -> NDArray[np.int32]:
    """Token ids as int32, all of them in the vocabulary.

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
        return ids.astype(np.int32)  # numpy takes an empty list for floats
    if ids.dtype.kind not in "iu":
        raise RequestRefused(f"a prompt is text or a list of token ids, got {ids.dtype}", dtype=ids.dtype)
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise UsageError(f"token id {wrong} is outside 0..{vocabulary - 1}", token=wrong)
    return ids.astype(np.int32)

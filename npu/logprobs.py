"""How likely the model found a token that was sampled, and what it would rather have said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .logit_filters import kth_largest
from .score import log_softmax_at

__all__ = ["TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True)
class TokenLogprobs:
    """One sampled token under the model's own distribution.

    It is taken from the logits as the model computed them, before bias, penalties, structure and temperature: so it
    says what the model thinks, whatever the request forced on it, and agrees with `Engine.score`. vLLM's default is the
    same (`logprobs_mode="raw_logprobs"`).

    Attributes:
        token: the id.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the most likely tokens, the most likely first, of equal ones the lowest id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Describe a token that was sampled.

    Args:
        logits: float32 `[vocab]`, from the model.
        token: the id that was sampled; its logit is finite.
        count: alternatives to name.

    Raises:
        RequestFailed: the logits hold NaN or `+inf`.
    """
    logprob = float(log_softmax_at(logits[None], np.array([token], np.int32))[0])
    normaliser = float(logits[token]) - logprob
    count = min(count, len(logits))
    candidates = np.flatnonzero(logits >= kth_largest(logits, count)) if count else np.empty(0, np.intp)
    ranked = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
    return TokenLogprobs(token, logprob, tuple((int(one), float(logits[one]) - normaliser) for one in ranked))

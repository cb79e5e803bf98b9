"""What changes a row of logits or narrows the choice before a token is drawn: one function for each filter.

Those above the temperature change the scores of tokens, those below leave fewer tokens. None sorts a whole vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "bias",
    "kth_largest",
    "penalise_occurrences",
    "penalise_repetition",
    "rule_out",
    "temper",
    "top_k",
    "top_p",
    "typical_p",
]

_FIRST_HEAD = 64  # candidates a nucleus is looked for in first; a tail this far down rarely matters


def bias(scores: NDArray[np.float32], tokens: NDArray[np.int32], amounts: NDArray[np.float32]) -> None:
    """Add to the scores of some tokens, in place, as OpenAI's `logit_bias` does.

    Args:
        scores: float32 `[vocab]`.
        tokens: int32 `[n]`, each id once.
        amounts: float32 `[n]`.
    """
    scores[tokens] += amounts


def penalise_repetition(scores: NDArray[np.float32], seen: NDArray[np.int32], penalty: float) -> None:
    """Make tokens less likely that occur in `seen`, however often, in place (Keskar et al., "CTRL").

    Args:
        scores: float32 `[vocab]`.
        seen: int32 `[n]`, ids.
        penalty: positive scores are divided by it, others multiplied.
    """
    before = scores[seen]  # a token that occurs twice is written twice, with the same value
    with np.errstate(over="ignore"):  # only broken logits overflow, and become inf
        scores[seen] = np.where(before > 0, before / penalty, before * penalty)


def penalise_occurrences(
    scores: NDArray[np.float32], answer: NDArray[np.int32], frequency: float, presence: float
) -> None:
    """Lower the scores of tokens that the answer holds, in place: `count * frequency + presence` each.

    The definition is OpenAI's (API guide, "Frequency and presence penalties"): of what was sampled before, not of the
    prompt.

    Args:
        scores: float32 `[vocab]`.
        answer: int32 `[n]`, ids.
        frequency: for each occurrence.
        presence: once.
    """
    tokens, counts = np.unique(answer, return_counts=True)
    scores[tokens] -= (counts * frequency + presence).astype(np.float32)


def rule_out(scores: NDArray[np.float32], allowed: NDArray[np.intp]) -> NDArray[np.float32]:
    """A copy in which every token but those in `allowed` (ids) is impossible."""
    kept = np.full_like(scores, -np.inf)
    kept[allowed] = scores[allowed]
    return kept


def temper(scores: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float64]:
    """Probabilities times a constant, so that the weight of the best token, whose score is `peak`, is 1.

    The exponential is taken in float32, which has a vector form and loses less than the logits have lost before; sums
    over a vocabulary want float64.
    """
    # Outside the clip a float32 exponential is 0 or 1 anyway; inside it, neither 0 * inf nor 0 / 0 can come up.
    scale = np.float32(min(max(1 / temperature, 1e-30), 1e30))
    with np.errstate(over="ignore"):  # a tiny temperature may scale to -inf: weight 0, as it should
        weights: NDArray[np.float32] = np.exp((scores - np.float32(peak)) * scale)
    return weights.astype(np.float64)


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Ids, ascending, of the k highest scores and of those equal to the k-th: no order among equals is needed."""
    if k == 0 or k >= len(scores):
        return np.arange(len(scores))
    return np.flatnonzero(scores >= kth_largest(scores, k))


def top_p(weights: NDArray[np.float64], mass: float) -> NDArray[np.intp]:
    """Indices, ascending, of the largest weights up to the one with which their sum reaches `mass` of all.

    Of equal weights the first come first.
    """
    return _smallest_set(weights, weights, mass)


def typical_p(weights: NDArray[np.float64], mass: float) -> NDArray[np.intp]:
    """As `top_p`, but in order of how near a token's surprise is to the one to be expected, nearest first.

    The surprise of a token is `-log(p)`; the mean over the distribution is its entropy. The most likely token may go
    (Meister et al., "Locally Typical Sampling").
    """
    total = float(weights.sum())
    with np.errstate(divide="ignore"):  # a token of weight 0 is infinitely surprising
        surprise = math.log(total) - np.log(weights)
    possible = weights > 0
    entropy = float((weights[possible] * surprise[possible]).sum()) / total
    return _smallest_set(weights, -np.abs(surprise - entropy), mass)


def kth_largest(values: NDArray[np.float32] | NDArray[np.float64], k: int) -> float:
    """The k-th largest of several values, `1 <= k <= len(values)`."""
    return float(np.partition(values, len(values) - k)[len(values) - k])


def _smallest_set(weights: NDArray[np.float64], rank: NDArray[np.float64], mass: float) -> NDArray[np.intp]:
    """Indices, ascending, of the highest ranks up to the one with which their weights reach `mass` of all.

    Of equal ranks the first come first. A sort of the whole vocabulary costs several times the rest of sampling, so
    ever larger heads of the ranking are tried.
    """
    goal = mass * weights.sum()
    size = _FIRST_HEAD
    while size < len(weights):
        head = np.flatnonzero(rank >= kth_largest(rank, size))
        if weights[head].sum() >= goal:
            break
        size *= 8
    else:
        head = np.arange(len(weights))
    ranked = head[np.argsort(-rank[head], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(weights[ranked]), goal)) + 1  # the one that reaches the goal stays
    return np.sort(ranked[:needed])

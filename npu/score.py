"""How likely a model finds a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RequestFailed

__all__ = ["Score", "log_softmax_at"]


@dataclass(frozen=True)
class Score:
    """A text under the model, each token given all before it.

    Attributes:
        logprobs: float64 `[n - 1]`, natural logarithm of the probability of tokens 1..n-1.
        top1: int32 `[n - 1]`, the most likely token at each of those positions.
    """

    logprobs: NDArray[np.float64]
    top1: NDArray[np.int32]

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability; infinite beyond float64."""
        with np.errstate(over="ignore"):
            return float(np.exp(-self.logprobs.mean()))


def log_softmax_at(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """Log-probability of one target per row.

    Args:
        logits: float32 `[n, vocabulary]`.
        targets: int32 `[n]`, ids.

    Returns:
        float64 `[n]`, natural logarithms.

    Raises:
        RequestFailed: a row holds NaN or `+inf`, or nothing but `-inf`.
    """
    rows = logits.astype(np.float64)
    peak = rows.max(axis=1)
    broken = np.flatnonzero(~np.isfinite(peak))
    if broken.size:
        raise RequestFailed(
            f"the best logit in front of token {targets[broken[0]]} is {peak[broken[0]]}; the model's numbers are "
            "broken: check the model file, or compute with fp32 activations",
            token=int(targets[broken[0]]),
            logit=float(peak[broken[0]]),
        )
    total: NDArray[np.float64] = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    picked: NDArray[np.float64] = rows[np.arange(len(rows)), targets]
    return np.subtract(picked, total)

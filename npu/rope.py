"""Rotary position embedding: by how much each pair of elements turns from one position to the next.

Pair i of a head turns by `position * frequency[i]` (Su et al., arXiv 2104.09864). Models whose context was stretched
after training turn slower. By pairs, with f for the stretching factor:

- linear: all by `1 / f` (Chen et al., arXiv 2306.15595);
- yarn: those that turn often within the original context as before, slow ones by `1 / f`, a ramp between the two; and
  cos and sin grow by `0.1 * ln(f) + 1`, which makes attention sharper (Peng et al., arXiv 2309.00071);
- factors: each by one over a number of its own, which the model brings; Llama 3.1's are computed by `llama3_factors`.

Everything is float64; what the graphs get is rounded once, as cos and sin.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_HEAD_DIM", "Rope", "RopeScaling", "llama3_factors", "yarn_attention"]

MOST_HEAD_DIM = 4096
"""Elements of a head; models have up to 256. Bounds what a damaged file can ask for before its tensors are checked."""


class RopeScaling(str, Enum):
    """How a model's context was stretched, by the names of GGUF's `rope.scaling.type`."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True)
class Rope:
    """The rotation of a model's queries and keys.

    Attributes:
        theta: base of the frequencies: pair i of d / 2 turns by `theta ** (-2 * i / d)` per position.
        scaling: how the context was stretched.
        factor: by how much; 1 if it was not.
        original_context: positions before that; used by yarn.
        attention: factor of cos and sin.
        beta_fast: turns within the original context from which on yarn leaves a pair as it is.
        beta_slow: turns below which yarn slows a pair down in full.
        factors: divisors of the frequencies, one for each pair; empty if the model has none.
    """

    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_context: int = 0
    attention: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()

    def frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position of each pair: float64 `[head_dim / 2]`."""
        trained = _trained_frequencies(self.theta, head_dim)
        if self.factors:
            trained = trained / np.array(self.factors)
        if self.scaling is RopeScaling.NONE:
            return trained
        slowed = trained / self.factor
        if self.scaling is RopeScaling.LINEAR:
            return slowed
        slow = self._yarn_ramp(head_dim)
        return trained * (1 - slow) + slowed * slow

    def write_angles(
        self,
        positions: NDArray[np.int32],
        frequencies: NDArray[np.float64],
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
    ) -> None:
        """Write by what rows are turned, the factor of cos and sin included.

        Args:
            positions: int32 `[m]`.
            frequencies: what `frequencies` returned: they are the same in every step.
            cos: float32 `[at least m, head_dim / 2]`; its first m rows are overwritten.
            sin: likewise.
        """
        m, angles = len(positions), positions[:, None] * frequencies
        cos[:m] = np.cos(angles) * self.attention
        sin[:m] = np.sin(angles) * self.attention

    def identity(self, head_dim: int) -> str:
        """Names the rotation: 16 hex digits, equal only where every angle and the factor of cos and sin are."""
        digest = hashlib.sha256(self.frequencies(head_dim).tobytes())
        digest.update(np.float64(self.attention).tobytes())
        return digest.hexdigest()[:16]

    def _yarn_ramp(self, head_dim: int) -> NDArray[np.float64]:
        """How much of the slowing each pair takes: 0 to 1, float64 `[head_dim / 2]`."""

        def pair_that_turns(times: float) -> float:
            """The pair, as a real number, that makes `times` turns within the original context."""
            turns = math.log(self.original_context) - math.log(2 * math.pi) - math.log(times)
            return head_dim * turns / (2 * math.log(self.theta))

        # That the last pair is d / 2 - 1 and not d - 1 makes no difference to the authors' code, nor here.
        first = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(self.beta_slow)), head_dim - 1)
        width = last - first or 0.001  # as the authors' code avoids dividing by zero
        ramp: NDArray[np.float64] = np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
        return ramp


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of cos and sin for a context stretched by `factor`: `0.1 * weight * ln(factor) + 1`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3_factors(
    theta: float, head_dim: int, *, factor: float, low: float, high: float, original_context: int
) -> NDArray[np.float64]:
    """What Llama 3.1 divides its frequencies by, pair by pair.

    A pair that makes more than `high` turns within the original context keeps its frequency, one that makes less than
    `low` is slowed by `factor`, and in between the two are mixed (`apply_scaling` in Meta's `llama-models`).

    Args:
        theta: base of the frequencies.
        head_dim: elements of a head.
        factor: how far the context was stretched.
        low: turns (`low_freq_factor`).
        high: turns (`high_freq_factor`), more than `low`.
        original_context: positions before that.

    Returns:
        float64 `[head_dim / 2]`, from 1 to `factor`.
    """
    turns = original_context * _trained_frequencies(theta, head_dim) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return divisors


def _trained_frequencies(theta: float, head_dim: int) -> NDArray[np.float64]:
    frequencies: NDArray[np.float64] = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return frequencies

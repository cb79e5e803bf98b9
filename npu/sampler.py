"""From a row of logits to the next token.

The filters run in the order of Hugging Face transformers (`GenerationMixin._get_logits_processor`), each on what the
one before left over::

    repetition penalty -> temperature -> top-k -> top-p -> min-p -> draw

llama.cpp's default order differs: it applies the temperature last.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RequestFailed, UsageError

__all__ = ["Sampler", "SamplingParams"]

_SEEDS = 1 << 64
_FIRST_HEAD = 64  # candidates a nucleus is looked for in first; a tail this far down rarely matters


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. The defaults are greedy.

    Attributes:
        temperature: divides the logits; 0 is greedy: the most likely token, of equal ones the lowest id.
        top_k: keep the k most likely tokens, and those as likely as the k-th; 0 keeps all.
        top_p: keep the most likely tokens up to the one with which their probabilities reach this sum; 1 keeps all
            (Holtzman et al., "The Curious Case of Neural Text Degeneration").
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all (Nguyen et al.,
            "Turning Up the Heat: Min-p Sampling").
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the answer
            holds; 1 changes nothing (Keskar et al., "CTRL").
        seed: of the random numbers, `0 <= seed < 2**64`; None takes a fresh one.
        max_tokens: tokens of the answer, at most.
        stop: strings that end the answer and are not part of it.
        ignore_eos: go on behind a token that would end the answer.

    Raises:
        UsageError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        penalty, seed = self.repetition_penalty, self.seed
        rules = {
            "temperature": (_is_real(self.temperature) and 0 <= self.temperature < math.inf, "finite, 0 or more"),
            "top_k": (_is_integer(self.top_k) and self.top_k >= 0, "an integer, 0 (all tokens) or more"),
            "top_p": (_is_real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            "min_p": (_is_real(self.min_p) and 0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            "repetition_penalty": (
                _is_real(penalty) and 1e-3 <= penalty <= 1e3,
                "from 0.001 to 1000; 1 changes nothing",
            ),
            "seed": (seed is None or (_is_integer(seed) and 0 <= seed < _SEEDS), "from 0 to 2**64 - 1, or None"),
            "max_tokens": (_is_integer(self.max_tokens) and self.max_tokens >= 1, "an integer, 1 or more"),
            "stop": (
                isinstance(self.stop, tuple) and all(map(_is_text, self.stop)),
                "a tuple of non-empty strings without surrogates",
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                value = getattr(self, name)
                raise UsageError(f"{name} is {value!r}; it must be {wanted}", name=name, value=value)


class Sampler:
    """Chooses the tokens of one request.

    It has no state that advances. The random number for a token comes from a counter-based generator (Philox, Salmon
    et al., "Parallel Random Numbers: As Easy as 1, 2, 3"), keyed by the seed and counted by the token's position in
    the sequence. So a token depends on its logits, the seed and its position alone: not on what else was in the batch,
    and not on a preemption that computed the sequence anew. Requests that should differ need different seeds.

    Attributes:
        params: as given.
        seed: the seed in use; with it the same answer can be drawn again.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed

    def sample(self, logits: NDArray[np.float32], history: NDArray[np.int32]) -> int:
        """Choose the token that follows `history`.

        Args:
            logits: float32 `[vocab]`, only read; `-inf` rules a token out.
            history: int32 `[tokens]`, prompt and answer so far.

        Raises:
            RequestFailed: the logits hold NaN or `+inf`, or rule every token out.
            UsageError: `logits` is not one row, or `history` holds an id outside it.
        """
        tokens, probabilities = self.distribution(logits, history)
        return int(tokens[_draw(probabilities, self._uniform(len(history)))])

    def distribution(
        self, logits: NDArray[np.float32], history: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """What `sample` draws from: arguments and errors are the same.

        Returns:
            The ids of the tokens left by the filters, ascending, and their probabilities, float64, which sum to 1.
        """
        if logits.ndim != 1 or not logits.size:
            raise UsageError(f"logits of shape {logits.shape}; pass one row, [vocab]", shape=logits.shape)
        params = self.params
        scores = _penalised(logits, history, params.repetition_penalty)
        best = int(np.argmax(scores))  # of equal scores the first; NaN before any number
        peak = float(scores[best])
        if not math.isfinite(peak):
            raise RequestFailed(
                f"the best logit at position {len(history)} is {peak} (token {best}); the model's numbers are broken:"
                " check the model file, or compute with fp32 activations",
                position=len(history),
                token=best,
                logit=peak,
            )
        if params.temperature == 0:
            return np.array([best]), np.ones(1)
        tokens = _top_k(scores, params.top_k)
        weights = _weights(scores[tokens], peak, params.temperature)
        if params.top_p < 1:
            kept = _top_p(weights, params.top_p)
            tokens, weights = tokens[kept], weights[kept]
        if params.min_p > 0:
            likely = weights >= params.min_p
            tokens, weights = tokens[likely], weights[likely]
        return tokens, weights / weights.sum()

    def _uniform(self, position: int) -> float:
        """A number in [0, 1) with 53 random bits; raw bits, because only their stream is fixed over numpy versions."""
        return (np.random.Philox(key=self.seed, counter=position).random_raw() >> 11) * 2.0**-53


def _is_real(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _penalised(logits: NDArray[np.float32], history: NDArray[np.int32], penalty: float) -> NDArray[np.float32]:
    """The logits, those of tokens in `history` less likely by `penalty`; a copy, or the argument if nothing changes."""
    if penalty == 1 or not len(history):
        return logits
    low, high = int(history.min()), int(history.max())
    if low < 0 or high >= len(logits):
        wrong = low if low < 0 else high
        raise UsageError(
            f"history holds token {wrong}, outside the {len(logits)} logits", token=wrong, size=len(logits)
        )
    scores = logits.copy()
    seen = logits[history]  # a token that occurs twice is written twice, with the same value
    with np.errstate(over="ignore"):  # only broken logits overflow, and become inf
        scores[history] = np.where(seen > 0, seen / penalty, seen * penalty)
    return scores


def _top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Ids, ascending, of the k highest scores and of those equal to the k-th: no order among equals is needed."""
    if k == 0 or k >= len(scores):
        return np.arange(len(scores))
    return np.flatnonzero(scores >= _kth_largest(scores, k))


def _weights(scores: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float64]:
    """Probabilities times a constant, so that the weight of the best token, whose score is `peak`, is 1.

    The exponential is taken in float32, which has a vector form and loses less than the logits have lost before; sums
    over a vocabulary want float64.
    """
    # Outside the clip a float32 exponential is 0 or 1 anyway; inside it, neither 0 * inf nor 0 / 0 can come up.
    scale = np.float32(min(max(1 / temperature, 1e-30), 1e30))
    with np.errstate(over="ignore"):  # a tiny temperature may scale to -inf: weight 0, as it should
        weights: NDArray[np.float32] = np.exp((scores - np.float32(peak)) * scale)
    return weights.astype(np.float64)


def _top_p(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the largest weights up to the one with which their sum reaches `top_p` of all.

    Of equal weights the first come first. A sort of the whole vocabulary costs several times the rest of sampling, so
    ever larger heads of the distribution are tried.
    """
    goal = top_p * weights.sum()
    size = _FIRST_HEAD
    while size < len(weights):
        head = np.flatnonzero(weights >= _kth_largest(weights, size))
        if weights[head].sum() >= goal:
            break
        size *= 8
    else:
        head = np.arange(len(weights))
    ranked = head[np.argsort(-weights[head], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(weights[ranked]), goal)) + 1  # the one that reaches the goal stays
    return np.sort(ranked[:needed])


def _kth_largest(values: NDArray[np.float32] | NDArray[np.float64], k: int) -> float:
    return float(np.partition(values, len(values) - k)[len(values) - k])


def _draw(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The index that `uniform`, in [0, 1), falls on when the probabilities are laid end to end.

    They lie in order of token ids, not of size: logits that differ in their last digits, as those of two batch sizes
    do, then move the bounds by as little, while in order of size two near-equal tokens would change places.
    """
    sums = np.cumsum(probabilities)
    # At most 1 - 2**-53 times the sum is less than the sum: never an index beyond the end, nor one of probability 0.
    return int(np.searchsorted(sums, uniform * sums[-1], side="right"))

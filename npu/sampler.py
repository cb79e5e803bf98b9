"""From a row of logits to the next token.

The filters run in the order of Hugging Face transformers (`GenerationMixin._get_logits_processor`), each on what the
one before left over:

    logit bias -> repetition penalty -> frequency and presence penalty -> structure
        -> temperature -> top-k -> top-p -> min-p -> typical-p -> draw

transformers has no frequency and presence penalty; vLLM (`apply_penalties`) has them behind the repetition penalty. The
structure only rules tokens out, so it might as well come first. llama.cpp's order differs: its temperature is last.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RequestFailed, UsageError

from . import logit_filters as filters
from .sampling_params import SamplingParams

__all__ = ["Sampler", "SamplingParams"]


class Sampler:
    """Chooses the tokens of one request.

    It has no state that advances. The random number for a token comes from a counter-based generator (Philox, Salmon
    et al., "Parallel Random Numbers: As Easy as 1, 2, 3"), keyed by the seed and counted by the token's position in
    the sequence. So a token depends on its logits, the seed and its position alone: not on what else was in the batch,
    and not on a preemption that computed the sequence anew. Requests that should differ need different seeds.

    Attributes:
        params: as given.
        seed: the seed in use; with it the same answer can be drawn again.

    Example:
        >>> import numpy as np
        >>> from npu.sampler import Sampler, SamplingParams
        >>> logits, history = np.log(np.array([0.25, 0.25, 0.5], np.float32)), np.array([1], np.int32)
        >>> Sampler(SamplingParams()).sample(logits, history)
        2
        >>> tokens, probabilities = Sampler(SamplingParams(temperature=0.5)).distribution(logits, history)
        >>> probabilities.round(3).tolist()  # squared: 1 to 1 to 4
        [0.167, 0.167, 0.667]
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._biased = np.array(list(params.logit_bias), np.int32)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)

    def sample(
        self,
        logits: NDArray[np.float32],
        history: NDArray[np.int32],
        prompt_length: int = 0,
        allowed: NDArray[np.intp] | None = None,
    ) -> int:
        """Choose the token that follows `history`.

        Args:
            logits: float32 `[vocab]`, only read; `-inf` rules a token out.
            history: int32 `[tokens]`, prompt and answer so far.
            prompt_length: tokens of `history` that are the prompt.
            allowed: ids that a structure leaves to choose from, ascending, at least one; None: all.

        Raises:
            RequestFailed: the logits hold NaN or `+inf`, or rule every token out.
            UsageError: `logits` is not one row, or `history`, `allowed` or the bias hold an id outside it.
        """
        tokens, probabilities = self.distribution(logits, history, prompt_length, allowed)
        return int(tokens[_draw(probabilities, self._uniform(len(history)))])

    def distribution(
        self,
        logits: NDArray[np.float32],
        history: NDArray[np.int32],
        prompt_length: int = 0,
        allowed: NDArray[np.intp] | None = None,
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """What `sample` draws from: arguments and errors are the same.

        Returns:
            The ids of the tokens left by the filters, ascending, and their probabilities, float64, which sum to 1.
        """
        if logits.ndim != 1 or not logits.size:
            raise UsageError(f"logits of shape {logits.shape}; pass one row, [vocab]", shape=logits.shape)
        params = self.params
        scores = self._adjusted(logits, history, history[prompt_length:])
        best, peak = _best(scores, len(history))
        if allowed is not None:  # only now: it would hide broken numbers
            _refuse_outside(allowed, len(logits), "allowed")
            scores = filters.rule_out(scores, allowed)
            best, peak = _best(scores, len(history))
        if params.temperature == 0:
            return np.array([best]), np.ones(1)
        tokens = filters.top_k(scores, params.top_k)
        weights = filters.temper(scores[tokens], peak, params.temperature)
        if params.top_p < 1:
            kept = filters.top_p(weights, params.top_p)
            tokens, weights = tokens[kept], weights[kept]
        if params.min_p > 0:
            likely = weights >= params.min_p
            tokens, weights = tokens[likely], weights[likely]
        if params.typical_p < 1:
            kept = filters.typical_p(weights, params.typical_p)
            tokens, weights = tokens[kept], weights[kept]
        return tokens, weights / weights.sum()

    def _adjusted(
        self, logits: NDArray[np.float32], history: NDArray[np.int32], answer: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The logits with bias and penalties applied: a copy, or the argument if nothing changes."""
        params = self.params
        repetition = params.repetition_penalty != 1 and history.size > 0
        occurrences = (params.frequency_penalty != 0 or params.presence_penalty != 0) and answer.size > 0
        if not (self._biased.size or repetition or occurrences):
            return logits
        _refuse_outside(self._biased, len(logits), "logit_bias")
        _refuse_outside(history, len(logits), "history")
        scores = logits.copy()
        if self._biased.size:
            filters.bias(scores, self._biased, self._bias)
        if repetition:
            filters.penalise_repetition(scores, history, params.repetition_penalty)
        if occurrences:
            filters.penalise_occurrences(scores, answer, params.frequency_penalty, params.presence_penalty)
        return scores

    def _uniform(self, position: int) -> float:
        """A number in [0, 1) with 53 random bits; raw bits, because only their stream is fixed over numpy versions."""
        return (np.random.Philox(key=self.seed, counter=position).random_raw() >> 11) * 2.0**-53


def _best(scores: NDArray[np.float32], position: int) -> tuple[int, float]:
    """The most likely token, of equal ones the lowest id, and its score.

    Raises:
        RequestFailed: no score can be compared, or none is above `-inf`.
    """
    best = int(np.argmax(scores))  # NaN before any number
    peak = float(scores[best])
    if not math.isfinite(peak):
        raise RequestFailed(
            f"the best logit at position {position} is {peak} (token {best}); the model's numbers are broken:"
            " check the model file, or compute with fp32 activations",
            position=position,
            token=best,
            logit=peak,
        )
    return best, peak


def _refuse_outside(tokens: NDArray[np.int32] | NDArray[np.intp], size: int, name: str) -> None:
    if not tokens.size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise UsageError(f"{name} holds token {wrong}, outside the {size} logits", name=name, token=wrong, size=size)


def _draw(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The index that `uniform`, in [0, 1), falls on when the probabilities are laid end to end.

    They lie in order of token ids, not of size: logits that differ in their last digits, as those of two batch sizes
    do, then move the bounds by as little, while in order of size two near-equal tokens would change places.
    """
    sums = np.cumsum(probabilities)
    # At most 1 - 2**-53 times the sum is less than the sum: never an index beyond the end, nor one of probability 0.
    return int(np.searchsorted(sums, uniform * sums[-1], side="right"))

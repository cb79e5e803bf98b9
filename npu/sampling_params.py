"""What a request may ask of the sampler, and the ranges it is held to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hostcache.errors import UsageError

from .structured import Structure

__all__ = ["SamplingParams"]

_SEEDS = 1 << 64
_MOST_BIAS = 100  # OpenAI's bound: it bans a token or forces it, as logits go
_MOST_PENALTY = 2  # OpenAI's bound of the frequency and the presence penalty
_MOST_LOGPROBS = 20  # OpenAI's bound of `top_logprobs`


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
        typical_p: as `top_p`, but the tokens first whose surprise is nearest to the one to be expected; 1 keeps all
            (Meister et al., "Locally Typical Sampling").
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the answer
            holds; 1 changes nothing (Keskar et al., "CTRL").
        frequency_penalty: lowers a token's logit by this for each time the answer holds it, -2 to 2 (as OpenAI's).
        presence_penalty: lowers the logits of tokens that the answer holds by this, -2 to 2 (as OpenAI's).
        logit_bias: what is added to the logits of tokens, by id, -100 to 100 (as OpenAI's).
        structure: what the answer must look like; None leaves it free.
        logprobs: report how likely each sampled token was, and this many of the most likely, at most 20; None reports
            nothing. See `npu.logprobs.TokenLogprobs`.
        seed: of the random numbers, `0 <= seed < 2**64`; None takes a fresh one.
        max_tokens: tokens of the answer, at most.
        stop: strings that end the answer and are not part of it.
        ignore_eos: go on behind a token that would end the answer; not with a `structure`, which says itself where an
            answer may end.

    Raises:
        UsageError: a value is outside its range.

    Example:
        >>> from npu.sampling_params import SamplingParams
        >>> SamplingParams().temperature  # greedy
        0.0
        >>> SamplingParams(temperature=0.7, top_p=0)
        Traceback (most recent call last):
        ...
        hostcache.errors.UsageError: top_p is 0; it must be above 0 and at most 1 (all tokens)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    structure: Structure | None = None
    logprobs: int | None = None
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        seed, logprobs = self.seed, self.logprobs
        rules = {
            "temperature": (_is_real(self.temperature) and 0 <= self.temperature < math.inf, "finite, 0 or more"),
            "top_k": (_is_integer(self.top_k) and self.top_k >= 0, "an integer, 0 (all tokens) or more"),
            "top_p": (_is_real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            "min_p": (_is_real(self.min_p) and 0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            "typical_p": (_is_real(self.typical_p) and 0 < self.typical_p <= 1, "above 0 and at most 1 (all tokens)"),
            "repetition_penalty": (
                _is_real(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3,
                "from 0.001 to 1000; 1 changes nothing",
            ),
            "frequency_penalty": (_is_within(self.frequency_penalty, _MOST_PENALTY), "from -2 to 2"),
            "presence_penalty": (_is_within(self.presence_penalty, _MOST_PENALTY), "from -2 to 2"),
            "logit_bias": (_is_bias(self.logit_bias), "a mapping of token ids to numbers from -100 to 100"),
            "structure": (self.structure is None or isinstance(self.structure, Structure), "a Structure"),
            "logprobs": (
                logprobs is None or (_is_integer(logprobs) and 0 <= logprobs <= _MOST_LOGPROBS),
                f"from 0 to {_MOST_LOGPROBS}",
            ),
            "seed": (seed is None or (_is_integer(seed) and 0 <= seed < _SEEDS), "from 0 to 2**64 - 1"),
            "max_tokens": (_is_integer(self.max_tokens) and self.max_tokens >= 1, "an integer, 1 or more"),
            "stop": (
                isinstance(self.stop, tuple) and all(map(_is_text, self.stop)),
                "a tuple of non-empty strings without surrogates",
            ),
            "ignore_eos": (
                isinstance(self.ignore_eos, bool) and not (self.ignore_eos and self.structure),
                "True or False, and False with a structure, which ends the answer itself",
            ),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                value = getattr(self, name)
                raise UsageError(f"{name} is {value!r}; it must be {wanted}", name=name, value=value)


def _is_real(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _is_within(value: float, bound: float) -> bool:
    return _is_real(value) and -bound <= value <= bound


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_integer(token) and 0 <= token < 1 << 31 and _is_within(amount, _MOST_BIAS)
        for token, amount in value.items()
    )

"""Bias, penalties, locally typical sampling and a structure's mask, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import RequestFailed, UsageError
from npu.logit_filters import kth_largest
from npu.sampler import Sampler, SamplingParams
from tests.npu.test_sampler import HALVES, NOTHING, chances, ids, row


def greedy(params: SamplingParams, logits: NDArray[np.float32], history: NDArray[np.int32], prompt_length: int) -> int:
    return Sampler(params).sample(logits, history, prompt_length)


def test_a_bias_is_added_to_the_logit() -> None:
    # Three times as likely: log(3) more.
    biased = chances(SamplingParams(temperature=1, logit_bias={1: math.log(3)}), np.log(row(0.5, 0.5)))
    assert biased == pytest.approx({0: 0.25, 1: 0.75})
    assert chances(SamplingParams(temperature=1, logit_bias={0: -100.0}), HALVES)[0] < 1e-40


def test_a_bias_comes_before_the_temperature() -> None:
    # log(3) more, then everything twice: nine times as likely.
    params = SamplingParams(temperature=0.5, logit_bias={1: math.log(3)})
    assert chances(params, np.log(row(0.5, 0.5))) == pytest.approx({0: 0.1, 1: 0.9})


def test_a_bias_comes_before_the_repetition_penalty() -> None:
    # (1 + 1) / 2 = 1.0 is above 0.9; 1 / 2 + 1 = 1.5 would be above 1.2, too.
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 1.0})
    assert Sampler(params).sample(row(1.0, 0.9), ids(0)) == 0
    assert Sampler(params).sample(row(1.0, 1.2), ids(0)) == 1


def test_frequency_counts_and_presence_does_not() -> None:
    logits = row(5.0, 3.2)
    answer = ids(0, 0)
    assert greedy(SamplingParams(frequency_penalty=0.8), logits, answer, 0) == 0  # 5 - 1.6 = 3.4
    assert greedy(SamplingParams(frequency_penalty=1.0), logits, answer, 0) == 1  # 5 - 2 = 3
    assert greedy(SamplingParams(presence_penalty=1.7), logits, answer, 0) == 0  # 5 - 1.7 = 3.3, once
    assert greedy(SamplingParams(presence_penalty=1.9), logits, answer, 0) == 1
    assert greedy(SamplingParams(frequency_penalty=0.6, presence_penalty=0.7), logits, answer, 0) == 1  # 5 - 1.9


def test_negative_penalties_reward() -> None:
    assert greedy(SamplingParams(frequency_penalty=-0.6), row(1.0, 2.0), ids(0, 0), 0) == 0


def test_the_prompt_is_not_counted() -> None:
    params = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
    history = ids(0, 0, 0, 1)
    assert greedy(params, row(5.0, 4.0), history, 4) == 0
    assert greedy(params, row(5.0, 4.0), history, 3) == 0  # 1 has paid 4
    assert greedy(params, row(5.0, 4.0), history, 0) == 1  # 5 - 8 against 4 - 4


def test_repetition_comes_before_occurrences() -> None:
    # 4 / 2 - 1 = 1.0; (4 - 1) / 2 = 1.5 would win.
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert Sampler(params).sample(row(4.0, 1.2), ids(0)) == 1


def test_typical_keeps_what_is_about_as_surprising_as_expected() -> None:
    # H(0.5, 0.25, 0.125, 0.125) = 1.75 bits; the surprises are 1, 2, 3 and 3: the second token is nearest (0.25), then
    # the first (0.75), then the others (1.25).
    assert chances(SamplingParams(temperature=1, typical_p=0.2), HALVES) == {1: 1.0}
    assert chances(SamplingParams(temperature=1, typical_p=0.3), HALVES) == pytest.approx({0: 2 / 3, 1: 1 / 3})
    # Of the two that are equally near, the lower id is kept.
    assert set(chances(SamplingParams(temperature=1, typical_p=0.8), HALVES)) == {0, 1, 2}
    assert set(chances(SamplingParams(temperature=1, typical_p=0.9), HALVES)) == {0, 1, 2, 3}


def test_typical_may_drop_the_most_likely_token() -> None:
    # 0.4 and 60 times 0.01: H = 0.3665 + 2.7631 = 3.13; 0.92 is 2.2 away from it, 4.6 only 1.5.
    logits = np.log(row(0.4, *[0.01] * 60))
    assert set(chances(SamplingParams(temperature=1, typical_p=0.495), logits)) == set(range(1, 51))
    # A set wider than the first look at the ranking.
    flat = np.zeros(5000, np.float32)
    assert len(chances(SamplingParams(temperature=1, typical_p=0.4999), flat)) == 2500


def test_typical_lives_with_impossible_tokens() -> None:
    logits = row(-math.inf, 0, 0, -math.inf)
    assert chances(SamplingParams(temperature=1, typical_p=0.9), logits) == {1: 0.5, 2: 0.5}


def test_typical_counts_what_min_p_left() -> None:
    # Without the last two: H(2/3, 1/3) = 0.918 bits; surprises 0.585 and 1.585: the first is nearer.
    assert set(chances(SamplingParams(temperature=1, min_p=0.3, typical_p=0.5), HALVES)) == {0}


def test_only_what_is_allowed_can_be_drawn() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0))
    tokens, probabilities = sampler.distribution(HALVES, NOTHING, allowed=np.array([1, 3]))
    assert probabilities[np.isin(tokens, [1, 3], invert=True)].sum() == 0
    assert dict(zip(tokens, probabilities, strict=True))[1] == pytest.approx(2 / 3)
    assert Sampler(SamplingParams()).sample(HALVES, NOTHING, allowed=np.array([2, 3])) == 2


def test_no_bias_draws_what_is_not_allowed() -> None:
    params = SamplingParams(logit_bias={0: 100.0})
    assert Sampler(params).sample(HALVES, NOTHING, allowed=np.array([3])) == 3


def test_a_mask_hides_no_broken_numbers() -> None:
    with pytest.raises(RequestFailed, match="nan"):
        Sampler(SamplingParams()).sample(row(math.nan, 1.0), NOTHING, allowed=np.array([1]))
    with pytest.raises(RequestFailed, match="-inf"):
        Sampler(SamplingParams()).sample(row(1.0, -math.inf), NOTHING, allowed=np.array([1]))


def test_ids_outside_the_logits_are_refused_by_value() -> None:
    with pytest.raises(UsageError, match="logit_bias holds token 7"):
        Sampler(SamplingParams(logit_bias={7: 1.0})).sample(row(1, 2), NOTHING)
    with pytest.raises(UsageError, match="allowed holds token 2"):
        Sampler(SamplingParams()).sample(row(1, 2), NOTHING, allowed=np.array([1, 2]))
    with pytest.raises(UsageError, match="history holds token -1"):
        Sampler(SamplingParams(presence_penalty=1.0)).sample(row(1, 2), ids(-1))


def test_the_callers_logits_are_left_alone() -> None:
    logits = row(3, 2, 1)
    logits.flags.writeable = False
    params = SamplingParams(temperature=1, logit_bias={0: 1.0}, frequency_penalty=1.0, typical_p=0.5, seed=0)
    assert Sampler(params).sample(logits, ids(0, 1), allowed=np.array([0, 2])) in {0, 2}
    assert logits.tolist() == [3, 2, 1]


def test_the_bias_is_taken_when_the_sampler_is_made() -> None:
    bias = {0: 5.0}
    sampler = Sampler(SamplingParams(logit_bias=bias))
    bias[1] = 50.0
    assert sampler.sample(row(0, 1), NOTHING) == 0


def test_parameters_are_equal_and_hashable_by_value() -> None:
    one, other = (SamplingParams(logit_bias={1: 2.0}, top_k=3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != SamplingParams(logit_bias={1: 3.0}, top_k=3)


@pytest.mark.parametrize(("k", "value"), [(1, 9.0), (2, 7.0), (3, 7.0), (5, -1.0)])
def test_the_kth_largest(k: int, value: float) -> None:
    assert kth_largest(row(7, -1, 9, 3, 7), k) == value

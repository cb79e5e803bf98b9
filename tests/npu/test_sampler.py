"""The sampler: against a plain float64 reference, exact probabilities, and the promises about seeds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import RequestFailed, UsageError
from npu.sampler import Sampler, SamplingParams

INF = math.inf
NOTHING = np.empty(0, np.int32)


def row(*logits: float) -> NDArray[np.float32]:
    return np.array(logits, np.float32)


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def of_length(tokens: int) -> NDArray[np.int32]:
    return np.zeros(tokens, np.int32)


def chances(
    params: SamplingParams, logits: NDArray[np.float32], history: NDArray[np.int32] = NOTHING
) -> dict[int, float]:
    tokens, probabilities = Sampler(params).distribution(logits, history)
    assert (np.diff(tokens) > 0).all()
    return dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))


# Greedy


def test_the_default_is_the_most_likely_token_and_of_equal_ones_the_lowest_id() -> None:
    sampler = Sampler(SamplingParams())
    assert sampler.sample(row(0, 3, -1, 3, 2), NOTHING) == 1
    assert sampler.sample(row(-INF, -INF, -5), NOTHING) == 2


def test_penalty_comes_before_greedy() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    # 3.0 / 2 = 1.5 falls behind 2.0; -1.0 * 2 = -2.0 falls behind -1.5. A token seen twice pays once.
    assert sampler.sample(row(3.0, 2.0), ids(0, 0)) == 1
    assert sampler.sample(row(-1.0, -1.5), ids(0)) == 1
    assert sampler.sample(row(3.0, 1.4), ids(0, 0)) == 0


# Each filter, worked out by hand. Logits are logarithms, so that probabilities are the numbers in the rows.

HALVES = np.log(row(0.5, 0.25, 0.125, 0.125))


def test_temperature_sharpens_and_flattens() -> None:
    # Squared: 4 : 1; square root: 2 ** 0.5 : 1.
    assert chances(SamplingParams(temperature=0.5), HALVES[:2]) == pytest.approx({0: 0.8, 1: 0.2})
    root = 2**0.5
    assert chances(SamplingParams(temperature=2.0), HALVES[:2]) == pytest.approx(
        {0: root / (root + 1), 1: 1 / (root + 1)}
    )


def test_top_k_keeps_k_and_those_equal_to_the_last() -> None:
    assert chances(SamplingParams(temperature=1, top_k=2), HALVES) == pytest.approx({0: 2 / 3, 1: 1 / 3})
    assert set(chances(SamplingParams(temperature=1, top_k=3), HALVES)) == {0, 1, 2, 3}
    assert set(chances(SamplingParams(temperature=1, top_k=9), HALVES)) == {0, 1, 2, 3}


def test_top_p_keeps_the_token_that_reaches_the_sum() -> None:
    assert set(chances(SamplingParams(temperature=1, top_p=0.4), HALVES)) == {0}
    assert set(chances(SamplingParams(temperature=1, top_p=0.6), HALVES)) == {0, 1}
    # Of equal tokens the lower id is kept.
    assert chances(SamplingParams(temperature=1, top_p=0.8), HALVES) == pytest.approx({0: 4 / 7, 1: 2 / 7, 2: 1 / 7})
    assert set(chances(SamplingParams(temperature=1, top_p=1e-300), HALVES)) == {0}


def test_top_p_counts_what_top_k_left() -> None:
    # Of 2/3 and 1/3 the first alone reaches 0.6; of all four it would not.
    assert set(chances(SamplingParams(temperature=1, top_k=2, top_p=0.6), HALVES)) == {0}


def test_top_p_counts_after_the_temperature() -> None:
    # At temperature 0.5 the weights are 16 : 4 : 1 : 1, so the first reaches 0.7.
    assert set(chances(SamplingParams(temperature=0.5, top_p=0.7), HALVES)) == {0}


def test_top_p_finds_a_nucleus_wider_than_its_first_look() -> None:
    # 600 equal tokens behind a likely one: 0.5 + n * 0.5 / 600 reaches 0.95 with n = 540.
    logits = np.log(np.array([0.5, *[0.5 / 600] * 600]))
    kept = chances(SamplingParams(temperature=1, top_p=0.9499), logits.astype(np.float32))
    assert set(kept) == set(range(541))
    # And the widest: 0.999 of a flat row of 5000.
    assert len(chances(SamplingParams(temperature=1, top_p=0.9989), np.zeros(5000, np.float32))) == 4995


def test_a_wide_nucleus_of_unequal_tokens_ends_where_the_sum_is_reached() -> None:
    # Shares 1000 to 1999 make 1,499,500; the 557 largest, 1443 and up, make 958,597: the first sum above 957,900.
    shares = np.random.default_rng(5).permutation(np.arange(1000, 2000))
    kept = chances(SamplingParams(temperature=1, top_p=957_900 / 1_499_500), np.log(shares).astype(np.float32))
    assert set(kept) == set(np.flatnonzero(shares >= 1443).tolist())


def test_of_many_equal_tokens_a_nucleus_keeps_the_lowest_ids() -> None:
    # 500 tokens of 2/1500 and, between them, 500 of 1/1500: the former and 150 of the latter make 1150/1500.
    logits = np.log(np.tile(row(1, 2), 500))
    kept = chances(SamplingParams(temperature=1, top_p=1149.5 / 1500), logits)
    assert set(kept) == {*range(1, 1000, 2), *range(0, 300, 2)}


def test_min_p_is_a_fraction_of_the_best() -> None:
    assert set(chances(SamplingParams(temperature=1, min_p=0.49), HALVES)) == {0, 1}
    assert set(chances(SamplingParams(temperature=1, min_p=0.51), HALVES)) == {0}
    assert set(chances(SamplingParams(temperature=1, min_p=1.0), HALVES)) == {0}


def test_extreme_temperatures() -> None:
    logits = row(1.0, 1.5, 1.5, -INF)
    for cold in (5e-324, 1e-40, 1e-9):
        assert chances(SamplingParams(temperature=cold), logits) == {0: 0.0, 1: 0.5, 2: 0.5, 3: 0.0}
    for hot in (1e9, 1e40, 1.7e308):
        assert chances(SamplingParams(temperature=hot), logits) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 0.0})
    huge = row(3e38, -3e38)
    assert chances(SamplingParams(temperature=1.0), huge) == {0: 1.0, 1: 0.0}


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    sampler = Sampler(SamplingParams(temperature=1e6, seed=3))
    drawn = {sampler.sample(row(-INF, 0, -INF, 0, -INF), of_length(n)) for n in range(200)}
    assert drawn == {1, 3}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.5, 3), (1 - 2.0**-53, 3)])
def test_neither_end_of_the_random_numbers_draws_a_token_that_is_ruled_out(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
) -> None:
    monkeypatch.setattr(Sampler, "_uniform", lambda *_: uniform)
    sampler = Sampler(SamplingParams(temperature=1.0))
    # A half each: the upper bound of one token's range is the lower bound of the next one's.
    assert sampler.sample(row(-INF, 0, -INF, 0, -INF), NOTHING) == token


# Against a reference: sorts everything, sums in float64, follows the definitions word by word.


def reference(
    params: SamplingParams, logits: NDArray[np.float32], prompt: list[int], answer: list[int], allowed: list[int]
) -> dict[int, float]:
    scores = {token: float(logit) for token, logit in enumerate(logits)}
    for token, amount in params.logit_bias.items():
        scores[token] += amount
    for token in {*prompt, *answer}:
        score = scores[token]
        scores[token] = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    for token in answer:
        scores[token] -= params.frequency_penalty
    for token in set(answer):
        scores[token] -= params.presence_penalty
    for token in scores:
        if token not in allowed:
            scores[token] = -INF
    ranking = sorted(scores, key=lambda token: (-scores[token], token))
    if params.top_k:
        last = scores[ranking[min(params.top_k, len(ranking)) - 1]]
        ranking = [token for token in ranking if scores[token] >= last]
    peak = scores[ranking[0]]
    weights = {token: math.exp((scores[token] - peak) / params.temperature) for token in ranking}
    if params.top_p < 1:
        total, above, kept = math.fsum(weights.values()), 0.0, []
        for token in ranking:
            # A sum this close to the goal may fall on either side of it.
            assume(abs(above / total - params.top_p) > 1e-5)
            if above / total < params.top_p:
                kept.append(token)
            above += weights[token]
        ranking = kept
    if params.min_p > 0:
        assume(all(abs(weights[token] - params.min_p) > 1e-5 for token in ranking[1:]))
        ranking = [token for token in ranking if weights[token] >= params.min_p]
    if params.typical_p < 1:
        ranking = locally_typical({token: weights[token] for token in ranking}, params.typical_p)
    total = math.fsum(weights[token] for token in ranking)
    return {token: weights[token] / total for token in sorted(ranking)}


def locally_typical(weights: dict[int, float], mass: float) -> list[int]:
    """Meister et al.: the smallest set of that mass, by how far a token's information content is from the entropy."""
    total = math.fsum(weights.values())
    surprise = {token: math.log(total / weight) if weight else INF for token, weight in weights.items()}
    entropy = math.fsum(weight / total * surprise[token] for token, weight in weights.items() if weight)
    distance = {token: abs(surprise[token] - entropy) for token in weights}
    ranking = sorted(weights, key=lambda token: (distance[token], token))
    for nearer, farther in pairwise(ranking):
        # Two unequal tokens this close, one on either side of the entropy, may change places.
        assume(weights[nearer] == weights[farther] or distance[farther] - distance[nearer] > 1e-4)
    kept, above = [], 0.0
    for token in ranking:
        assume(abs(above / total - mass) > 1e-5)
        if above / total < mass:
            kept.append(token)
        above += weights[token]
    return kept


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 5.0),
    top_k=st.integers(0, 12),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
    typical_p=st.just(1.0) | st.floats(0.01, 0.999),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0),
    frequency_penalty=st.just(0.0) | st.floats(-2.0, 2.0),
    presence_penalty=st.just(0.0) | st.floats(-2.0, 2.0),
    logit_bias=st.dictionaries(st.integers(0, 20), st.integers(-40, 40).map(lambda quarters: quarters / 4), max_size=3),
)
# Multiples of 1/8: many ties, which is where filters go wrong.
LOGITS = st.lists(st.integers(-80, 80).map(lambda eighths: eighths / 8) | st.just(-INF), min_size=1, max_size=100)


@given(PARAMS, LOGITS, st.data())
def test_all_filters_together_follow_the_reference(
    params: SamplingParams, values: list[float], data: st.DataObject
) -> None:
    assume(max(values) > -INF and all(token < len(values) for token in params.logit_bias))
    logits = np.array(values, np.float32)
    tokens = st.integers(0, len(values) - 1)
    prompt, answer = (data.draw(st.lists(tokens, max_size=5)) for _ in range(2))
    every = list(range(len(values)))
    allowed = data.draw(st.just(every) | st.sets(tokens, min_size=1).map(sorted))
    assume(any(values[token] > -INF for token in allowed))
    drawn_from, probabilities = Sampler(params).distribution(
        logits, ids(*prompt, *answer), len(prompt), None if allowed == every else np.array(allowed)
    )
    assert dict(zip(drawn_from.tolist(), probabilities.tolist(), strict=True)) == pytest.approx(
        reference(params, logits, prompt, answer, allowed), rel=1e-4, abs=1e-9
    )


# Draws. 0.3, 0.25, 0.2, 0.15, 0.07, 0.03: chi-square with 5 degrees of freedom exceeds 30 once in 70,000 times.

UNEQUAL = np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03])
DRAWS = 10_000


def chi_square(drawn: NDArray[np.intp], expected: NDArray[np.float64]) -> float:
    counts = np.bincount(drawn, minlength=expected.size)
    return float((((counts - expected) ** 2) / expected).sum())


def test_positions_of_one_request_are_drawn_with_the_exact_probabilities_and_independently() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=20260101))
    logits = np.log(UNEQUAL).astype(np.float32)
    drawn = np.array([sampler.sample(logits, of_length(position)) for position in range(DRAWS)])
    assert chi_square(drawn, UNEQUAL * DRAWS) < 30
    # Pairs of neighbours: 35 degrees of freedom, above 80 once in 45,000 times.
    pairs = np.outer(UNEQUAL, UNEQUAL).ravel() * (DRAWS // 2)
    assert chi_square(drawn[0::2] * UNEQUAL.size + drawn[1::2], pairs) < 80


def test_seeds_that_follow_each_other_draw_independently() -> None:
    logits = np.log(UNEQUAL).astype(np.float32)
    drawn = np.array(
        [Sampler(SamplingParams(temperature=1.0, seed=seed)).sample(logits, of_length(7)) for seed in range(DRAWS)]
    )
    assert chi_square(drawn, UNEQUAL * DRAWS) < 30


# Seeds


def test_a_token_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 50)).astype(np.float32)
    params = SamplingParams(temperature=1.5, seed=99)
    straight = Sampler(params)
    answer = [straight.sample(logits[position], of_length(position)) for position in range(40)]
    # Preempted after 25 tokens and started anew; positions asked for twice, and in another order.
    again = Sampler(params)
    order = [*range(25), *range(10, 40), 3, 39]
    assert [again.sample(logits[position], of_length(position)) for position in order] == [answer[p] for p in order]
    # A row of a batch is not contiguous with its neighbours' values, nor with itself.
    batch = np.stack([logits, logits + 1], axis=2)
    assert [Sampler(params).sample(batch[p, :, 0], of_length(p)) for p in range(40)] == answer


def test_seeds_differ_and_a_fresh_one_can_be_used_again() -> None:
    logits = np.zeros(1000, np.float32)

    def answer(sampler: Sampler) -> list[int]:
        return [sampler.sample(logits, of_length(position)) for position in range(20)]

    fresh = Sampler(SamplingParams(temperature=1.0))
    other = Sampler(SamplingParams(temperature=1.0))
    assert fresh.seed != other.seed
    assert answer(fresh) != answer(other)
    assert answer(Sampler(SamplingParams(temperature=1.0, seed=fresh.seed))) == answer(fresh)
    assert answer(Sampler(SamplingParams(temperature=1.0, seed=2**64 - 1))) != answer(fresh)


def test_the_callers_logits_are_left_alone() -> None:
    logits = row(3, 2, 1)
    logits.flags.writeable = False
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.5, seed=0)
    assert Sampler(params).sample(logits, ids(0, 2)) in {0, 1}
    assert logits.tolist() == [3, 2, 1]


# What is refused


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "names"),
    [
        (row(1, math.nan, 5), r"nan \(token 1\)"),
        (row(1, 2, INF), r"inf \(token 2\)"),
        (row(-INF, -INF), r"-inf \(token 0\)"),
    ],
)
def test_broken_logits_fail_the_request_by_name(temperature: float, logits: NDArray[np.float32], names: str) -> None:
    with pytest.raises(RequestFailed, match=f"position 4 is {names}") as failure:
        Sampler(SamplingParams(temperature=temperature, seed=0)).sample(logits, of_length(4))
    assert failure.value.values["position"] == 4


@pytest.mark.parametrize("shape", [(0,), (1, 5), ()])
def test_anything_but_one_row_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="one row"):
        Sampler(SamplingParams()).sample(np.zeros(shape, np.float32), NOTHING)


@pytest.mark.parametrize("token", [-1, 3])
def test_history_outside_the_logits_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token}"):
        Sampler(SamplingParams(repetition_penalty=1.1)).sample(row(1, 2, 3), ids(0, token))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, INF, math.nan, "1", True)),
        *(("top_k", value) for value in (-1, 1.5, True)),
        *(("top_p", value) for value in (0, -0.5, 1.01, math.nan, None)),
        *(("min_p", value) for value in (-0.01, 1.01, math.nan)),
        *(("repetition_penalty", value) for value in (0, -1.0, INF, math.nan)),
        *(("typical_p", value) for value in (0, 1.01, math.nan, True)),
        *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1, math.nan, "1")),
        *(("logit_bias", value) for value in ({1: 101}, {1: math.nan}, {-1: 0}, {1.0: 0}, {True: 0}, {2**31: 0}, [1])),
        ("structure", "[a-z]+"),
        *(("logprobs", value) for value in (-1, 21, 1.0, True)),
        *(("seed", value) for value in (-1, 2**64, 0.5)),
        *(("max_tokens", value) for value in (0, -5, 2.0)),
        *(("stop", value) for value in ("###", ["###"], ("",), (3,))),
        ("ignore_eos", 1),
    ],
)
def test_values_outside_their_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.values["name"] == name

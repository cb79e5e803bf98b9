"""Log-probabilities of sampled tokens, against their definition in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import RequestFailed
from npu.logprobs import token_logprobs

LOGITS = st.lists(st.integers(-80, 80).map(lambda eighths: eighths / 8), min_size=1, max_size=60)


def test_a_row_worked_out_by_hand() -> None:
    entry = token_logprobs(np.log(np.array([0.125, 0.5, 0.125, 0.25], np.float32)), 2, 3)
    assert entry.token == 2
    assert entry.logprob == pytest.approx(math.log(0.125))
    assert [token for token, _ in entry.top] == [1, 3, 0]  # of 0 and 2, equally likely, the lower id
    assert [logprob for _, logprob in entry.top] == pytest.approx([math.log(0.5), math.log(0.25), math.log(0.125)])


def test_none_asked_for_and_more_than_there_are() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    assert token_logprobs(logits, 0, 0).top == ()
    assert [token for token, _ in token_logprobs(logits, 0, 20).top] == [1, 0]


def test_extreme_logits_neither_overflow_nor_vanish() -> None:
    entry = token_logprobs(np.array([3e38, -3e38, -math.inf], np.float32), 1, 3)
    assert entry.logprob == pytest.approx(-6e38, rel=1e-6)
    assert [logprob for _, logprob in entry.top] == pytest.approx([0.0, -6e38, -math.inf], rel=1e-6)


@given(LOGITS, st.integers(0, 20), st.data())
def test_it_follows_the_definition(values: list[float], count: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    entry = token_logprobs(np.array(values, np.float32), token, count)
    total = math.log(math.fsum(math.exp(value) for value in values))
    assert entry.logprob == pytest.approx(values[token] - total, abs=1e-9)
    ranking = sorted(range(len(values)), key=lambda one: (-values[one], one))[:count]
    assert [one for one, _ in entry.top] == ranking
    assert [logprob for _, logprob in entry.top] == pytest.approx([values[one] - total for one in ranking], abs=1e-9)


def test_broken_logits_are_refused() -> None:
    with pytest.raises(RequestFailed, match="nan"):
        token_logprobs(np.array([math.nan, 1.0], np.float32), 1, 1)

"""The question that every launch of a dense segment carries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import DeviceError
from npu.dense_probe import QUESTIONS, Probe

Floats = NDArray[np.float32]
ANSWERS: list[list[Floats]] = [
    [np.array([number, 0], np.float32), np.array([300, 300 + number / 4], np.float32)] for number in range(QUESTIONS)
]
"""Two outputs. Neighbours differ by 1 and, beside a large bias, by 1/4."""


def learnt() -> Probe:
    probe = Probe([8])
    probe.learn(lambda number: ANSWERS[number])
    return probe


def test_questions_are_signs_and_all_different() -> None:
    probe = Probe([24, 9])
    rows = [np.concatenate(question) for question in probe.questions]
    assert [[part.shape for part in question] for question in probe.questions] == [[(24,), (9,)]] * QUESTIONS
    assert {part.dtype for question in probe.questions for part in question} == {np.dtype(np.float16)}
    assert {abs(float(element)) for row in rows for element in row} == {1}
    assert len({row.tobytes() for row in rows}) == QUESTIONS


def test_an_answer_may_be_off_by_a_quarter_of_what_tells_it_from_the_next() -> None:
    probe = learnt()
    for off, passes in ((0.24, True), (0.26, False)):
        for output, distance in ((0, 1.0), (1, 0.25)):
            answer = [array.copy() for array in ANSWERS[2]]
            answer[output][0] += off * distance
            if passes:
                probe.check(2, 3, answer)
            else:
                with pytest.raises(DeviceError, match="1 of 2 outputs do not answer this launch") as refused:
                    probe.check(2, 3, answer)
                assert refused.value.values == {"stale": [output]}


@pytest.mark.parametrize("value", [np.nan, np.inf, 0])
def test_what_no_answer_looks_like(value: float) -> None:
    with pytest.raises(DeviceError, match="2 of 2 outputs"):
        learnt().check(3, 3, [np.full(2, value, np.float32)] * 2)


@pytest.mark.parametrize("answer", [[1, 2], [np.nan, 0], [np.inf, 0]])
def test_a_segment_that_answers_alike_does_not_compute(answer: list[float]) -> None:
    """In one of its outputs, which is enough."""
    with pytest.raises(DeviceError, match="answers two questions alike"), np.errstate(invalid="ignore"):
        Probe([8]).learn(lambda number: [ANSWERS[number][0], np.array(answer, np.float32)])


def test_answers_are_kept_though_the_runner_reuses_its_buffer() -> None:
    buffer = np.zeros(1, np.float32)

    def ask(number: int) -> list[Floats]:
        buffer[0] = number
        return [buffer]

    probe = Probe([8])
    probe.learn(ask)
    probe.check(1, 3, [np.ones(1, np.float32)])


@given(
    launches=st.lists(st.tuples(st.sampled_from([3, 15, 63]), st.sampled_from(["run", "stale", "late"])), max_size=60),
    shared=st.booleans(),
)
def test_an_old_result_is_never_taken_for_a_new_one(launches: list[tuple[int, str]], shared: bool) -> None:
    """A library with one buffer of results, or with one for each number of rows.

    A launch is run, or is not; or it is given up, and its result comes after all, before the next launch is answered.
    In the end it is run again.
    """
    probe = learnt()
    kept: dict[int, int] = {}  # the question that a buffer's result answers
    late: dict[int, int] = {}  # likewise, for the launch that follows
    for rows, deed in [*launches, (3, "run")]:
        buffer = 0 if shared else rows
        number = probe.next(rows)
        found, late = {**kept, **late}.get(buffer), {}
        if deed == "run":
            kept[buffer] = number
            probe.check(number, rows, ANSWERS[number])
            continue
        if found is not None:
            with pytest.raises(DeviceError, match="do not answer this launch"):
                probe.check(number, rows, ANSWERS[found])
        if deed == "late":
            late[buffer] = number

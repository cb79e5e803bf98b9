"""How a dense segment's result is proven fresh: the last row of every launch is a question whose answer is known.

A run that reports success and did nothing hands back an older result, which looks valid. Attention proves itself by a
nonce (`npu.canary`); through a segment's products nothing passes as it is. But each row is computed by itself, so a
row's answer does not depend on those beside it. When a segment is loaded it is asked some questions, rows of +1 and -1.
From then on every launch carries one of them: neither the one that was answered last, nor the one that was answered
last by a launch of as many rows. So what an earlier run left behind answers another question, whether the library keeps
one buffer for all numbers of rows or one for each.

That costs one row of a launch and the comparison of one row: 4 rows take 1 % more of the compiler's cycles than one, 16
take 5 % (a layer of SmolLM2-135M, rknn-toolkit2 2.5.0). It cannot see what is wrong in other rows alone, nor a segment
that computes the same wrong thing whenever it is asked. A result that comes after its launch was given up is surely
found out by the next launch, which asks something else, and by later ones unless that question has come round again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError

from .decoder import Floats

__all__ = ["PROBE_ROWS", "QUESTIONS", "Probe"]

PROBE_ROWS = 1
"""Rows at the end of a launch that hold no token."""

QUESTIONS = 4
"""Two may have been answered last, one was asked in vain since, and one is left."""

_MARGIN = 0.25
"""An answer may be off by this part of its distance to the nearest other one: kernels for other numbers of rows add up
in another order."""


class Probe:
    """The questions to one segment, and its answers.

    Args:
        channels: of each input of the segment.

    Attributes:
        questions: fp16 `[channels]` for each input, each element +1 or -1, by number.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        self.questions = [_question(number, channels) for number in range(QUESTIONS)]
        self._answers: list[list[Floats]] = []
        self._reach = np.zeros((0, 0))  # by question and output: how far from its answer one may be
        self._asked = self._answered = 0
        self._answered_by: dict[int, int] = {}  # by number of rows

    def learn(self, ask: Callable[[int], Sequence[Floats]]) -> None:
        """Ask every question, and remember the answers.

        Args:
            ask: runs the segment with a question by its number; float32 `[channels]` of each output.

        Raises:
            DeviceError: an output has the same answer to two questions, or one that is not finite.
        """
        self._answers = [[output.copy() for output in ask(number)] for number in range(QUESTIONS)]
        self._reach = np.array(
            [
                [_MARGIN * _nearest(number, output) for output in zip(*self._answers, strict=True)]
                for number in range(QUESTIONS)
            ]
        )
        if not ((self._reach > 0) & (self._reach < np.inf)).all():
            raise DeviceError(
                "it answers two questions alike, or by no number: its results are old ones, or it does not compute",
                reach=self._reach.tolist(),
            )

    def next(self, rows: int) -> int:
        """Number of the question to ask by a launch of `rows` rows; another one whenever it is asked in vain."""
        answered = (self._answered, self._answered_by.get(rows))
        following = ((self._asked + step) % QUESTIONS for step in range(1, QUESTIONS))
        self._asked = next(number for number in following if number not in answered)
        return self._asked

    def check(self, number: int, rows: int, answer: Sequence[Floats]) -> None:
        """Prove that a launch was computed.

        Args:
            number: of the question it was asked.
            rows: of the launch.
            answer: float32 `[channels]` of each output.

        Raises:
            DeviceError: it is not the answer to this question.
        """
        pairs = zip(answer, self._answers[number], self._reach[number], strict=True)
        stale = [place for place, (got, want, reach) in enumerate(pairs) if not np.linalg.norm(got - want) <= reach]
        if stale:
            raise DeviceError(
                f"the run reported success, but {len(stale)} of {len(answer)} outputs do not answer this launch: their "
                "result is an old one, or the core dropped out",
                stale=stale,
            )
        self._answered = self._answered_by[rows] = number


def _question(number: int, channels: Sequence[int]) -> list[NDArray[np.float16]]:
    signs = hashlib.shake_128(bytes([number])).digest(-(-sum(channels) // 8))
    row = np.unpackbits(np.frombuffer(signs, np.uint8))[: sum(channels)].astype(np.float16) * 2 - 1
    return np.split(row.astype(np.float16), np.cumsum(channels)[:-1])


def _nearest(number: int, answers: Sequence[Floats]) -> float:
    """Distance from one question's answer to the nearest other."""
    distances = [np.linalg.norm(other - answers[number]) for place, other in enumerate(answers) if place != number]
    return float(np.min(distances))  # NaN if any is

"""What a step costs, learnt while steps run."""

from __future__ import annotations

import math

from .attention_work import AttendedTokens, AttentionWork

__all__ = ["StepCost"]

FORGETTING = 0.98
"""Weight of a step against the one after it: the last fifty count most, so that a chip that slows down is noticed."""

DOUBT = 1e-3
"""How much the cost of a step as such is shrunk. As long as all steps look alike, rows and attention then answer for
all of it, which overrates what a further row costs: the error that leaves running sequences in peace."""

ATTENDED_UNIT = 256.0
"""Units of attention that are counted as one, so that the three coefficients are of like size."""


class StepCost:
    """`seconds = step + row * rows + token * attended`, by least squares that forget, none of the three negative.

    Args:
        work: how much attention a step is, the unit of `attended`; None: as many tokens as its rows look at.

    Attributes:
        work: as given.

    Example:
        >>> from hostcache.step_cost import StepCost
        >>> cost = StepCost()
        >>> for rows, attended in ((1, 100), (8, 900), (24, 4000), (72, 9000)) * 3:
        ...     cost.observe(rows, attended, 0.005 + rows * 1e-3 + attended * 1e-6)
        >>> round(cost.seconds(40, 5000), 3)
        0.05
        >>> cost.rows_within(0.1, start=0, most=1000), cost.rows_within(0.1, start=40_000, most=1000)
        (95, 2)
    """

    def __init__(self, work: AttentionWork | None = None) -> None:
        self.work = work or AttendedTokens()
        self._moments = [[0.0] * 3 for _ in range(3)]  # of (1, rows, attended)
        self._targets = [0.0] * 3  # of those with the seconds
        self._solution: tuple[float, float, float] | None = None

    @property
    def known(self) -> bool:
        """Whether any step was observed."""
        return self._moments[0][0] > 0

    def observe(self, rows: int, attended: float, seconds: float) -> None:
        """A step of so many rows and so much attention took `seconds`."""
        if not (rows > 0 and 0 < seconds < math.inf):  # a clock that was set back
            return
        features = (1.0, float(rows), attended / ATTENDED_UNIT)
        # Relative errors count, not absolute ones: a decode step is to be known as well as a long prompt's.
        weight = 1 / seconds**2
        for i, left in enumerate(features):
            moments = self._moments[i]
            for j, right in enumerate(features):
                moments[j] = moments[j] * FORGETTING + left * right * weight
            self._targets[i] = self._targets[i] * FORGETTING + left * seconds * weight
        self._solution = None

    def seconds(self, rows: int, attended: float) -> float:
        """What such a step will take; 0 while nothing is known."""
        step, row, token = self._coefficients()
        return step + row * rows + token * attended / ATTENDED_UNIT

    def chunk_seconds(self, start: int, count: int, most: int | None = None) -> float:
        """What `count` further rows of one sequence cost in steps that run anyway.

        Args:
            start: position of the first.
            count: rows.
            most: most tokens that a row looks at; None: all up to itself.
        """
        _, row, token = self._coefficients()
        return row * count + token * self.work.of_chunk(start, count, most) / ATTENDED_UNIT

    def rows_within(self, seconds: float, start: int, most: int) -> int:
        """Most rows of one sequence, up to `most`, from position `start` on, whose cost stays within `seconds`."""
        _, row, token = self._coefficients()
        return self.work.rows_within(seconds, row, token / ATTENDED_UNIT, start, most) if seconds > 0 else 0

    def _coefficients(self) -> tuple[float, float, float]:
        if self._solution is None:
            self._solution = self._solve()
        return self._solution

    def _solve(self) -> tuple[float, float, float]:
        """Least squares over those features whose coefficient does not come out negative."""
        used = [0, 1, 2]
        while used and self.known:
            matrix = [[self._moments[i][j] * (1 + DOUBT * (i == j == 0)) for j in used] for i in used]
            values = _solve_linear(matrix, [self._targets[i] for i in used])
            lowest = min(range(len(used)), key=values.__getitem__)
            if values[lowest] >= 0:
                found = dict(zip(used, values, strict=True))
                return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
            del used[lowest]
        return 0.0, 0.0, 0.0


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a symmetric positive semidefinite system; what is not determined is 0."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    solution = [0.0] * size
    scales = [matrix[i][i] for i in range(size)]
    for pivot in range(size):
        if rows[pivot][pivot] <= 1e-12 * scales[pivot]:
            rows[pivot][pivot] = 0.0
            continue
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [low - factor * high for low, high in zip(rows[below], rows[pivot], strict=True)]
    for pivot in reversed(range(size)):
        if rows[pivot][pivot]:
            known = sum(rows[pivot][j] * solution[j] for j in range(pivot + 1, size))
            solution[pivot] = (rows[pivot][size] - known) / rows[pivot][pivot]
    return solution

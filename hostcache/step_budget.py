"""How many rows of prompts a step may compute beside those that decode."""

from __future__ import annotations

from functools import cached_property

from .scheduler_config import SchedulerConfig
from .step_cost import StepCost

__all__ = ["TILE_ROWS", "StepBudget"]

TILE_ROWS = 16
"""Rows that a prompt always gets, so that it makes progress; the smallest tile in which attention takes prompts."""

HEADROOM = 0.9
"""Share of the time that is given out. The rest is for what the cost model, a straight line, does not see: how a tile's
share of a step changes with its size, and how times vary on a machine that others use, too."""


class StepBudget:
    """Gives out one step's rows.

    Args:
        config: limits.
        cost: what rows cost.
        decodes: rows that decode.
        attended: how much those attend, see `StepCost.work`.
    """

    def __init__(self, config: SchedulerConfig, cost: StepCost, decodes: int, attended: float) -> None:
        self._cost = cost
        self._chunk = config.prefill_chunk
        self._rows = config.max_rows - decodes
        self._step_seconds = config.step_seconds if decodes else None  # None: nobody waits for this step's end
        self._decodes, self._attended = decodes, attended
        self._first = True
        self._spent = 0.0  # seconds, on prompts

    @property
    def exhausted(self) -> bool:
        """Whether no prompt gets a row any more."""
        return self._rows < 1 or (not self._first and self._left is not None and self._left <= 0)

    def grant(self, start: int, remaining: int) -> int:
        """Rows for a sequence that has `remaining` to compute from position `start` on; they are not spent yet."""
        most = min(self._rows, self._chunk, remaining)
        left = self._left
        if left is None:
            return most
        within = self._cost.rows_within(left, start, most) if self._cost.known else 0
        if within < most:
            within -= within % TILE_ROWS  # what fills no tile would cost one
        return max(within, min(most, TILE_ROWS) if self._first else 0)

    def spare(self, start: int, wanted: int) -> int:
        """Rows for what need not make progress in this step: as `grant`, but never beyond the budget."""
        most = max(0, min(self._rows, wanted))
        left = self._left
        if left is None:
            return most
        return self._cost.rows_within(left, start, most) if self._cost.known else 0

    def spend(self, start: int, count: int) -> None:
        """The sequence computes `count` rows from `start` on."""
        self._first = False
        self._rows -= count
        if self._step_seconds is not None:
            self._spent += self._cost.chunk_seconds(start, count)

    @property
    def _left(self) -> float | None:
        """Seconds that prompts may still take; None: as long as they like."""
        seconds = self._for_prompts
        return None if seconds is None else seconds - self._spent

    @cached_property
    def _for_prompts(self) -> float | None:
        """The same in the beginning. Most steps have no prompt, and are spared the fit."""
        if self._step_seconds is None:
            return None
        # While nothing is known, the smallest tile is what may be asked of those that decode.
        if not self._cost.known:
            return 0.0
        return self._step_seconds * HEADROOM - self._cost.seconds(self._decodes, self._attended)

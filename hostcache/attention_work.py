"""How much attention is computed in a step, in the unit in which its cost is learnt: a row that looks at a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .step import StepPlan

__all__ = ["AttendedTokens", "AttentionWork", "PaddedTiles"]


class AttentionWork(Protocol):
    """Counts what a runtime computes; what is not computed in vain grows with it in proportion."""

    def of_chunk(self, before: int, count: int, most: int | None = None) -> float:
        """Of `count` rows of one sequence.

        Args:
            before: tokens in front of the first.
            count: rows.
            most: most tokens that a row looks at; None: all up to itself.
        """

    def of_decodes(self, context_lens: NDArray[np.int32]) -> float:
        """Of one row of each sequence, which look at so many tokens, itself included: int32 `[n]`."""

    def of_step(self, plan: StepPlan) -> float:
        """Of a whole step."""

    def rows_within(self, seconds: float, row: float, token: float, before: int, most: int) -> int:
        """Most rows of one sequence, up to `most`, that stay within a time.

        Args:
            seconds: the time, above 0.
            row: seconds of a row, but for its attention.
            token: seconds of a unit of attention.
            before: tokens in front of the first row.
            most: rows that are wanted.
        """


class AttendedTokens:
    """Of a runtime that computes what is asked of it and no more."""

    def of_chunk(self, before: int, count: int, most: int | None = None) -> float:
        """See `AttentionWork`."""
        growing = count if most is None else min(max(most - before, 0), count)
        return before * growing + growing * (growing + 1) / 2 + (most or 0) * (count - growing)

    def of_decodes(self, context_lens: NDArray[np.int32]) -> float:
        """See `AttentionWork`."""
        return int(context_lens.sum())

    def of_step(self, plan: StepPlan) -> float:
        """See `AttentionWork`."""
        return plan.attended

    def rows_within(self, seconds: float, row: float, token: float, before: int, most: int) -> int:
        """See `AttentionWork`."""
        # token / 2 * n**2 + (row + token * (before + 1/2)) * n = seconds, in the form that also takes token = 0
        linear = row + token * (before + 0.5)
        root = linear + math.sqrt(linear**2 + 2 * token * seconds)
        return min(most, int(2 * seconds / root * (1 + 1e-9))) if root else most


@dataclass(frozen=True)
class PaddedTiles:
    """Of a device that takes rows in tiles, over contexts that are padded to buckets.

    A chunk of 17 rows costs what one of 64 does, and over 1100 tokens what it does over 2000.

    Attributes:
        tiles: rows, ascending; a chunk is cut into the largest ones, and what is left takes the smallest that holds it.
        buckets: tokens, ascending. What is longer than the last one is attended elsewhere, and not padded.
        reserved: tokens of each bucket that hold no context.
        staging_rows: rows that take as long to compute as the context takes to be staged for them.
    """

    tiles: tuple[int, ...]
    buckets: tuple[int, ...]
    reserved: int
    staging_rows: int

    def of_chunk(self, before: int, count: int, most: int | None = None) -> float:
        """See `AttentionWork`."""
        work = 0
        for first in range(0, count, self.tiles[-1]):
            rows = min(self.tiles[-1], count - first)
            context = before + first + rows if most is None else min(before + first, most) + rows
            work += (_fit(rows, self.tiles) + self.staging_rows) * self._padded(context)
        return work

    def of_decodes(self, context_lens: NDArray[np.int32]) -> float:
        """See `AttentionWork`."""
        return (self.tiles[0] + self.staging_rows) * sum(map(self._padded, context_lens.tolist()))

    def of_step(self, plan: StepPlan) -> float:
        """See `AttentionWork`."""
        decodes = len(plan.decodes)
        contexts = zip(plan.prefills, plan.context_lens[decodes:].tolist(), strict=True)
        chunks = sum(self.of_chunk(context - chunk.count, chunk.count) for chunk, context in contexts)
        return self.of_decodes(plan.context_lens[:decodes]) + chunks

    def rows_within(self, seconds: float, row: float, token: float, before: int, most: int) -> int:
        """See `AttentionWork`."""
        least, fitting, too_many = self.tiles[0], 0, most + 1
        while too_many - fitting > least:  # more rows never cost less
            rows = (fitting + too_many) // 2
            if row * rows + token * self.of_chunk(before, rows) <= seconds:
                fitting = rows
            else:
                too_many = rows
        return fitting

    def _padded(self, context: int) -> int:
        return _fit(context + self.reserved, self.buckets)


def _fit(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of these that holds a size; itself, if it is larger than all."""
    return next((larger for larger in sizes if larger >= size), size)

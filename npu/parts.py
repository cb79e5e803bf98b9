"""A step's rows in parts that share a launch each, and what of its context a part needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .attention import AttentionBatch

__all__ = ["Part", "parts_of"]


class Part(NamedTuple):
    """Consecutive rows of one sequence that share a launch.

    Where the sequence has a window, whole blocks behind its sinks may be seen by none of these rows. They are left
    out, and positions count what remains; a row sees what it saw, for what lies between it and its window's end moves
    along with it.
    """

    sequence: int
    first: int  # row of the step's q
    rows: int
    before: int  # tokens the sequence held before the step
    length: int  # tokens the sequence holds up to and including the last of these rows
    hidden: tuple[int, int]  # tokens from..to, `to` excluded, that none of the rows sees: less than two blocks
    kept: int  # blocks in front of those that are left out
    left_out: int  # blocks

    def table(self, tables: NDArray[np.int32]) -> NDArray[np.int32]:
        """The sequence's row of `tables` without the blocks that are left out; as wide, with entries of no meaning."""
        table = tables[self.sequence]
        behind = self.kept + self.left_out
        return np.concatenate([table[: self.kept], table[behind:], table[self.kept : behind]])


def parts_of(batch: AttentionBatch, sequence: int, most_rows: int, block_tokens: int) -> Iterator[Part]:
    """A sequence's rows, as many at a time as share a launch.

    Args:
        batch: the step.
        sequence: which of its sequences.
        most_rows: rows of a part.
        block_tokens: tokens of a block.
    """
    start, end = (int(row) for row in batch.query_starts[sequence : sequence + 2])
    before = int(batch.context_lens[sequence]) - (end - start)  # tokens in front of the step's own
    window = 0 if batch.windows is None else int(batch.windows[sequence])
    sinks = 0 if batch.sinks is None else int(batch.sinks[sequence])
    kept = -(-sinks // block_tokens)
    for first in range(start, end, most_rows):
        last = min(first + most_rows, end)
        oldest = before + first - start - window + 1 if window else 0  # token of the first row's window
        left_out = max(0, oldest // block_tokens - kept)
        gone = left_out * block_tokens
        yield Part(
            sequence,
            first,
            last - first,
            max(before - gone, min(before, kept * block_tokens)),
            before + last - start - gone,
            (sinks, oldest - gone) if oldest > sinks else (0, 0),
            kept,
            left_out,
        )

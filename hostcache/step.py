"""One step's work, as flat arrays that every layer uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .request import Request

__all__ = ["Chunk", "StepPlan"]


@dataclass(frozen=True)
class Chunk:
    """The part of a request that one step computes.

    Attributes:
        request: whose tokens.
        start: first position computed.
        count: tokens computed.
        samples: whether the last of them is the request's newest token, so that its logits give the next one.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """What to compute in one step. Every array is the plan's own: nothing in it changes later.

    Attributes:
        chunks: one per sequence, in batch order.
        tokens: int32 `[rows]`.
        positions: int32 `[rows]`.
        slots: int64 `[rows]`, where each row's K and V go.
        logit_rows: int64 `[samples]`, rows whose logits are wanted, in the order of the sampling chunks.
        query_starts: int32 `[sequences + 1]`, first row of each sequence.
        context_lens: int32 `[sequences]`, tokens each sequence holds after this step.
        tables: int32 `[sequences, width]`, block ids; unused entries are 0.
    """

    chunks: list[Chunk]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    tables: NDArray[np.int32]

    @property
    def rows(self) -> int:
        """Tokens computed."""
        return len(self.tokens)

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token from this step, in the order of `logit_rows`."""
        return [chunk.request for chunk in self.chunks if chunk.samples]

    @classmethod
    def build(cls, chunks: list[Chunk]) -> StepPlan:
        """Flatten chunks whose slots have been taken."""
        counts = [chunk.count for chunk in chunks]
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        rows = int(query_starts[-1])
        tokens = np.empty(rows, dtype=np.int32)
        positions = np.empty(rows, dtype=np.int32)
        slots = np.empty(rows, dtype=np.int64)
        width = max((len(chunk.request.table.blocks) for chunk in chunks), default=1)
        tables = np.zeros((len(chunks), width), dtype=np.int32)
        row = 0
        for index, (request, start, count) in enumerate((c.request, c.start, c.count) for c in chunks):
            ids = request.table.ids
            tables[index, : len(ids)] = ids
            if count == 1:
                tokens[row] = request.buffer[start]
                positions[row] = start
                slots[row] = request.table.slot(start)
            else:
                tokens[row : row + count] = request.buffer[start : start + count]
                positions[row : row + count] = np.arange(start, start + count)
                slots[row : row + count] = request.table.slots(start, start + count)
            row += count
        return cls(
            chunks=chunks,
            tokens=tokens,
            positions=positions,
            slots=slots,
            logit_rows=np.array([q - 1 for q, c in zip(query_starts[1:], chunks, strict=True) if c.samples], np.int64),
            query_starts=query_starts,
            context_lens=np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int32),
            tables=tables,
        )

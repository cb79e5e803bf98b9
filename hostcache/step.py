"""One step's work, as flat arrays that every layer uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .codec import FP16
from .decode_batch import DecodeRows
from .request import Request

__all__ = ["Chunk", "StepPlan"]


@dataclass(frozen=True)
class Chunk:
    """The part of a request that one step computes.

    Attributes:
        request: whose tokens.
        start: first position computed.
        count: tokens computed.
        samples: whether the request's newest token is among them, so that its logits give the next one.
        drafted: how many of them stand behind the newest token: proposed, and each to be compared with what the logits
            in front of it give.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafted: int = 0


@dataclass(eq=False, slots=True)  # frozen would set each field by a call, in every step
class StepPlan:
    """What to compute in one step. Every array is the plan's own: nothing in it changes later.

    Attributes:
        decodes: requests that compute their newest token and sample, one row each: the first rows.
        prefills: what is computed of prompts, behind them; and last, of decoding requests with tokens proposed.
        tokens: int32 `[rows]`.
        positions: int32 `[rows]`, by which q and K are rotated: where the row stands in its sequence, less what the
            sequence was turned back.
        slots: int64 `[rows]`, where each row's K and V go.
        logit_rows: int64 `[samples]`, rows whose logits are wanted, in the order of `sampling`.
        query_starts: int32 `[sequences + 1]`, first row of each sequence.
        context_lens: int32 `[sequences]`, tokens each sequence's table holds after this step.
        tables: int32 `[sequences, width]`, block ids; unused entries are 0.
        windowing: int32 `[3, sequences]`: `windows`, `sinks`, and by how many positions a sequence was turned back.
            None: no sequence has a window.
        codecs: uint8 `[sequences]`, `Codec.code` of each sequence's blocks. None: all are fp16.
    """

    decodes: list[Request]
    prefills: Sequence[Chunk]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    tables: NDArray[np.int32]
    windowing: NDArray[np.int32] | None = None
    codecs: NDArray[np.uint8] | None = None

    @property
    def rows(self) -> int:
        """Tokens computed."""
        return len(self.tokens)

    @property
    def windows(self) -> NDArray[np.int32] | None:
        """Newest tokens that each sequence's rows see, int32 `[sequences]`; 0: all. None: no sequence has a window."""
        return None if self.windowing is None else self.windowing[0]

    @property
    def sinks(self) -> NDArray[np.int32] | None:
        """First tokens that they see besides, int32 `[sequences]`."""
        return None if self.windowing is None else self.windowing[1]

    @property
    def row_codecs(self) -> NDArray[np.uint8] | None:
        """The codec of each row, uint8 `[rows]`; None: all are fp16."""
        return None if self.codecs is None else np.repeat(self.codecs, np.diff(self.query_starts))

    @property
    def attended(self) -> int:
        """Tokens that all rows look at, each row at those up to itself, or at a window of them."""
        if self.windowing is None:
            return int(np.add.reduce(self.positions, dtype=np.int64)) + self.rows
        ends, counts = self.context_lens.astype(np.int64), np.diff(self.query_starts)
        windows, sinks, _ = self.windowing.astype(np.int64)
        # A sequence's rows look at `ends`, one less, and so on; of those, `beyond` rows would see more than they may.
        excess = ends - np.where(windows > 0, windows + sinks, ends)
        beyond = np.clip(excess, 0, counts)
        return int((counts * ends - counts * (counts - 1) // 2 - beyond * excess + beyond * (beyond - 1) // 2).sum())

    @property
    def chunks(self) -> list[Chunk]:
        """One per sequence, in batch order."""
        starts = self.positions[: len(self.decodes)]  # prompts' rows are behind
        if self.windowing is not None:
            starts = starts + self.windowing[2, : len(self.decodes)]
        decodes = zip(self.decodes, starts.tolist(), strict=True)
        return [Chunk(request, position, 1, True) for request, position in decodes] + list(self.prefills)

    @property
    def requests(self) -> list[Request]:
        """Whose tokens are computed, in batch order."""
        return self.decodes + [chunk.request for chunk in self.prefills]

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token from this step, in the order of `logit_rows`; once for each row of a draft."""
        return self.decodes + [c.request for c in self.prefills if c.samples for _ in range(1 + c.drafted)]

    @property
    def drafts(self) -> list[Chunk]:
        """Those of `prefills` that hold proposed tokens: the last ones."""
        return [chunk for chunk in self.prefills if chunk.drafted]

    @classmethod
    def build(cls, prefills: Sequence[Chunk], decodes: DecodeRows | None = None) -> StepPlan:
        """Flatten what is to be computed; its slots have been taken."""
        if decodes is None or not decodes.requests:
            return cls([], prefills, *_arrays_of(prefills))
        count = len(decodes.requests)
        starts, logits = np.arange(count + 1, dtype=np.int32), np.arange(count)
        own = decodes.tokens, decodes.positions, decodes.slots, logits, starts, decodes.context_lens
        if not prefills:
            return cls(decodes.requests, prefills, *own, decodes.tables, decodes.windowing, decodes.codecs)
        tokens, positions, slots, logit_rows, query_starts, context_lens, tables, windowing, codecs = _arrays_of(
            prefills
        )
        if codecs is not None or decodes.codecs is not None:
            codecs = np.concatenate([_codes_or_fp16(decodes.codecs, count), _codes_or_fp16(codecs, len(prefills))])
        if windowing is not None or decodes.windowing is not None:
            parts = (decodes.windowing, count), (windowing, len(prefills))
            windowing = np.concatenate([_or_none(part, sequences) for part, sequences in parts], axis=1)
        return cls(
            decodes.requests,
            prefills,
            np.concatenate((decodes.tokens, tokens)),
            np.concatenate((decodes.positions, positions)),
            np.concatenate((decodes.slots, slots)),
            np.concatenate((logits, count + logit_rows)),
            np.concatenate((starts, count + query_starts[1:])),
            np.concatenate((decodes.context_lens, context_lens)),
            _one_below_the_other(decodes.tables, tables),
            windowing,
            codecs,
        )


_Arrays = tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    "NDArray[np.int32] | None",
    "NDArray[np.uint8] | None",
]
"""As in `StepPlan`, from `tokens` to `codecs`."""


def _arrays_of(chunks: Sequence[Chunk]) -> _Arrays:
    """The arrays of a plan of these chunks alone."""
    query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum([chunk.count for chunk in chunks], out=query_starts[1:])
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
        tokens[row : row + count] = request.buffer[start : start + count]
        turned = request.table.gap.turned
        positions[row : row + count] = np.arange(start - turned, start - turned + count)
        slots[row : row + count] = request.table.slots(start, start + count)
        row += count
    ends = zip(query_starts[1:].tolist(), chunks, strict=True)
    logit_rows = np.array([row for q, c in ends if c.samples for row in range(q - 1 - c.drafted, q)], np.int64)
    context_lens = np.array([c.start + c.count - c.request.table.gap.tokens for c in chunks], dtype=np.int32)
    windowing = None
    if any(chunk.request.layout is not None for chunk in chunks):
        windowing = np.array([_windowing_of(chunk.request) for chunk in chunks], dtype=np.int32).T.copy()
    codecs = None
    if any(chunk.request.codec is not FP16 for chunk in chunks):
        codecs = np.array([chunk.request.codec.code for chunk in chunks], dtype=np.uint8)
    return tokens, positions, slots, logit_rows, query_starts, context_lens, tables, windowing, codecs


def _windowing_of(request: Request) -> tuple[int, int, int]:
    """One column of `StepPlan.windowing`."""
    layout = request.layout
    return (0, 0, 0) if layout is None else (layout.shown, layout.window.sinks, request.table.gap.turned)


def _or_none(windowing: NDArray[np.int32] | None, sequences: int) -> NDArray[np.int32]:
    """As given, or that none of the sequences has a window."""
    return np.zeros((3, sequences), dtype=np.int32) if windowing is None else windowing


def _codes_or_fp16(codecs: NDArray[np.uint8] | None, sequences: int) -> NDArray[np.uint8]:
    """As given, or that all of the sequences are fp16."""
    return np.full(sequences, FP16.code, dtype=np.uint8) if codecs is None else codecs


def _one_below_the_other(upper: NDArray[np.int32], lower: NDArray[np.int32]) -> NDArray[np.int32]:
    """Two sets of tables as one, as wide as the wider."""
    tables = np.zeros((len(upper) + len(lower), max(upper.shape[1], lower.shape[1])), dtype=np.int32)
    tables[: len(upper), : upper.shape[1]] = upper
    tables[len(upper) :, : lower.shape[1]] = lower
    return tables

"""What every attention runtime promises, whether it runs on the CPU, an emulated NPU or a board."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hostcache.attention_work import AttentionWork

__all__ = ["AttentionBatch", "AttentionRuntime"]


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one step. The same batch serves every layer of that step.

    Attributes:
        query_starts: int32 `[n + 1]`; rows `query_starts[i] : query_starts[i + 1]` of `q` belong to sequence i.
        context_lens: int32 `[n]`; tokens sequence i holds, this step's own included. Row r of its m rows is at
            position `context_lens[i] - m + r` and sees positions up to and including its own.
        tables: int32 `[n, width]`, C-contiguous; block ids, the first `ceil(context_len / block_tokens)` valid.
        windows: int32 `[n]`; newest tokens that a row of sequence i sees, its own included; 0: all. None: no sequence
            has a window.
        sinks: int32 `[n]`; first tokens that every row of sequence i sees besides. The row at position p sees
            `[0, sinks)` and `[p - window + 1, p]`. None: none.
        codecs: uint8 `[n]`; number (`Codec.code`) of the codec that the blocks of sequence i are stored in. None: fp16.
    """

    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    tables: NDArray[np.int32]
    windows: NDArray[np.int32] | None = None
    sinks: NDArray[np.int32] | None = None
    codecs: NDArray[np.uint8] | None = None

    @property
    def sequences(self) -> int:
        """Sequences in the batch."""
        return len(self.context_lens)

    @property
    def rows(self) -> int:
        """Query rows (tokens) of all sequences together."""
        return int(self.query_starts[-1])

    def narrowed(self, window: int) -> AttentionBatch:
        """The batch as a layer sees it that has a window of its own: the narrower of the two counts.

        Args:
            window: the layer's, in tokens; 0: it has none.

        Returns:
            With windows and sinks of all sequences; or without windows, if none is shorter than its sequence.
        """
        if not window and self.windows is None:
            return self
        none = np.zeros_like(self.context_lens)
        own, sinks = (none if counts is None else counts for counts in (self.windows, self.sinks))
        narrower = np.where((own == 0) | (own > window), np.int32(window), own) if window else own
        if not ((narrower > 0) & (narrower < self.context_lens)).any():
            return replace(self, windows=None, sinks=None)
        return replace(self, windows=narrower, sinks=sinks)


class AttentionRuntime(Protocol):
    """Causal grouped-query attention over the paged cache.

    Per step: `begin_step(batch)`, then `attend` once per layer after that layer's K and V were written to the
    cache, then `end_step()`. Between `begin_step` and `end_step` the caller keeps every block of the batch alive.
    """

    name: str
    numerics: str
    """Names everything of the runtime that can change a bit of its results, and so of later layers' K and V."""
    work: AttentionWork
    """How much it computes for what it is asked."""

    def begin_step(self, batch: AttentionBatch) -> None:
        """Plan one step; the plan serves every layer.

        Raises:
            UsageError: a block id is outside the pool, a table is shorter than its context, or this process was forked
                off after the runtime had been opened.
        """

    def attend(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend `q` over the cached K and V of `layer`.

        Args:
            layer: layer index.
            q: float32 `[rows, heads, head_dim]`, rotated, not scaled.
            out: float32 `[rows, heads, head_dim]`, overwritten.
        """

    def end_step(self) -> None:
        """The step is over: nothing of the batch is read any more. Safe to call after a failed `attend`."""

    def close(self) -> None:
        """Give back threads, buffers and device handles. Further use raises."""

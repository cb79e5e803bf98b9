"""What of a step the host attends itself, beside a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attention import AttentionBatch, AttentionRuntime

__all__ = ["HostShare", "Share"]


@dataclass(frozen=True, eq=False)
class Share:
    """Some sequences of a step, or some of their rows.

    Attributes:
        batch: as the host's runtime takes it.
        rows: int64 `[batch.rows]`; where its rows lie in the step's q and out.
    """

    batch: AttentionBatch
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, step: AttentionBatch, sequences: NDArray[np.int64]) -> Share:
        """All rows of some of a step's sequences."""
        counts = np.diff(step.query_starts)[sequences]
        starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        shift = np.repeat(step.query_starts[sequences] - starts[:-1], counts)
        batch = AttentionBatch(starts, step.context_lens[sequences], step.tables[sequences])
        return cls(batch, (np.arange(starts[-1]) + shift).astype(np.int64))

    @classmethod
    def joined(cls, shares: Sequence[Share]) -> Share:
        """Several shares of one step, at least one, as one."""
        rows = [0]
        for share in shares:
            rows.extend(np.diff(share.batch.query_starts).tolist())
        batch = AttentionBatch(
            np.cumsum(rows, dtype=np.int32),
            np.concatenate([share.batch.context_lens for share in shares]),
            np.concatenate([share.batch.tables for share in shares]),
        )
        return cls(batch, np.concatenate([share.rows for share in shares]))


class HostShare:
    """Lets one runtime serve its own share of a step, and now and then another share aside.

    Args:
        runtime: of the host; owned from now on.
    """

    def __init__(self, runtime: AttentionRuntime) -> None:
        self._runtime = runtime
        self._share: Share | None = None

    def begin(self, share: Share) -> None:
        """Begin the step with what is the host's from the start; perhaps nothing."""
        if share.batch.rows:
            self._runtime.begin_step(share.batch)
            self._share = share

    def attend(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend the host's share of `q`, and put it into `out`; both are the whole step's."""
        if self._share is not None:
            self._attend(self._share, layer, q, out)

    def attend_aside(self, share: Share, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend another share in the middle of the step, for this layer only."""
        if self._share is not None:
            self._runtime.end_step()
        try:
            self._runtime.begin_step(share.batch)
            try:
                self._attend(share, layer, q, out)
            finally:
                self._runtime.end_step()
        finally:
            if self._share is not None:
                self._runtime.begin_step(self._share.batch)

    def end(self) -> None:
        """The step is over."""
        share, self._share = self._share, None
        if share is not None:
            self._runtime.end_step()

    def close(self) -> None:
        """Close the runtime."""
        self._share = None
        self._runtime.close()

    def _attend(self, share: Share, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        result = np.empty((len(share.rows), *q.shape[1:]), np.float32)
        self._runtime.attend(layer, q[share.rows], result)
        out[share.rows] = result

"""What of a step the host attends itself, beside a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .attention import AttentionBatch, AttentionRuntime

__all__ = ["HostShare", "Share"]

_Number = TypeVar("_Number", bound=np.integer[Any])


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
        windows, sinks = (None if counts is None else counts[sequences] for counts in (step.windows, step.sinks))
        codecs = None if step.codecs is None else step.codecs[sequences]
        batch = AttentionBatch(starts, step.context_lens[sequences], step.tables[sequences], windows, sinks, codecs)
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
            _one_behind_the_other([share.batch.windows for share in shares]),
            _one_behind_the_other([share.batch.sinks for share in shares]),
            _one_behind_the_other([share.batch.codecs for share in shares]),
        )
        return cls(batch, np.concatenate([share.rows for share in shares]))


class HostShare:
    """Lets one runtime attend one share of a step after the other, layer by layer.

    Args:
        runtime: of the host; owned from now on.
    """

    def __init__(self, runtime: AttentionRuntime) -> None:
        self._runtime = runtime
        self._share: Share | None = None  # whose step the runtime has begun

    def begin(self, share: Share) -> None:
        """Begin the runtime's step with the share that comes first; nothing, if that has no rows."""
        if share is not self._share and share.batch.rows:
            self.end()
            self._runtime.begin_step(share.batch)
            self._share = share

    def attend(self, share: Share, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend a share's rows of `q`, and put them into `out`; both are the whole step's."""
        if not share.batch.rows:
            return
        self.begin(share)
        result = np.empty((len(share.rows), *q.shape[1:]), np.float32)
        self._runtime.attend(layer, q[share.rows], result)
        out[share.rows] = result

    def end(self) -> None:
        """The step is over."""
        share, self._share = self._share, None
        if share is not None:
            self._runtime.end_step()

    def close(self) -> None:
        """Close the runtime."""
        self._share = None
        self._runtime.close()


def _one_behind_the_other(counts: Sequence[NDArray[_Number] | None]) -> NDArray[_Number] | None:
    """Of shares of one step: all have them, or none."""
    given = [array for array in counts if array is not None]
    return np.concatenate(given) if given else None

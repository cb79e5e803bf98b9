"""What an attention job hands to an NPU, and what every NPU, real or not, promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError
from staging import StagingBuffer

__all__ = ["MAX_DIMENSION", "ROW_MULTIPLE", "AttentionDevice", "AttentionJob", "AttentionRun", "without_frames"]

MAX_DIMENSION = 8191
"""The NPU's size registers hold 13 bits; the vendor runtime rejects 0x2010 = 8208 against a limit of 0x1fff."""

ROW_MULTIPLE = 4
"""Query rows per KV head are padded to a multiple of this; else rknn-toolkit2 2.5.0 inserts a convolution."""


@dataclass(frozen=True)
class AttentionJob:
    """One launch: `out = softmax(query @ keys^T + mask) @ values`, for each leading index.

    The operands are fp16 views of the buffer's memory, in the shapes of its layout; the query is scaled already.

    Attributes:
        buffer: READY; in flight until the job has ended.
        query: `[batch * kv_heads, rows, key_channels]`.
        keys: `[batch * kv_heads, tokens, key_channels]`, or the layout's tiles.
        values: `[batch * kv_heads, tokens, head_dim]`, or the layout's tiles.
        mask: `[batch, rows, tokens]`, each element 0 or `MASKED`, but for the canary's; `[batch, 0, tokens]` if K
            carries the mask.
        out: `[batch * kv_heads, rows, head_dim]`.
    """

    buffer: StagingBuffer
    query: NDArray[np.float16]
    keys: NDArray[np.float16]
    values: NDArray[np.float16]
    mask: NDArray[np.float16]
    out: NDArray[np.float16]

    @classmethod
    def over(cls, buffer: StagingBuffer) -> AttentionJob:
        """The job whose operands are the buffer's own."""
        return cls(buffer, buffer.query, buffer.keys, buffer.values, buffer.mask, buffer.out)

    def operands(self) -> Iterator[tuple[str, NDArray[np.float16]]]:
        """Each operand with its name, `out` last."""
        for name in ("query", "keys", "values", "mask", "out"):
            yield name, getattr(self, name)


class AttentionRun(Protocol):
    """A submitted job."""

    @property
    def ended(self) -> bool:
        """Whether the device is done with the job's buffer."""

    def wait(self) -> None:
        """Return when the job has ended; its result is in device memory. Wait once.

        Raises:
            DeviceError: the run failed, or did not end in time: then `ended` is false, and the buffer is the device's
                until it turns true.
        """


def without_frames(error: DeviceError) -> DeviceError:
    """The error alone, to be kept: tracebacks, its own and those of what led to it, hold views of the arena."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class AttentionDevice(Protocol):
    """Runs attention jobs over the staging arena. All methods but `close` are called from one thread.

    Attributes:
        name: of the runtime, as people choose it.
        numerics: names everything that can change a bit of a result.
        cores: how many jobs run at once.
        tiled: K and V are wanted in the NPU's own order.
        reads_in_place: jobs read the arena itself, so that what was synced once need not be handed over again.
    """

    name: str
    numerics: str
    cores: int
    tiled: bool
    reads_in_place: bool

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Let the device see `nbytes` at `offset` of the arena as the host left them."""

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Let the host see `nbytes` at `offset` of the arena as the device left them."""

    def submit(self, job: AttentionJob, core: int) -> AttentionRun:
        """Give a job to a core; its buffer is in flight from now on. Jobs of one core run in order.

        Raises:
            StagingError: the job breaks the contract; it was not started, and its buffer keeps its state.
            DeviceError: the device refused; likewise.
        """

    def close(self) -> None:
        """Let go of the memory and of what the device holds. Safe to call twice."""

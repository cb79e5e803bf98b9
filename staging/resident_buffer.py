"""A staging buffer that is not filled from scratch: what it holds grows from launch to launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache

from .buffer import BufferState, DeviceMemory, StagingBuffer
from .layout import FP16_BYTES
from .plan import GatherPlan

__all__ = ["FillCounts", "Refill", "ResidentBuffer"]

_WORTH_A_SYNC = 8192
"""Bytes. Ranges with less than this between them are synced as one: a call takes about 0.7 us and copying 8 KiB as
long (x86-64, the emulated NPU); on a board it is a system call."""


@dataclass
class FillCounts:
    """How buffers were filled.

    Attributes:
        grown: only with what had changed.
        whole: from scratch.
    """

    grown: int = 0
    whole: int = 0


class Refill:
    """How a launch's K and V come about in one step; the same for every layer.

    Args:
        edition: as below.
        whole: as below.
        growth: as below.
        own_tokens: tokens at the end of every head that the caller writes itself, each time.

    Attributes:
        edition: number of the content, one higher in each step.
        whole: gathers all of it.
        growth: turns the edition before into this one. Doing so twice does no harm.
        touched: `(offset, bytes)` in a buffer, ascending: all that `growth` and the caller write.
    """

    def __init__(self, edition: int, whole: GatherPlan, growth: GatherPlan, own_tokens: int) -> None:
        self.edition = edition
        self.whole = whole
        self.growth = growth
        self.touched = _touched(growth, own_tokens)


class ResidentBuffer(StagingBuffer):
    """A staging buffer whose K and V stay when it is released, so that the next fill copies what has changed since.

    What it holds counts as known only once the device has it: after a fill that was not synced, the next is from
    scratch. Made by `staging.residency.Residency`, whose `ResidentCopy.acquire` hands it out FILLING.
    """

    def __init__(
        self, index: int, offset: int, memory: NDArray[np.uint8], device: DeviceMemory, counts: FillCounts
    ) -> None:
        super().__init__(index, offset, memory, device)
        self._counts = counts
        self._refill: Refill | None = None
        self._edition: int | None = None  # that host and device both hold
        self._filled: int | None = None  # that the host holds
        self._unsynced: list[tuple[int, int]] | None = None  # None: all of it

    def take(self, refill: Refill) -> None:
        """FREE -> FILLING, for the launch that `refill` is about."""
        self.acquire()
        self._refill = refill
        self._filled = self._unsynced = None

    def fill(self, cache: PagedKVCache, plan: GatherPlan, layer: int) -> None:
        """As `StagingBuffer.fill`; but what the buffer holds of the plan already is not copied again."""
        refill, held = self._refill, self._edition
        self._edition = None
        if refill is None or plan is not refill.whole:
            super().fill(cache, plan, layer)
            return
        if held in (refill.edition - 1, refill.edition):
            super().fill(cache, refill.growth, layer)
            self._unsynced = refill.touched
            self._counts.grown += 1
        else:
            super().fill(cache, plan, layer)
            self._counts.whole += 1
        self._filled = refill.edition

    def sync_to_device(self) -> None:
        """FILLING -> READY: the device sees the bytes as they are now; most of them it had before."""
        if self._unsynced is None:
            super().sync_to_device()
        else:
            self.require(BufferState.FILLING)
            for offset, nbytes in self._unsynced:
                self._device.sync_to_device(self._offset + offset, nbytes)
            self.state = BufferState.READY
        self._edition = self._filled


def _touched(growth: GatherPlan, own_tokens: int) -> list[tuple[int, int]]:
    """What a launch writes into a buffer that holds the edition before."""
    layout = growth.layout
    own = np.empty((layout.heads, 3), np.int64)
    own[:] = 0, layout.tokens - own_tokens, own_tokens
    own[:, 0] = np.arange(layout.heads)
    by_head = [_by_head(part.runs[:, 1:], layout.kv_heads) for part in growth.parts]
    head, first, tokens = np.concatenate([*by_head, growth.tails, own]).T[..., np.newaxis]
    starts, ends = [np.array([layout.query_offset])], [np.array([layout.nbytes])]
    for offset, shape in ((layout.keys_offset, layout.keys_shape), (layout.values_offset, layout.values_shape)):
        # [heads, strips, tokens, channels]: within a strip, tokens follow each other. Only tiles make several.
        strips, token_bytes = (shape[1] if layout.tiled else 1), shape[-1] * FP16_BYTES
        start = offset + ((head * strips + np.arange(strips)) * layout.tokens + first) * token_bytes
        starts.append(start.ravel())
        ends.append((start + tokens * token_bytes).ravel())
    return _merged(np.concatenate(starts), np.concatenate(ends))


def _by_head(runs: NDArray[np.int64], kv_heads: int) -> NDArray[np.int64]:
    """Sequence, first token and tokens as head, first token and tokens: int64 `[runs * kv_heads, 3]`."""
    spread = np.repeat(runs, kv_heads, axis=0)
    spread[:, 0] = (runs[:, :1] * kv_heads + np.arange(kv_heads)).ravel()
    return spread


def _merged(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges in order, as (start, bytes), neighbours made one."""
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    apart = starts[1:] > ends[:-1] + _WORTH_A_SYNC
    first, last = np.append(True, apart), np.append(apart, True)
    return list(zip(starts[first].tolist(), (ends[last] - starts[first]).tolist(), strict=True))

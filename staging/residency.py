"""Staged copies that decoding sequences keep from step to step, within a fixed memory.

Staging one token is much cheaper than gathering hundreds. A copy belongs to a launch of a step: to the sequences that
share one, with the same bucket. In the next step the launch with the same layout takes it over, and only what differs
is copied: most often one token of each sequence.

What a buffer holds is known by where it came from: for each block of each sequence, the block's id, its generation
(`BlockPool.generation`: another owner has it) and its rewrites (`PagedKVCache.rewrites`: its owner took tokens back and
wrote others). From the first block on that differs, everything is copied anew. So it does not matter which sequences
come, go, fork, are truncated, or get back the blocks they had: whatever is equal stays. Where a sequence has a window,
a copy lacks what was hidden: once that is seen again, everything from there on is copied anew.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache

from .arena import PAGE
from .buffer import BufferState, DeviceMemory
from .layout import StagingLayout
from .plan import GatherPlan
from .resident_buffer import FillCounts, Refill, ResidentBuffer

__all__ = ["Residency", "ResidentCopy"]


class ResidentCopy:
    """One launch's K and V, of every layer. Made by `Residency`.

    Attributes:
        start: byte offset of the copy in the residency's memory.
        nbytes: of all layers, and what is left free between them.
    """

    def __init__(self, start: int, nbytes: int, buffers: list[ResidentBuffer]) -> None:
        self.start = start
        self.nbytes = nbytes
        self._buffers = buffers
        self._refill: Refill | None = None
        self._sources = np.empty((0, 0, 3), np.int64)
        self._lengths = np.empty(0, np.int32)
        self._hidden = np.empty((0, 2), np.int64)

    @property
    def idle(self) -> bool:
        """Whether no buffer is in use."""
        return all(buffer.state is BufferState.FREE for buffer in self._buffers)

    def renew(
        self,
        cache: PagedKVCache,
        plan: GatherPlan,
        lengths: NDArray[np.int32],
        before: NDArray[np.int32],
        own_tokens: int,
    ) -> None:
        """Find out what this step's launch has in common with the one before."""
        sources = _sources(cache, plan)
        if self._refill is None:
            edition, growth = 1, plan
        else:
            edition = self._refill.edition + 1
            growth = plan.without(self._kept(sources, before, plan), self._lengths)
        self._refill = Refill(edition, plan, growth, own_tokens)
        self._sources, self._lengths, self._hidden = sources, lengths, plan.hidden

    def acquire(self, layer: int) -> ResidentBuffer | None:
        """The buffer of a layer, FILLING, to be filled by the step's plan; None if a job still has it."""
        buffer = self._buffers[layer]
        if self._refill is None or buffer.state is not BufferState.FREE:
            return None
        buffer.take(self._refill)
        return buffer

    def close(self) -> None:
        """Let go of the memory."""
        for buffer in self._buffers:
            buffer.close()

    def _kept(self, sources: NDArray[np.int64], before: NDArray[np.int32], plan: GatherPlan) -> NDArray[np.int64]:
        """How many tokens of each sequence are there already, int64 `[batch]`.

        The step's own are not, whatever was there: their K and V are written after this, so no rewrite is counted yet.
        """
        same = (sources == self._sources).all(axis=2)
        blocks = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
        block_tokens = plan.geometry.block_tokens
        kept: NDArray[np.int64] = np.minimum(np.minimum(blocks * block_tokens, self._lengths), before)
        start, end = self._hidden.T
        seen_again = (start < end) & ((start < plan.hidden[:, 0]) | (end > plan.hidden[:, 1]))
        return np.where(seen_again, np.minimum(kept, start), kept)


class Residency:
    """Lends staged copies to the decode launches of each step, those that were used last.

    Args:
        cache: what is staged.
        memory: uint8; where the copies lie. The caller owns it, and closes this first.
        offset: of `memory` in the arena that the device knows, a multiple of `PAGE`.
        device: makes its bytes visible.
        own_tokens: tokens at the end of a bucket that no context reaches: the caller writes them before each launch.
        piece_bytes: of the dma-bufs that the memory consists of: no buffer is cut in two by their borders, and no two
            copies share one, since each is synced as a whole. None if it has no borders.

    Attributes:
        counts: how buffers were filled.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        memory: NDArray[np.uint8],
        offset: int,
        device: DeviceMemory,
        own_tokens: int,
        *,
        piece_bytes: int | None = None,
    ) -> None:
        self.counts = FillCounts()
        self._cache = cache
        self._memory = memory
        self._offset = offset
        self._device = device
        self._own_tokens = own_tokens
        self._piece_bytes = piece_bytes
        self._copies: OrderedDict[tuple[StagingLayout, int], ResidentCopy] = OrderedDict()  # used longest ago first
        self._in_step: list[tuple[StagingLayout, int]] = []

    def begin_step(self) -> None:
        """The copies of the step before are free to be taken over."""
        self._in_step.clear()

    def fits(self, layout: StagingLayout) -> bool:
        """Whether there is memory for a copy of such a launch, if no other needs it."""
        if self._piece_bytes is not None and self._buffer_bytes(layout) > self._piece_bytes:
            return False
        return self._copy_bytes(layout) <= len(self._memory)

    def lend(self, plan: GatherPlan, lengths: NDArray[np.int32], before: NDArray[np.int32]) -> ResidentCopy | None:
        """A copy for one launch of this step; None if the step's other launches leave no room.

        Args:
            plan: gathers the launch whole.
            lengths: int32 `[plan.layout.batch]`; as the plan has them.
            before: int32 `[plan.layout.batch]`; tokens of each sequence that were written before this step.
        """
        key = plan.layout, sum(layout == plan.layout for layout, _ in self._in_step)
        copy = self._copies.get(key) or self._make(key)
        if copy is None or not copy.idle:
            return None
        self._copies.move_to_end(key)
        self._in_step.append(key)
        copy.renew(self._cache, plan, lengths, before, self._own_tokens)
        return copy

    def close(self) -> None:
        """Let go of the memory."""
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()
        self._memory = np.empty(0, np.uint8)

    def _make(self, key: tuple[StagingLayout, int]) -> ResidentCopy | None:
        layout, _ = key
        if not self.fits(layout):
            return None
        nbytes = self._copy_bytes(layout)
        while (start := self._gap(nbytes)) is None:
            if not self._drop_oldest():
                return None
        size = self._buffer_bytes(layout)
        places = [start + self._place(layer, size) for layer in range(self._cache.geometry.layers)]
        buffers = [
            ResidentBuffer(layer, self._offset + at, self._memory[at : at + size], self._device, self.counts)
            for layer, at in enumerate(places)
        ]
        self._copies[key] = ResidentCopy(start, nbytes, buffers)
        return self._copies[key]

    def _gap(self, nbytes: int) -> int | None:
        """Where `nbytes` are free, the lowest place; None if nowhere."""
        end = 0
        for copy in sorted(self._copies.values(), key=lambda copy: copy.start):
            if copy.start - end >= nbytes:
                return end
            end = copy.start + copy.nbytes
        return end if len(self._memory) - end >= nbytes else None

    def _drop_oldest(self) -> bool:
        """Give up the copy that was used longest ago; False if all are needed."""
        for key, copy in self._copies.items():
            if key not in self._in_step and copy.idle:
                del self._copies[key]
                return True
        return False

    def _buffer_bytes(self, layout: StagingLayout) -> int:
        return -(-layout.nbytes // PAGE) * PAGE

    def _copy_bytes(self, layout: StagingLayout) -> int:
        size = self._buffer_bytes(layout)
        end = self._place(self._cache.geometry.layers - 1, size) + size
        piece = self._piece_bytes
        return end if piece is None else -(-end // piece) * piece

    def _place(self, layer: int, size: int) -> int:
        """Where in a copy a layer's buffer starts: behind the one before it, or where the next dma-buf does."""
        if self._piece_bytes is None:
            return layer * size
        piece, within = divmod(layer, self._piece_bytes // size)
        return piece * self._piece_bytes + within * size


def _sources(cache: PagedKVCache, plan: GatherPlan) -> NDArray[np.int64]:
    """Where a launch's tokens come from: int64 `[batch, blocks, 3]`; id, generation and rewrites of a block, or -1."""
    geometry, layout = plan.geometry, plan.layout
    sources = np.full((layout.batch, -(-layout.tokens // geometry.block_tokens), 3), -1, np.int64)
    generation = cache.extents.generation
    for part in plan.parts:
        ids = part.ids
        place = part.runs[:, 1], part.runs[:, 2] // geometry.block_tokens
        sources[place] = np.stack(
            [ids, np.array([generation[block] for block in ids.tolist()], np.int64), cache.rewrites[ids]], axis=1
        )
    return sources

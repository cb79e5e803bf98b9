"""Attention over staged buffers on the strict emulated NPU."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.errors import DeviceError, NoBucket, UsageError
from hostcache.geometry import KVGeometry
from hostcache.region import Region
from staging import DEFAULT_BUCKETS, Buckets, StagingArena, StagingBuffer

from .attention import AttentionBatch, AttentionRuntime
from .checks import check_operand, check_process, copy_checked
from .device import AttentionJob, poison, require_fresh
from .emulated_device import EmulatedDevice, EmulatedRun, Faults
from .fp16 import Rounding
from .launch import Launch, LaunchPlanner

__all__ = ["EmulatedAttention", "arena_bytes"]

BUFFERS_PER_CORE = 2
"""One is filled while the core works on the other."""


def arena_bytes(geometry: KVGeometry, heads: int, cores: int = 3, buckets: Sequence[int] = DEFAULT_BUCKETS) -> int:
    """Bytes of the staging arena that `EmulatedAttention` takes for these arguments; any number of sessions share it.

    Raises:
        UsageError: the heads do not fit the geometry, the buckets are not ascending multiples of 4, or no cores.
        DimensionTooLarge: a bucket or a tile is beyond what the NPU's registers hold.
    """
    planner = LaunchPlanner(geometry, 0, heads, Buckets(buckets))
    return StagingArena.bytes_for(cores * BUFFERS_PER_CORE, planner.buffer_bytes)


@dataclass(frozen=True, eq=False)
class _Step:
    """What one step runs where."""

    rows: int
    launches: list[Launch]
    fallback_rows: NDArray[np.int64]  # rows of q that the fallback attends


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A launch that the device works on."""

    launch: Launch
    buffer: StagingBuffer
    run: EmulatedRun


class EmulatedAttention:
    """Causal grouped-query attention as a board runs it: gather, sync, launch, wait, sync back, prove, scatter.

    Sequences with one query row share a launch per bucket, whatever their lengths; chunks of several rows are cut
    into tiles of `npu.launch.TILE_TOKENS`, one launch each. q, K, V and the result are fp16.

    A sequence longer than the largest bucket is attended by the fallback, all of its rows.

    Args:
        cache: where K and V lie; it must outlive this object.
        heads: query heads, a multiple of the cache's KV heads.
        rounding: `"output"` or `"op"`, see `npu.fp16.Rounding`.
        cores: NPU cores; two staging buffers each.
        buckets: tokens, ascending multiples of 4; contexts are padded to the next one.
        fallback: attends what no bucket holds, over the same cache; owned from now on, closed by `close()`.
        faults: what the device gets wrong on purpose.

    Attributes:
        name: `"emulated"`.
        numerics: the name, the rounding and the buckets, which are the lengths of sums, and the fallback's numerics.

    Raises:
        UsageError: heads, buckets, rounding, cores or the cache's element size cannot be used.
        DimensionTooLarge: a bucket or a tile is beyond what the NPU's registers hold.
        RegionError: the memory for the staging arena is not there.
    """

    name = "emulated"

    def __init__(
        self,
        cache: PagedKVCache,
        heads: int,
        rounding: Rounding = "output",
        *,
        cores: int = 3,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        fallback: AttentionRuntime | None = None,
        faults: Faults | None = None,
    ) -> None:
        named = [self.name, rounding, *map(str, buckets), *([fallback.numerics] if fallback is not None else [])]
        self.numerics = "-".join(named)
        self._cache = cache
        self._buckets = Buckets(buckets)
        self._planner = LaunchPlanner(cache.geometry, cache.blocks, heads, self._buckets)
        self._row_shape = (heads, cache.geometry.head_dim)
        self._fallback = fallback
        self._step: _Step | None = None
        self._closed = False
        self._process = os.getpid()
        region = Region.anonymous(arena_bytes(cache.geometry, heads, cores, buckets))
        self._device = EmulatedDevice(region.buffer, rounding, cores, faults)
        self._arena = StagingArena(region, cores * BUFFERS_PER_CORE, self._device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging arena."""
        return len(self._arena.buffers) * self._arena.buffer_bytes

    def begin_step(self, batch: AttentionBatch) -> None:
        """Check the batch and plan its launches; the plan serves every layer and keeps no view of the batch.

        Raises:
            UsageError: the batch contradicts itself, a block id is outside the pool, the previous step has not
                ended, the runtime is closed, or was opened before a fork().
            NoBucket: a sequence is longer than the largest bucket and there is no fallback.
        """
        self._check_open()
        if self._step is not None:
            raise UsageError("begin_step came before the previous step's end_step: call end_step first")
        batch = copy_checked(batch, self._cache.geometry, self._cache.blocks)
        fits = batch.context_lens <= self._buckets.largest
        staged, beyond = np.flatnonzero(fits), np.flatnonzero(~fits)
        launches = self._planner.plan(batch, staged)
        fallback_rows = np.empty(0, np.int64)
        if len(beyond):
            fallback_rows = self._begin_fallback(batch, beyond)
        self._step = _Step(batch.rows, launches, fallback_rows)

    def attend(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend `q` over the cached K and V of `layer`. After an error every buffer is free again.

        Args:
            layer: layer index.
            q: float32 `[rows, heads, head_dim]`, C-contiguous, rotated, not scaled.
            out: float32 `[rows, heads, head_dim]`, C-contiguous, overwritten; holds no usable rows after an error.

        Raises:
            UsageError: a shape, a dtype or the layer does not fit, no step was begun, or the runtime is closed.
            DeviceError: a run failed, or its result is not fresh.
        """
        self._check_open()
        if self._step is None:
            raise UsageError("attend came without a step: call begin_step first")
        step = self._step
        shape = (step.rows, *self._row_shape)
        check_operand("q", q, shape)
        check_operand("out", out, shape, writable=True)
        self._attend_staged(step.launches, layer, q, out)
        if self._fallback is not None and len(step.fallback_rows):
            result = np.empty((len(step.fallback_rows), *self._row_shape), np.float32)
            self._fallback.attend(layer, q[step.fallback_rows], result)
            out[step.fallback_rows] = result

    def end_step(self) -> None:
        """The step is over. Safe to call after a failed `attend`, and twice.

        Raises:
            UsageError: the runtime is closed.
        """
        self._check_open()
        step, self._step = self._step, None
        if step is not None and self._fallback is not None and len(step.fallback_rows):
            self._fallback.end_step()

    def close(self) -> None:
        """Give back the arena and close the fallback. Every later call but `close` raises UsageError."""
        if self._closed:
            return
        self._closed = True
        self._step = None
        self._device.close()
        self._arena.close()
        if self._fallback is not None:
            self._fallback.close()

    def _begin_fallback(self, batch: AttentionBatch, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Begin the fallback's step for some of the batch's sequences; returns their rows of q."""
        longest = int(batch.context_lens[sequences].max())
        if self._fallback is None:
            raise NoBucket(
                f"a context of {longest} tokens is longer than the largest bucket of {self._buckets.largest}: "
                "add a bucket, or give a fallback",
                tokens=longest,
                largest=self._buckets.largest,
            )
        counts = np.diff(batch.query_starts)[sequences]
        starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        self._fallback.begin_step(AttentionBatch(starts, batch.context_lens[sequences], batch.tables[sequences]))
        shift = np.repeat(batch.query_starts[sequences] - starts[:-1], counts)
        return (np.arange(starts[-1]) + shift).astype(np.int64)

    def _attend_staged(
        self, launches: list[Launch], layer: int, q: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Keep every buffer busy: fill the next one while the device works on those before it."""
        in_flight: deque[_InFlight] = deque()
        try:
            for launch in launches:
                if not self._arena.free:
                    self._finish(in_flight.popleft(), out)
                in_flight.append(self._start(launch, layer, q))
            while in_flight:
                self._finish(in_flight.popleft(), out)
        finally:
            # Only after an error is anything left. The device must be done with a buffer before it is filled again.
            for abandoned in in_flight:
                with contextlib.suppress(DeviceError):
                    abandoned.run.wait()
                abandoned.buffer.release()

    def _start(self, launch: Launch, layer: int, q: NDArray[np.float32]) -> _InFlight:
        buffer = self._arena.acquire()
        try:
            buffer.fill(self._cache, launch.plan, layer)
            launch.write_query(buffer, q)
            launch.write_mask(buffer)
            poison(buffer.out)
            buffer.sync_to_device()
            run = self._device.submit(AttentionJob.over(buffer))
        except BaseException:
            buffer.release()
            raise
        return _InFlight(launch, buffer, run)

    def _finish(self, done: _InFlight, out: NDArray[np.float32]) -> None:
        try:
            done.run.wait()
            done.buffer.sync_from_device()
            require_fresh(done.buffer.out)
            done.launch.read_out(done.buffer, out)
        finally:
            done.buffer.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this attention runtime is closed: make a new one")
        check_process(self._process)

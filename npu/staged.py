"""Attention over staged buffers on a device that cannot follow a block table."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.attention_work import AttentionWork
from hostcache.cache import PagedKVCache
from hostcache.dma_heap import HeapRegion
from hostcache.errors import DeviceError, RegionError, UsageError
from hostcache.geometry import KVGeometry
from hostcache.region import Region
from staging import DEFAULT_BUCKETS, Buckets, Residency, ResidentCopy, StagingArena, StagingBuffer

from .attention import AttentionBatch, AttentionRuntime
from .canary import CANARY_TOKENS, Canary
from .checks import check_layer, check_operand, check_process, check_windows, copy_checked
from .cores import Cores
from .device import AttentionDevice, AttentionJob, AttentionRun, without_frames
from .host_share import HostShare
from .launch import BATCHES, Launch, LaunchPlanner
from .placement import Everything, Placement
from .step_planner import PlannedLaunch, PlannedStep, StepPlanner

__all__ = ["StagedAttention", "arena_bytes"]

BUFFERS_PER_CORE = 2
"""One is filled while the core works on the other."""


def arena_bytes(geometry: KVGeometry, heads: int, cores: int = 3, buckets: Sequence[int] = DEFAULT_BUCKETS) -> int:
    """Bytes of the staging arena that `StagedAttention` takes for these arguments; any number of sessions share it.

    Raises:
        UsageError: the heads do not fit the geometry, the buckets are not ascending multiples of 4, or no cores.
        DimensionTooLarge: a bucket or a tile is beyond what the NPU's registers hold.
    """
    planner = LaunchPlanner(geometry, 0, heads, Buckets(buckets))
    return StagingArena.bytes_for(cores * BUFFERS_PER_CORE, planner.buffer_bytes)


def _ordinary_memory(nbytes: int, _buffer_bytes: int) -> Region:
    return Region.anonymous(nbytes)


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A launch that a core works on."""

    planned: PlannedLaunch
    buffer: StagingBuffer
    canary: Canary
    core: int
    run: AttentionRun


class StagedAttention:
    """Causal grouped-query attention as a board runs it: gather, sync, launch, wait, sync back, prove, scatter.

    Sequences with one query row share a launch per bucket, whatever their lengths; chunks of several rows are cut
    into tiles of `npu.launch.TILES`, one launch each. q, K, V and the result are fp16.

    A sequence longer than the largest bucket holds is attended by the host, all of its rows. A launch that fails, or
    whose result is not proven fresh, is run once more on another core; if that fails too, or there is none, the host
    computes it. No token is lost, and none is wrong.

    Args:
        cache: where K and V lie; it must outlive this object.
        heads: query heads, a multiple of the cache's KV heads.
        open_device: makes the device over the arena's memory, uint8; the device is owned from then on.
        cores: NPU cores; two staging buffers each.
        buckets: tokens, ascending multiples of 4; contexts are padded to the next one.
        batches: counts that decoding sequences are padded to, ascending.
        host: attends what the device does not, over the same cache; owned from now on, closed by `close()`.
        placement: says what that is, beside contexts that no bucket holds.
        take: where the arena's memory comes from, by its size in bytes and those of each buffer.
        resident_bytes: memory of the arena in which decoding sequences stay staged from step to step; rounded up to
            whole dma-bufs, if the arena consists of such.
        windows: of each layer, the newest tokens that its rows see at most, 0: all; empty: no layer has one. The host
            runtime has the same.

    Attributes:
        name: the device's.
        numerics: the device's, the buckets, which are the lengths of its sums, and the host's, which may attend any
            launch.
        work: how much attention a step is if the device attends all of it.
        cores: what happened on each core.
        placement: says what the device gets; without a host runtime, everything.
        log: what went where, and why.
        residency: the copies that stay staged; None without memory for them.
        launches: cuts steps into launches.

    Raises:
        UsageError: heads, buckets, cores or the cache's element size cannot be used, or the device would copy what
            stays staged again.
        DimensionTooLarge: a bucket or a tile is beyond what the NPU's registers hold.
        RegionError: the memory for the staging arena is not there.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        heads: int,
        open_device: Callable[[NDArray[np.uint8]], AttentionDevice],
        *,
        cores: int = 3,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        batches: Sequence[int] = BATCHES,
        host: AttentionRuntime | None = None,
        placement: Placement | None = None,
        take: Callable[[int, int], Region] = _ordinary_memory,
        resident_bytes: int = 0,
        windows: Sequence[int] = (),
    ) -> None:
        self._cache = cache
        self._windows = check_windows(windows, cache.geometry.layers)
        self._row_shape = (heads, cache.geometry.head_dim)
        sizes = Buckets(buckets)
        nbytes = arena_bytes(cache.geometry, heads, cores, buckets)
        if resident_bytes < 0:
            raise UsageError(
                f"{resident_bytes} bytes cannot be set aside: 0 keeps nothing staged", nbytes=resident_bytes
            )
        buffers = cores * BUFFERS_PER_CORE
        region = take(nbytes + resident_bytes, nbytes // buffers)
        try:
            self._device = open_device(region.buffer)
            self.launches = LaunchPlanner(
                cache.geometry,
                cache.units,
                heads,
                sizes,
                batches=batches,
                tiled=self._device.tiled,
                unit_bytes=cache.unit_bytes,
            )
            self._arena = StagingArena(region, buffers, self._device, spare=region.nbytes - nbytes)
            self.residency: Residency | None = None
            if resident_bytes:
                _check_residency(self._device, resident_bytes)
                self.residency = Residency(
                    cache,
                    region.buffer[nbytes:],
                    nbytes,
                    self._device,
                    CANARY_TOKENS,
                    piece_bytes=region.piece_bytes if isinstance(region, HeapRegion) else None,
                )
        except BaseException:
            with contextlib.suppress(RegionError):  # the error's frames may hold views; the memory goes with them
                region.close()
            raise
        self.name = self._device.name
        named = "-".join([self._device.numerics, *map(str, sizes.sizes)])
        self.numerics = named if host is None else f"{named}+{host.numerics}"
        self.work: AttentionWork = self.launches.work
        self.cores = Cores(cores)
        self.placement: Placement = Everything() if host is None or placement is None else placement
        self._planner = StepPlanner(self.launches, sizes, self.placement, self.residency, host=host is not None)
        self.log = self._planner.log
        self._host = None if host is None else HostShare(host)
        self._steps: dict[int, PlannedStep] = {}  # the step as layers see it, by their windows; empty between steps
        self._fences = contextlib.ExitStack()  # around the blocks of the step
        self._stuck: list[_InFlight] = []  # runs that did not end in time, with buffers that are still the device's
        self._closed = False
        self._process = os.getpid()

    @property
    def capacity(self) -> int:
        """Tokens of the longest context that the device attends."""
        return self._planner.capacity

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging arena."""
        return len(self._arena.buffers) * self._arena.buffer_bytes

    def begin_step(self, batch: AttentionBatch) -> None:
        """Check the batch and plan its launches; the plan serves every layer and keeps no view of the batch.

        Raises:
            UsageError: the batch contradicts itself, a block id is outside the pool, the previous step has not
                ended, the runtime is closed, or was opened before a fork().
            NoBucket: a sequence is longer than the largest bucket holds and there is no host runtime.
        """
        self._check_open()
        if self._steps:
            raise UsageError("begin_step came before the previous step's end_step: call end_step first")
        batch = copy_checked(batch, self._cache.geometry, self._cache.units, self._cache.leanest)
        self._planner.begin_step()
        plans: dict[int, PlannedStep] = {}
        steps: dict[int, PlannedStep] = {}
        for window in sorted(set(self._windows)):
            view = batch.narrowed(window)
            shown = 0 if view.windows is None else window  # windows that hide nothing are as good as none
            if shown not in plans:
                plans[shown] = self._planner.plan(view)
            steps[window] = plans[shown]
        with contextlib.ExitStack() as fences:
            for plan in plans.values():
                self._fence(plan, fences)
            if self._host is not None:
                self._host.begin(steps[self._windows[0]].host)
            self._fences = fences.pop_all()
        self._steps = steps

    def attend(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend `q` over the cached K and V of `layer`. After an error every buffer is free again.

        Args:
            layer: layer index.
            q: float32 `[rows, heads, head_dim]`, C-contiguous, rotated, not scaled.
            out: float32 `[rows, heads, head_dim]`, C-contiguous, overwritten; holds no usable rows after an error.

        Raises:
            UsageError: a shape, a dtype or the layer does not fit, no step was begun, or the runtime is closed.
            DeviceError: a launch failed twice, and there is no host runtime.
        """
        self._check_open()
        if not self._steps:
            raise UsageError("attend came without a step: call begin_step first")
        check_layer(layer, len(self._windows))
        step = self._steps[self._windows[layer]]
        shape = (step.rows, *self._row_shape)
        check_operand("q", q, shape)
        check_operand("out", out, shape, writable=True)
        self._take_back()
        self._attend_staged(step.launches, layer, q, out)
        if self._host is not None:
            self._host.attend(step.host, layer, q, out)

    def end_step(self) -> None:
        """The step is over. Safe to call after a failed `attend`, and twice.

        Raises:
            UsageError: the runtime is closed.
        """
        self._check_open()
        self._steps = {}
        self._fences.close()
        if self._host is not None:
            self._host.end()

    def close(self) -> None:
        """Give back the device, the arena and the host runtime. Every later call but `close` raises UsageError."""
        if self._closed:
            return
        self._closed = True
        self._steps = {}
        self._fences.close()
        self._device.close()
        self._take_back()
        if not self._stuck:  # else the device still reads and writes there
            if self.residency is not None:
                self.residency.close()
            self._arena.close()
        if self._host is not None:
            self._host.close()

    def _fence(self, plan: PlannedStep, fences: contextlib.ExitStack) -> None:
        """Keep the blocks that launches copy out of from being reused before the step has ended.

        Once for all layers: block by block it takes longer than copying them.
        """
        for planned in plan.launches:
            for part in planned.launch.plan.parts:
                fences.enter_context(self._cache.pool_of(part.rows.codec).fence(part.blocks))

    def _attend_staged(
        self, launches: list[PlannedLaunch], layer: int, q: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Keep every buffer busy: fill the next one while the device works on those before it."""
        in_flight: deque[_InFlight] = deque()
        try:
            for planned in launches:
                while in_flight and not self._arena.free:
                    self._finish(in_flight.popleft(), layer, q, out)
                started = self._start(planned, self.cores.pick(), layer, q)
                if isinstance(started, _InFlight):
                    in_flight.append(started)
                else:
                    self._on_host(planned.launch, layer, q, out, started)
            while in_flight:
                self._finish(in_flight.popleft(), layer, q, out)
        finally:
            # Only after an error is anything left. The device must be done with a buffer before it is filled again.
            with contextlib.ExitStack() as each:  # also where another Ctrl-C comes
                for abandoned in reversed(in_flight):
                    each.callback(self._abandon, abandoned)

    def _finish(self, done: _InFlight, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Bring in the result of a launch, from wherever it can be had."""
        error = self._result(done, out)
        if error is not None:
            again = self._start(done.planned, self.cores.pick(avoid=done.core), layer, q)
            if isinstance(again, _InFlight):
                error = self._result(again, out)
        if error is not None:
            self._on_host(done.planned.launch, layer, q, out, error)

    def _start(
        self, planned: PlannedLaunch, core: int | None, layer: int, q: NDArray[np.float32]
    ) -> _InFlight | DeviceError:
        """Fill a buffer and give it to a core; or why there is none that takes it."""
        if core is None:
            return DeviceError("no NPU core is left: all are in quarantine, see the log")
        buffer = self._acquire(planned.copy, layer)
        if buffer is None:
            return DeviceError("no staging buffer is left: jobs that never ended hold them")
        try:
            buffer.fill(self._cache, planned.launch.plan, layer)
            canary = planned.launch.write(buffer, q)
            buffer.sync_to_device()
            run = self._device.submit(AttentionJob.over(buffer), core)
        except DeviceError as error:
            buffer.release()
            self.cores.refused(core, error)
            return without_frames(error)
        except BaseException:
            buffer.release()
            raise
        self.cores.started(core)
        return _InFlight(planned, buffer, canary, core, run)

    def _result(self, done: _InFlight, out: NDArray[np.float32]) -> DeviceError | None:
        """Wait for a run and read its result; or why there is none. The run's buffer is let go."""
        try:
            done.run.wait()
            done.buffer.sync_from_device()
            done.canary.check(done.buffer.out)
            done.planned.launch.read_out(done.buffer, out)
        except DeviceError as error:
            self.cores.failed(done.core, error, ended=done.run.ended)
            return without_frames(error)
        except BaseException:
            self.cores.abandoned(done.core)
            raise
        finally:
            self._let_go(done)
        self.cores.worked(done.core)
        return None

    def _abandon(self, left: _InFlight) -> None:
        """Wait for a run whose result nobody wants."""
        try:
            with contextlib.suppress(DeviceError):
                left.run.wait()
        finally:
            self.cores.abandoned(left.core)
            self._let_go(left)

    def _on_host(
        self, launch: Launch, layer: int, q: NDArray[np.float32], out: NDArray[np.float32], error: DeviceError
    ) -> None:
        if self._host is None:
            raise error
        self.cores.on_host += 1
        self._host.attend(launch.share, layer, q, out)

    def _acquire(self, copy: ResidentCopy | None, layer: int) -> StagingBuffer | None:
        """A buffer to fill: the one in which the launch's K and V stay staged, or any; None if there is none."""
        buffer = None if copy is None else copy.acquire(layer)
        if buffer is None and self._arena.free:
            return self._arena.acquire()
        return buffer

    def _let_go(self, done: _InFlight) -> None:
        """Free a run's buffer, if it is not the device's still."""
        if done.run.ended:
            done.buffer.release()
        else:
            self._stuck.append(done)

    def _take_back(self) -> None:
        """Free the buffers of runs that ended after all."""
        stuck, self._stuck = self._stuck, []
        for run in stuck:
            self._let_go(run)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this attention runtime is closed: make a new one")
        check_process(self._process)


def _check_residency(device: AttentionDevice, resident_bytes: int) -> None:
    if not device.reads_in_place:
        raise UsageError(
            f"{resident_bytes} bytes are asked for to keep sequences staged, but the {device.name} device copies "
            "what it is given: that would save nothing, leave it at 0",
            resident_bytes=resident_bytes,
        )

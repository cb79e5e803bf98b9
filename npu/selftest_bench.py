"""Single launches of a device, over a cache of noise, held against attention in float64."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.errors import DeviceError, RegionError
from hostcache.geometry import KVGeometry
from hostcache.region import Region
from staging import Buckets, StagingArena, StagingBuffer

from .attention import AttentionBatch
from .attention_export import launch_sizes
from .attention_graph import attention_graphs
from .canary import Canary
from .device import AttentionDevice, AttentionJob, AttentionRun, without_frames
from .launch import TILES, Cut, Launch, LaunchPlanner, capacity

__all__ = ["Bench", "LaunchShape", "Started"]

_LARGEST = 2.0
"""Of the noise in K and V: up to here the result's own rounding costs 2^-11 at most."""


def _ordinary_memory(nbytes: int, _buffer_bytes: int) -> Region:
    return Region.anonymous(nbytes)


@dataclass(frozen=True)
class LaunchShape:
    """A launch that graphs were compiled for.

    Attributes:
        kind: of the graph, such as `decode`.
        tile: query tokens of each sequence.
        batch: sequences.
        tokens: the bucket.
    """

    kind: str
    tile: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} {self.batch} x {self.tokens}"


@dataclass(frozen=True, eq=False)
class Started:
    """A launch that a core works on."""

    launch: Launch
    buffer: StagingBuffer
    canary: Canary
    run: AttentionRun


class Bench:
    """A device with an arena and a cache that is full of noise, all of one layer.

    Args:
        geometry: of the model.
        heads: its query heads.
        open_device: makes the device over the arena's memory; the bench owns it from then on.
        buckets: tokens that graphs are there for.
        batches: sequences of a decode launch that graphs are there for.
        cores: of the device.
        take: where the arena's memory comes from, by its size in bytes and those of each buffer.

    Attributes:
        device: as made.
        shapes: every launch that rockpage makes of these buckets and batches.
        stuck: whether a run did not end; then the device must get no more of them.

    Raises:
        RockpageError: the memory is not there, or the device cannot be opened.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        heads: int,
        open_device: Callable[[NDArray[np.uint8]], AttentionDevice],
        *,
        buckets: Sequence[int],
        batches: Sequence[int],
        cores: int,
        take: Callable[[int, int], Region] = _ordinary_memory,
    ) -> None:
        geometry = replace(geometry, layers=1)
        self.heads = heads
        self.shapes = _shapes(geometry, heads, buckets, batches)
        self.stuck = False
        self._buckets = Buckets(buckets)
        self._random = np.random.default_rng(0)
        self.cache = PagedKVCache.create(geometry, geometry.blocks_for(self._buckets.largest) * geometry.block_bytes)
        self.cache.pool.allocate(self.cache.blocks)
        _fill_with_noise(self.cache, self._random)
        sizes = LaunchPlanner(geometry, self.cache.blocks, heads, self._buckets, batches=batches)
        nbytes = StagingArena.bytes_for(cores, sizes.buffer_bytes)
        region = None
        try:
            region = take(nbytes, nbytes // cores)
            self.device = open_device(region.buffer)
        except BaseException:
            with contextlib.suppress(RegionError):  # the error's frames may hold views; the memory goes with them
                if region is not None:
                    region.close()
            self.cache.close()
            raise
        self._planner = LaunchPlanner(
            geometry, self.cache.blocks, heads, self._buckets, batches=batches, tiled=self.device.tiled
        )
        self._arena = StagingArena(region, cores, self.device)

    def batch(self, shape: LaunchShape) -> AttentionBatch:
        """Sequences that this launch is made for: of random lengths that its bucket is the smallest for."""
        sizes = self._buckets.sizes
        longest = capacity(shape.tokens)
        rows = min(shape.tile, longest)
        shortest = max(rows, capacity(sizes[sizes.index(shape.tokens) - 1]) + 1 if shape.tokens > sizes[0] else 1)
        lengths = self._random.integers(shortest, longest, shape.batch, np.int32, endpoint=True)
        lengths[0] = longest
        blocks = range(shape.batch)
        tables = np.stack([self._random.permutation(self.cache.blocks) for _ in blocks]).astype(np.int32)
        return AttentionBatch(np.arange(shape.batch + 1, dtype=np.int32) * np.int32(rows), lengths, tables)

    def query(self, batch: AttentionBatch) -> NDArray[np.float32]:
        """Random `[rows, heads, head_dim]`."""
        shape = (batch.rows, self.heads, self.cache.geometry.head_dim)
        return self._random.standard_normal(shape, np.float32)

    def cut(self, batch: AttentionBatch) -> Cut:
        """The one launch of a batch from `batch`."""
        (cut,) = self._planner.cut(batch, np.arange(batch.sequences))
        return cut

    def launch(self, cut: Cut) -> Launch:
        """Its plan."""
        return self._planner.launch(cut)

    def start(self, launch: Launch, q: NDArray[np.float32], core: int, *, old: str | None = None) -> Started:
        """Stage a launch and give it to a core; what the result's place holds before is no number.

        Args:
            launch: its plan.
            q: as from `query`.
            core: that runs it.
            old: an operand that is left as the launch before had it, in all else the same: `keys`, for example.

        Raises:
            DeviceError: the core did not take it, or an earlier launch never ended.
        """
        if self.stuck:
            raise DeviceError("an earlier job never ended, so the NPU is given no more: see the kernel's log")
        buffer = self._arena.acquire()
        try:
            buffer.fill(self.cache, launch.plan, 0)
            canary = launch.write(buffer, q)
            if old is not None:
                before = getattr(buffer, old).copy()
                canary = launch.write(buffer, q)
                getattr(buffer, old)[...] = before
            buffer.out[...] = np.nan
            buffer.sync_to_device()
            run = self.device.submit(AttentionJob.over(buffer), core)
        except BaseException:
            buffer.release()
            raise
        return Started(launch, buffer, canary, run)

    @contextlib.contextmanager
    def result(self, started: Started) -> Iterator[NDArray[np.float16]]:
        """Wait for a launch, and lend what it wrote, fp16 `[heads, rows, head_dim]`, which is proven to be its own.

        Raises:
            DeviceError: it failed, did not end in time, or the result is not that of this launch.
        """
        try:
            started.run.wait()
            started.buffer.sync_from_device()
            started.canary.check(started.buffer.out)
            yield started.buffer.out
        finally:
            if started.run.ended:
                started.buffer.release()
            else:
                self.stuck = True

    def run(
        self, launch: Launch, queries: Mapping[int, NDArray[np.float32]]
    ) -> tuple[list[NDArray[np.float32] | DeviceError], float]:
        """Run a launch on some cores, on all of them before the first is waited for.

        Args:
            launch: the same for all.
            queries: by core.

        Returns:
            Each core's result, as `q` has it, or why there is none; and the seconds from gathering to the last result.
        """
        began = time.perf_counter()
        started: list[Started | DeviceError] = []
        for core, q in queries.items():
            try:
                started.append(self.start(launch, q, core))
            except DeviceError as error:  # noqa: PERF203 - one for each core
                started.append(without_frames(error))
        outs = [self._finish(one, q.shape) for one, q in zip(started, queries.values(), strict=True)]
        return outs, time.perf_counter() - began

    def _finish(self, started: Started | DeviceError, shape: tuple[int, ...]) -> NDArray[np.float32] | DeviceError:
        if isinstance(started, DeviceError):
            return started
        out = np.full(shape, np.nan, np.float32)
        try:
            with self.result(started):
                started.launch.read_out(started.buffer, out)
        except DeviceError as error:
            return without_frames(error)
        return out

    def close(self) -> None:
        """Give back the device and all memory, but what a run that never ended still uses."""
        self.device.close()
        if self.stuck:
            return
        with contextlib.suppress(RegionError):  # an error's frames may hold views: the memory goes with them
            self._arena.close()
            self.cache.close()


def _fill_with_noise(cache: PagedKVCache, random: np.random.Generator) -> None:
    """Up to `_LARGEST`, in all blocks; a part at a time, since it is made in float32."""
    elements = cache.buffer[: cache.blocks * cache.geometry.block_bytes].view(np.float16)
    for part in np.array_split(elements, -(-len(elements) // (1 << 20))):
        part[...] = random.standard_normal(len(part), np.float32).clip(-_LARGEST, _LARGEST)


def _shapes(
    geometry: KVGeometry, heads: int, buckets: Sequence[int], batches: Sequence[int]
) -> tuple[LaunchShape, ...]:
    """Every launch, but those of a tile whose context is so short that a smaller tile holds it."""
    smaller = dict(zip(TILES, (1, *TILES), strict=False))
    sizes = launch_sizes(attention_graphs(geometry.kv_heads, heads, geometry.head_dim), buckets, batches)
    return tuple(
        LaunchShape(graph.kind, graph.tile, batch, tokens)
        for graph, launches in sizes.items()
        for batch, tokens in launches
        if capacity(tokens) > smaller.get(graph.tile, 0)
    )

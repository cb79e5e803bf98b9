"""Takes the timings that a cost model is made of: some seconds, on the device and on the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.errors import DeviceError, UsageError
from hostcache.geometry import KVGeometry
from hostcache.region import Region
from staging import StagingArena
from staging.coherent import CoherentMemory

from .attention import AttentionBatch, AttentionRuntime
from .canary import CANARY_TOKENS
from .cost_fit import Timing, Timings
from .cpu import CpuAttention
from .launch import TILES, Cut, capacity
from .staged import StagedAttention

__all__ = ["measure", "scratch_cache"]

_LAYERS = 4
"""Of the scratch cache: enough to be out of a board's caches (3 MiB on an RK3588) when their turn comes again."""

_SECONDS = 0.1
"""For each timing, of which there are some twenty."""

_FEWEST, _MOST = 5, 100
"""Runs for each timing, beside the first, which sets things up and does not count."""


def scratch_cache(geometry: KVGeometry, tokens: int) -> PagedKVCache:
    """A cache for one sequence of `tokens` tokens, full of noise.

    Args:
        geometry: of the model; four of its layers are enough.
        tokens: of the longest context.

    Raises:
        RegionError: the memory is not there.
    """
    geometry = replace(geometry, layers=min(geometry.layers, _LAYERS))
    cache = PagedKVCache.create(geometry, geometry.blocks_for(tokens) * geometry.block_bytes)
    cache.pool.allocate(cache.blocks)
    # Bits of fp16 numbers from 0 to 1: speed depends on none, as long as all are finite.
    elements = cache.buffer[: cache.blocks * geometry.block_bytes].view(np.uint16)
    elements[:] = np.random.default_rng(0).integers(0, 0x3C00, len(elements), np.uint16)
    return cache


def measure(staged: StagedAttention, host: CpuAttention, cache: PagedKVCache, heads: int) -> Timings:
    """Time launches of some sizes, up to the longest context that the cache and the device hold.

    Args:
        staged: over the cache, without a placement.
        host: over the cache, with the threads of the sessions to come.
        cache: from `scratch_cache`.
        heads: query heads.

    Raises:
        DeviceError: a launch failed, so that the host computed it.
        UsageError: the device has too few buckets to tell how costs grow.
    """
    longest = min(staged.capacity, cache.blocks * cache.geometry.block_tokens)
    parts = [capacity((longest + CANARY_TOKENS) // share) for share in (1, 4, 16, 64)]  # each fills its bucket, too
    contexts = [context for context in parts if context >= TILES[0]]
    rows = {context: _batch(cache, context, 1) for context in contexts}
    cuts = [_cut(staged, batch) for batch in rows.values()]
    if len({cut.layout.tokens for cut in cuts}) < 2:
        raise UsageError(
            f"contexts of {', '.join(map(str, contexts)) or 'so few'} tokens are all staged alike, and what they cost "
            "follows from how it grows: export the graphs with --buckets far apart, such as 64,256,1024,4096",
            contexts=contexts,
        )
    tiles = {context: _batch(cache, context, min(TILES[-1], context)) for context in contexts[:3]}
    timings = Timings(
        gather=[_gather(cache, cut, staged) for cut in cuts],
        device_row=[_attend(staged, batch, cache, heads, _cut(staged, batch)) for batch in rows.values()],
        device_tile=[_attend(staged, batch, cache, heads, _cut(staged, batch)) for batch in tiles.values()],
        host_row=[_attend(host, batch, cache, heads, _cut(staged, batch)) for batch in rows.values()],
        host_tile=[_attend(host, batch, cache, heads, _cut(staged, batch)) for batch in tiles.values()],
    )
    if staged.cores.failures:
        raise DeviceError(
            f"{staged.cores.failures} launches failed, so their times mean nothing: the log says why",
            failures=staged.cores.failures,
        )
    return timings


def _batch(cache: PagedKVCache, context: int, rows: int) -> AttentionBatch:
    blocks = np.arange(cache.blocks, dtype=np.int32)
    return AttentionBatch(np.array([0, rows], np.int32), np.array([context], np.int32), blocks[np.newaxis])


def _cut(staged: StagedAttention, batch: AttentionBatch) -> Cut:
    [cut] = staged.launches.cut(batch, np.zeros(1, np.int64))
    return cut


def _gather(cache: PagedKVCache, cut: Cut, staged: StagedAttention) -> Timing:
    plan = staged.launches.launch(cut).plan
    arena = StagingArena(Region.anonymous(StagingArena.bytes_for(1, plan.layout.nbytes)), 1, CoherentMemory())

    def fill(layer: int) -> None:
        buffer = arena.acquire()
        buffer.fill(cache, plan, layer)
        buffer.release()

    seconds = _median_seconds(fill, cache.geometry.layers)
    arena.close()
    return Timing(cut.work, seconds)


def _attend(runtime: AttentionRuntime, batch: AttentionBatch, cache: PagedKVCache, heads: int, cut: Cut) -> Timing:
    shape = (batch.rows, heads, cache.geometry.head_dim)
    q: NDArray[np.float32] = np.random.default_rng(1).standard_normal(shape, np.float32)
    out = np.empty_like(q)
    runtime.begin_step(batch)
    try:
        seconds = _median_seconds(lambda layer: runtime.attend(layer, q, out), cache.geometry.layers)
    finally:
        runtime.end_step()
    return Timing(cut.work, seconds)


def _median_seconds(run: Callable[[int], None], layers: int) -> float:
    """Of a run for one layer, each in turn."""
    run(0)
    taken: list[float] = []
    for layer in itertools.cycle(range(layers)):
        started = time.perf_counter()
        run(layer)
        taken.append(time.perf_counter() - started)
        if (len(taken) >= _FEWEST and sum(taken) >= _SECONDS) or len(taken) == _MOST:
            break
    return statistics.median(taken)

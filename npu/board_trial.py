"""Proves what a device is trusted with before anything depends on it: each graph, on each core, once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.errors import DeviceError
from hostcache.geometry import KVGeometry
from staging import Buckets, StagingBuffer

from .attention import AttentionBatch
from .cpu import CpuAttention
from .device import AttentionDevice, AttentionJob
from .launch import TILES, LaunchPlanner

__all__ = ["try_launches"]

_TOLERANCE = 0.05
"""Of results of about 1. Rounding to fp16 and the exponential cost less than 0.001 in the vendor's simulator; an
operand in another order, or one that the device did not see, about 1."""

_ROWS = (1, *(tile // 4 + 1 for tile in TILES))
"""Of three sequences: one row decodes, 5 are a tile of 16, and 17 one of 64."""

_LENGTH = max(_ROWS)
"""Tokens of each."""


def try_launches(
    device: AttentionDevice,
    memory: NDArray[np.uint8],
    geometry: KVGeometry,
    heads: int,
    *,
    buckets: Sequence[int],
    batches: Sequence[int],
) -> None:
    """Run a small launch of each graph on each core, and compare the results with the CPU's.

    Args:
        device: that reads `memory`.
        memory: uint8; the device's arena, not in use yet.
        geometry: of the model's cache.
        heads: query heads of the model.
        buckets: tokens that the graphs were exported for.
        batches: sequences of a decode launch, likewise.

    Raises:
        DeviceError: a launch failed, or its result is not fresh, or not right.
        RegionError: there is no memory for a cache of some blocks.
    """
    one_layer = KVGeometry(1, geometry.kv_heads, geometry.head_dim)
    random = np.random.default_rng(0)
    blocks = len(_ROWS) * one_layer.blocks_for(_LENGTH)
    with closing(PagedKVCache.create(one_layer, blocks * one_layer.block_bytes)) as cache:
        batch = _sequences(cache, random)
        q = random.standard_normal((batch.rows, heads, geometry.head_dim), np.float32)
        expected = _by_cpu(cache, batch, q)
        planner = LaunchPlanner(one_layer, cache.blocks, heads, Buckets(buckets), batches=batches, tiled=device.tiled)
        launches = [planner.launch(cut) for cut in planner.cut(batch, np.arange(len(_ROWS)))]
        buffer = StagingBuffer(0, 0, memory[: planner.buffer_bytes], device)
        for core in range(device.cores):
            out = np.zeros_like(q)
            for launch in launches:
                buffer.acquire()
                buffer.fill(cache, launch.plan, 0)
                canary = launch.write(buffer, q)
                buffer.sync_to_device()
                device.submit(AttentionJob.over(buffer), core).wait()
                buffer.sync_from_device()
                canary.check(buffer.out)
                launch.read_out(buffer, out)
                buffer.release()
            off = float(np.abs(out - expected).max())
            if not off <= _TOLERANCE:  # NaN is not
                raise DeviceError(
                    f"a trial of core {core} by the {device.name} runtime is off by {off:.3g}: the vendor's library or "
                    "driver does not do what rockpage knows of it, use another runtime",
                    core=core,
                    off=off,
                )


def _sequences(cache: PagedKVCache, random: np.random.Generator) -> AttentionBatch:
    """Random ones, which fill the cache."""
    geometry = cache.geometry
    tables = [cache.table() for _ in _ROWS]
    for table in tables:
        table.append(_LENGTH)
        keys, values = random.standard_normal((2, _LENGTH, geometry.kv_heads, geometry.head_dim), np.float32)
        cache.write(0, table.slots(0, _LENGTH), keys, values)
    starts = np.cumsum([0, *_ROWS], dtype=np.int32)
    return AttentionBatch(starts, np.full(len(_ROWS), _LENGTH, np.int32), np.stack([table.ids for table in tables]))


def _by_cpu(cache: PagedKVCache, batch: AttentionBatch, q: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.empty_like(q)
    with closing(CpuAttention(cache, q.shape[1])) as cpu:
        cpu.begin_step(batch)
        cpu.attend(0, q, out)
        cpu.end_step()
    return out

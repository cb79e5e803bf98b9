"""The self-test's step for staged copies that a device reads in place, and that grow from step to step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hostcache.cache import PagedKVCache
from hostcache.errors import DeviceError, MissingExtra, RegionError, UsageError
from hostcache.geometry import KVGeometry
from hostcache.table import BlockTable

from .attention import AttentionBatch
from .runtimes import open_runtime
from .selftest_oracle import LARGEST_ERROR, exact_attention
from .selftest_report import Step
from .staged import StagedAttention

__all__ = ["residency"]

_RESIDENT_BYTES = 16 << 20

_LENGTHS = (20, 37)
"""Tokens of the sequences before the first step; with those of all steps they stay in the smallest bucket."""

_STEPS = 8


def residency(runtime_name: str, geometry: KVGeometry, heads: int, graphs: Path | None) -> Step:
    """Does a copy that stays staged, and grows by a token in each step, bring the right result?

    Args:
        runtime_name: of a staged runtime that reads its arena in place.
        geometry: of the model.
        heads: its query heads.
        graphs: its graphs, if the runtime needs them.
    """
    name = "residency"
    geometry = replace(geometry, layers=1)
    cache = PagedKVCache.create(geometry, 8 * geometry.block_bytes)
    try:
        runtime = open_runtime(
            runtime_name, cache, heads, graphs=graphs, placement="device", resident_bytes=_RESIDENT_BYTES
        )
    except (DeviceError, MissingExtra, RegionError, UsageError) as error:
        cache.close()
        return Step(name, "not run", f"the runtime {runtime_name} does not open: {error}", needed=False)
    assert isinstance(runtime, StagedAttention)
    assert runtime.residency is not None
    try:
        off = _largest_error(cache, runtime, heads)
    finally:
        runtime.close()
        cache.close()
    counts, cores = runtime.residency.counts, runtime.cores
    figures = {"allowed_error": LARGEST_ERROR, "grown": counts.grown, "whole": counts.whole, "failures": cores.failures}
    words = f"{counts.grown} launches of {runtime_name} from copies that grew by a token"
    if cores.failures or not counts.grown:
        return Step(name, "failed", f"{words}; {cores.failures} launches failed, see the log", figures)
    if off > LARGEST_ERROR:
        return Step(name, "failed", f"{words}, off by {off:.1e}, {LARGEST_ERROR:g} is allowed", figures)
    return Step(name, "proved", f"{words}, off by {off:.1e} at most", {"largest_error": off, **figures})


def _largest_error(cache: PagedKVCache, runtime: StagedAttention, heads: int) -> float:
    """Of some steps that each decode one token of two sequences; infinite where a result is no number."""
    random = np.random.default_rng(2)
    geometry = cache.geometry
    tables = [cache.table() for _ in _LENGTHS]

    def extend(count: int, table: BlockTable) -> None:
        start = table.length
        table.append(count)
        keys, values = random.standard_normal((2, count, geometry.kv_heads, geometry.head_dim), np.float32)
        cache.write(0, table.slots(start, start + count), keys, values)

    for length, table in zip(_LENGTHS, tables, strict=True):
        extend(length, table)
    largest = 0.0
    for _ in range(_STEPS):
        for table in tables:
            extend(1, table)
        ids = np.full((len(tables), max(len(table.ids) for table in tables)), -1, np.int32)
        for row, table in zip(ids, tables, strict=True):
            row[: len(table.ids)] = table.ids
        lengths = np.array([table.length for table in tables], np.int32)
        batch = AttentionBatch(np.arange(len(tables) + 1, dtype=np.int32), lengths, ids)
        q = random.standard_normal((len(tables), heads, geometry.head_dim), np.float32)
        out = np.full_like(q, np.nan)
        runtime.begin_step(batch)
        try:
            runtime.attend(0, q, out)
        finally:
            runtime.end_step()
        errors = np.abs(out - exact_attention(cache, batch, q))
        largest = max(largest, float(np.nan_to_num(errors, nan=np.inf).max()))
    return largest

"""fp32 to fp16 and back, where the product does either to whole arrays, beside memcpy of the fp32 bytes.

K and V become fp16 as `PagedKVCache.write` scatters them; the emulated NPU widens what was staged. Attention on the CPU
widens what it reads in registers, so that is part of its own time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache
from npu.fp16 import widen
from staging._limits import ffi, lib

from .bench_rows import Row, take_turns, timed

__all__ = ["ROWS", "convert_rows"]

ROWS = 256
"""Tokens of a chunk of a prompt."""

SEED = 0


def convert_rows(geometry: KVGeometry, times: int) -> list[Row]:
    """Both directions for a chunk's K and V; layers take turns, what is converted was computed just before."""
    shape = (2, ROWS, geometry.kv_heads, geometry.head_dim)
    keys, values = fresh = np.random.default_rng(SEED).standard_normal(shape).astype(np.float32)
    size = f"{ROWS} tokens, {geometry.kv_heads} heads x {geometry.head_dim}"
    wide = np.empty_like(fresh)
    blocks = geometry.blocks_for(ROWS)
    with closing(PagedKVCache.create(geometry, blocks * geometry.block_bytes)) as cache:
        scatter = scattering(cache, keys, values)
        works = [timed(scatter), timed(copying(fresh, wide))]
        written, copied = take_turns(works, times)
    half = fresh.astype(np.float16)
    widened, copied_wide = take_turns([timed(partial(widen, half)), timed(copying(fresh, wide))], times)
    return [
        Row(f"write fp32 as fp16, {size}", "memcpy", written, copied, better="higher"),
        Row(f"widen fp16 to fp32, {size}", "memcpy", widened, copied_wide, better="higher"),
    ]


def scattering(cache: PagedKVCache, keys: NDArray[np.float32], values: NDArray[np.float32]) -> Callable[[], None]:
    """Write both into the next layer of a table of the cache."""
    table = cache.table()
    table.append(len(keys))
    slots, layers = table.slots(0, len(keys)), itertools.cycle(range(cache.geometry.layers))
    return lambda: cache.write(next(layers), slots, keys, values)


def copying(source: NDArray[np.float32], target: NDArray[np.float32]) -> Callable[[], None]:
    """One memcpy of all of it."""
    pointers = ffi.from_buffer("uint8_t[]", source), ffi.from_buffer("uint8_t[]", target)
    return partial(lib.rp_limit_copy, *pointers, source.nbytes)

"""Attention runtimes by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from hostcache.errors import UsageError
from staging import DEFAULT_BUCKETS

from .attention import AttentionRuntime
from .cpu import CpuAttention
from .device import AttentionDevice
from .discovery import discover
from .emulated import EmulatedAttention
from .fp16 import Rounding
from .launch import BATCHES
from .rknnlite_device import CORES, RknnLiteDevice
from .simulator_device import SimulatorDevice
from .staged import StagedAttention

if TYPE_CHECKING:
    from hostcache.cache import PagedKVCache

__all__ = ["RuntimeName", "open_runtime"]

RuntimeName = Literal["auto", "cpu", "emulated", "simulator", "rknnlite"]
"""`cpu` reads straight through the block table; the others go through staging: `emulated` to the strict emulated NPU,
`simulator` to the vendor's simulator, which is slow and needs rknn-toolkit2, `rknnlite` to a board's NPU.

`auto` is the fastest runtime that this machine has and that is proven here: the CPU.
"""


def open_runtime(
    name: str,
    cache: PagedKVCache,
    heads: int,
    *,
    threads: int = 1,
    rounding: Rounding = "output",
    graphs: str | os.PathLike[str] | None = None,
) -> AttentionRuntime:
    """Open an attention runtime over a cache; the caller closes it.

    Args:
        name: see `RuntimeName`.
        cache: where K and V lie; it must outlive the runtime.
        heads: query heads of the model.
        threads: threads of the `cpu` runtime, which also attends what the staged ones leave to the host.
        rounding: where the emulated NPU rounds to fp16.
        graphs: the folder that `rockpage export attention` wrote, for `rknnlite`.

    Raises:
        UsageError: no runtime has this name, it cannot serve this geometry, or it needs graphs and has none for it.
        BadModelFile: the folder of graphs is damaged.
        MissingExtra: what the runtime needs is not installed.
        DeviceError: the simulator's process did not start, or the NPU cannot be used.

    Example:
        >>> import numpy as np
        >>> from hostcache import KVGeometry, PagedKVCache
        >>> from npu.attention import AttentionBatch
        >>> from npu.runtimes import open_runtime
        >>> cache = PagedKVCache.create(KVGeometry(layers=1, kv_heads=1, head_dim=8), nbytes=1 << 20)
        >>> table = cache.table()
        >>> table.append(2)
        >>> keys, values = np.ones((2, 1, 8), np.float32), np.array([[[1.0] * 8], [[3.0] * 8]], np.float32)
        >>> cache.write(0, table.slots(0, 2), keys, values)
        >>> runtime, out = open_runtime("cpu", cache, heads=1), np.empty((1, 1, 8), np.float32)
        >>> runtime.begin_step(AttentionBatch(np.array([0, 1], np.int32), np.array([2], np.int32), table.ids[None]))
        >>> runtime.attend(0, np.ones((1, 1, 8), np.float32), out)
        >>> out[0, 0].tolist()  # equal keys: the mean of the values
        [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """
    if name in ("auto", "cpu"):
        return CpuAttention(cache, heads, threads)
    if name in ("emulated", "simulator", "rknnlite"):
        host = CpuAttention(cache, heads, threads)
        try:
            if name == "simulator":
                return _simulated(cache, heads, host)
            if name == "rknnlite":
                return _on_board(cache, heads, host, graphs)
            return EmulatedAttention(cache, heads, rounding, host=host)
        except BaseException:
            host.close()  # it holds on to the cache, which the caller is about to close
            raise
    raise UsageError(f"no runtime is called '{name}': use one of {', '.join(get_args(RuntimeName))}", runtime=name)


def _simulated(cache: PagedKVCache, heads: int, host: AttentionRuntime) -> AttentionRuntime:
    geometry = cache.geometry
    return _staged(cache, heads, host, SimulatorDevice(geometry.kv_heads, heads, geometry.head_dim))


def _on_board(
    cache: PagedKVCache, heads: int, host: AttentionRuntime, graphs: str | os.PathLike[str] | None
) -> AttentionRuntime:
    if graphs is None:
        raise UsageError(
            "the rknnlite runtime needs the model's attention graphs: rockpage export attention MODEL --out DIR, on an "
            "x86-64 machine, and --graphs DIR here"
        )
    geometry = cache.geometry
    npu = discover().npu
    cores = npu.cores if npu and npu.driver == "rknpu" else CORES  # if it is hidden; the vendor's runtime knows
    device = RknnLiteDevice(Path(graphs), geometry.kv_heads, heads, geometry.head_dim, cores=cores)
    return _staged(cache, heads, host, device, buckets=device.buckets, batches=device.batches)


def _staged(
    cache: PagedKVCache,
    heads: int,
    host: AttentionRuntime,
    device: AttentionDevice,
    *,
    buckets: Sequence[int] = DEFAULT_BUCKETS,
    batches: Sequence[int] = BATCHES,
) -> AttentionRuntime:
    """Staged attention over a device that is open already, and is closed if that fails."""
    try:
        return StagedAttention(
            cache, heads, lambda _memory: device, cores=device.cores, buckets=buckets, batches=batches, host=host
        )
    except BaseException:
        device.close()
        raise

"""Attention runtimes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from hostcache.errors import UsageError

from .attention import AttentionRuntime
from .cpu import CpuAttention
from .emulated import EmulatedAttention
from .fp16 import Rounding

if TYPE_CHECKING:
    from hostcache.cache import PagedKVCache

__all__ = ["RuntimeName", "open_runtime"]

RuntimeName = Literal["auto", "cpu", "emulated"]
"""`cpu` reads straight through the block table; `emulated` goes through staging and the strict emulated NPU.

`auto` is the fastest runtime that this machine has and that is proven here: the CPU.
"""


def open_runtime(
    name: str, cache: PagedKVCache, heads: int, *, threads: int = 1, rounding: Rounding = "output"
) -> AttentionRuntime:
    """Open an attention runtime over a cache; the caller closes it.

    Args:
        name: see `RuntimeName`.
        cache: where K and V lie; it must outlive the runtime.
        heads: query heads of the model.
        threads: threads of the `cpu` runtime, and of the fallback of `emulated`.
        rounding: where the emulated NPU rounds to fp16.

    Raises:
        UsageError: no runtime has this name, or it cannot serve this geometry.

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
    if name == "emulated":
        fallback = CpuAttention(cache, heads, threads)
        try:
            return EmulatedAttention(cache, heads, rounding, fallback=fallback)
        except BaseException:
            fallback.close()  # it holds on to the cache, which the caller is about to close
            raise
    raise UsageError(f"no runtime is called '{name}': use one of {', '.join(get_args(RuntimeName))}", runtime=name)

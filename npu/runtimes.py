"""Attention runtimes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from hostcache.errors import UsageError

from .attention import AttentionRuntime
from .cpu import CpuAttention
from .emulated import EmulatedAttention
from .fp16 import Rounding
from .simulator_device import SimulatorDevice
from .staged import StagedAttention

if TYPE_CHECKING:
    from hostcache.cache import PagedKVCache

__all__ = ["RuntimeName", "open_runtime"]

RuntimeName = Literal["auto", "cpu", "emulated", "simulator"]
"""`cpu` reads straight through the block table; the others go through staging: `emulated` to the strict emulated NPU,
`simulator` to the vendor's simulator, which is slow and needs rknn-toolkit2.

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
        threads: threads of the `cpu` runtime, which also attends what the staged ones leave to the host.
        rounding: where the emulated NPU rounds to fp16.

    Raises:
        UsageError: no runtime has this name, or it cannot serve this geometry.
        MissingExtra: what the runtime needs is not installed.
        DeviceError: the simulator's process did not start.
    """
    if name in ("auto", "cpu"):
        return CpuAttention(cache, heads, threads)
    if name in ("emulated", "simulator"):
        host = CpuAttention(cache, heads, threads)
        try:
            if name == "simulator":
                return _simulated(cache, heads, host)
            return EmulatedAttention(cache, heads, rounding, host=host)
        except BaseException:
            host.close()  # it holds on to the cache, which the caller is about to close
            raise
    raise UsageError(f"no runtime is called '{name}': use one of {', '.join(get_args(RuntimeName))}", runtime=name)


def _simulated(cache: PagedKVCache, heads: int, host: AttentionRuntime) -> AttentionRuntime:
    geometry = cache.geometry
    device = SimulatorDevice(geometry.kv_heads, heads, geometry.head_dim)
    try:
        return StagedAttention(cache, heads, lambda _memory: device, cores=device.cores, host=host)
    except BaseException:
        device.close()
        raise

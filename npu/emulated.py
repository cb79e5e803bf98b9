"""Attention on the strict emulated NPU."""

from __future__ import annotations

from collections.abc import Sequence

from hostcache.cache import PagedKVCache
from staging import DEFAULT_BUCKETS

from .attention import AttentionRuntime
from .emulated_device import EmulatedDevice, Faults
from .fp16 import Rounding
from .placement import Placement
from .staged import StagedAttention

__all__ = ["EmulatedAttention"]


class EmulatedAttention(StagedAttention):
    """Staged attention on a device that is not there, and that refuses whatever a board would suffer from.

    Args:
        cache: where K and V lie; it must outlive this object.
        heads: query heads, a multiple of the cache's KV heads.
        rounding: `"output"` or `"op"`, see `npu.fp16.Rounding`.
        cores: NPU cores; two staging buffers each.
        buckets: tokens, ascending multiples of 4; contexts are padded to the next one.
        host: attends what the device does not, over the same cache; owned from now on, closed by `close()`.
        faults: what the device gets wrong on purpose.
        tiled: stage K and V in the NPU's own order.
        placement: as in `StagedAttention`.
        resident_bytes: as in `StagedAttention`.
        windows: as in `StagedAttention`.

    Attributes:
        name: `"emulated"`.
        numerics: the name, the rounding and the buckets, which are the lengths of sums, and the host's numerics.

    Raises:
        UsageError: heads, buckets, rounding, cores or the cache's element size cannot be used.
        DimensionTooLarge: a bucket or a tile is beyond what the NPU's registers hold.
        RegionError: the memory for the staging arena is not there.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        heads: int,
        rounding: Rounding = "output",
        *,
        cores: int = 3,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        host: AttentionRuntime | None = None,
        faults: Faults | None = None,
        tiled: bool = False,
        placement: Placement | None = None,
        resident_bytes: int = 0,
        windows: Sequence[int] = (),
    ) -> None:
        super().__init__(
            cache,
            heads,
            lambda memory: EmulatedDevice(memory, rounding, cores, faults, tiled=tiled),
            cores=cores,
            buckets=buckets,
            host=host,
            placement=placement,
            resident_bytes=resident_bytes,
            windows=windows,
        )

"""What one layer of attention costs on the host and on a device, in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hostcache.errors import UsageError

__all__ = ["PUBLISHED", "CostModel", "Work"]


@dataclass(frozen=True)
class Work:
    """A launch's share of one layer.

    Attributes:
        kv_bytes: K and V of its contexts, in the cache.
        staged_bytes: everything that is staged for it, padded to a bucket.
        multiply_adds: of scores and of weighted values, over all query rows.
        gathered_bytes: of what is staged, what the host has to put there.
    """

    kv_bytes: int
    staged_bytes: int
    multiply_adds: int
    gathered_bytes: int


@dataclass(frozen=True)
class CostModel:
    """How fast a machine's parts are.

    The host reads K and V where they lie and computes, whichever takes longer. For a device the host gathers, one
    launch after the other; the device reads what was staged and computes, on its cores side by side.

    Attributes:
        launch_seconds: of one job, with everything that does not grow with it.
        gather_bytes_per_second: of staged bytes, by the host.
        device_bytes_per_second: of staged bytes, by one core.
        device_multiply_adds_per_second: of one core.
        host_bytes_per_second: of K and V, by the host's threads together.
        host_multiply_adds_per_second: of the host's threads together.
        cores: of the device.
        source: where the figures come from.

    Raises:
        UsageError: a figure is not positive and finite.
    """

    launch_seconds: float
    gather_bytes_per_second: float
    device_bytes_per_second: float
    device_multiply_adds_per_second: float
    host_bytes_per_second: float
    host_multiply_adds_per_second: float
    cores: int
    source: str

    def __post_init__(self) -> None:
        for name, value in self.figures().items():
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value!r}, it must be a positive number", name=name, value=value)

    def figures(self) -> Mapping[str, float]:
        """Everything but the source, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "source"}

    def on_host(self, work: Work) -> float:
        """Seconds that the host takes."""
        return max(work.kv_bytes / self.host_bytes_per_second, work.multiply_adds / self.host_multiply_adds_per_second)

    def on_device(self, work: Work, launches: int = 1) -> float:
        """Seconds that a launch adds to a step, the host's gathering included.

        Args:
            work: of the launch.
            launches: of the step; as many as there are cores run side by side.
        """
        gather = work.gathered_bytes / self.gather_bytes_per_second
        compute = max(
            work.staged_bytes / self.device_bytes_per_second,
            work.multiply_adds / self.device_multiply_adds_per_second,
        )
        return gather + (self.launch_seconds + compute) / min(self.cores, launches)


PUBLISHED = CostModel(
    launch_seconds=0.4e-3,
    gather_bytes_per_second=10e9,
    device_bytes_per_second=9.4e9,
    device_multiply_adds_per_second=200e9,
    host_bytes_per_second=5e9,
    host_multiply_adds_per_second=20e9,
    cores=3,
    source="published figures of RK3588 boards, not measured on this one: run `rockpage calibrate`",
)
"""An RK3588 that nobody measured.

Sources: a submit takes 0.365 ms at the least (ork-driver, DFLASH_IOVA_DOMAIN_WIP.md), and Python adds to it. One
thread copies 10.1 GB/s (Orange Pi 5, ggml-org/whisper.cpp#89). Attention over 4096 cached tokens reads its K and V at
9.4 GB/s on one core, and a chunk of 32 queries of 32 heads of 128 over them takes 3.85 ms there, which is 280e9
multiply-adds a second (happyme531/rknpu2_matmul_open, docs/ATTENTION.md); the vendor's graph is taken to be a third
slower. Of the host, no figure is published: the CPU kernel takes about twice as long as a copy of the same bytes (on
x86-64), and four Cortex-A76 at 2.4 GHz with two 128-bit pipes reach 77e9 fp32 multiply-adds a second at the most, of
which it gets a quarter.
"""

"""Ways to an NPU that the self-test tries: each opens a bench over a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hostcache.geometry import KVGeometry
from hostcache.region import Region
from staging import DEFAULT_BUCKETS

from .board import Npu
from .emulated_device import EmulatedDevice
from .launch import BATCHES
from .rknnlite_device import RknnLiteDevice
from .rknnrt import LIBRARY
from .rknnrt_device import RknnrtDevice
from .runtime_choice import heaps_for
from .selftest_bench import Bench
from .selftest_launches import at_once, faults, launches, old_results
from .selftest_report import Step

__all__ = ["EMULATED", "ON_A_BOARD", "Heads", "Way", "open_bench"]

EMULATED_CORES = 3
"""As many as an RK3588 has."""


@dataclass(frozen=True)
class Heads:
    """What attention is tried with: heads of the cache, and of the query."""

    geometry: KVGeometry
    query: int


@dataclass(frozen=True)
class Way:
    """One way to launch attention.

    Attributes:
        runtime: whose device it is.
        suffix: of its steps' names.
        steps: over a bench, by name.
        needed: whether the whole is incomplete without it.
    """

    runtime: str
    suffix: str
    steps: Mapping[str, Callable[[Bench], Step]]
    needed: bool = True


_STEPS: Mapping[str, Callable[[Bench], Step]] = {
    "launches": launches,
    "cores at once": at_once,
    "old results": old_results,
    "faults": faults,
}

_IN_PLACE: Mapping[str, Callable[[Bench], Step]] = {"launches": launches, "cores at once": at_once}

EMULATED = (Way("emulated", "", _STEPS),)
"""Ways to try without a board."""

ON_A_BOARD = (Way("rknnlite", "", _STEPS), Way("rknnrt", " in place", _IN_PLACE, needed=False))
"""Ways to try on a board; the NPU is proved without the second."""


def open_bench(way: Way, npu: Npu | None, graphs: Path | None, heads: Heads) -> Bench:
    """A bench over a new device; the caller closes it.

    Args:
        way: one of `EMULATED`, or with a board's NPU and graphs one of `ON_A_BOARD`.
        npu: the board's.
        graphs: the board's.
        heads: of the graphs, or what the emulated NPU is to be tried with.

    Raises:
        RockpageError: the device cannot be opened, or there is no memory.
    """
    if npu is None or graphs is None:
        return _open_emulated(heads)
    geometry, cores = heads.geometry, npu.cores
    model = (graphs, geometry.kv_heads, heads.query, geometry.head_dim)
    if way.runtime == "rknnlite":
        return _bench(heads, RknnLiteDevice(*model, cores=cores))
    device = RknnrtDevice(*model, cores=cores, library=LIBRARY, heaps=heaps_for(npu))
    return _bench(heads, device, take=device.take)


def _open_emulated(heads: Heads) -> Bench:
    return Bench(
        heads.geometry,
        heads.query,
        lambda memory: EmulatedDevice(memory, cores=EMULATED_CORES),
        buckets=DEFAULT_BUCKETS,
        batches=BATCHES,
        cores=EMULATED_CORES,
    )


def _bench(heads: Heads, device: RknnLiteDevice | RknnrtDevice, **take: Callable[[int, int], Region]) -> Bench:
    """Over a board's device, which is closed if that fails."""
    try:
        return Bench(
            heads.geometry,
            heads.query,
            lambda _memory: device,
            buckets=device.buckets,
            batches=device.batches,
            cores=device.cores,
            **take,
        )
    except BaseException:
        device.close()
        raise

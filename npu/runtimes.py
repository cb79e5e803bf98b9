"""Attention runtimes by name."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError, RegionError, UsageError

from .attention import AttentionRuntime
from .board_device import CORES
from .board_trial import try_launches
from .calibration import CalibrationKey, load_cost_model
from .cost_model import PUBLISHED
from .cpu import CpuAttention
from .device import AttentionDevice
from .discovery import discover
from .emulated_device import EmulatedDevice
from .fp16 import Rounding
from .placement import ByCost, Placement
from .rknnlite_device import RknnLiteDevice
from .rknnrt import LIBRARY
from .rknnrt_device import RknnrtDevice
from .runtime_choice import choose, heaps_for, vendor_npu
from .simulator_device import SimulatorDevice
from .staged import StagedAttention
from .weights_cache import default_cache_dir

if TYPE_CHECKING:
    from hostcache.cache import PagedKVCache

__all__ = ["PlacementName", "RuntimeName", "first_choice", "open_runtime"]

RuntimeName = Literal["auto", "cpu", "emulated", "simulator", "rknnlite", "rknnrt"]
"""`cpu` reads straight through the block table; the others go through staging: `emulated` to the strict emulated NPU,
`simulator` to the vendor's simulator, which is slow and needs rknn-toolkit2, `rknnlite` and `rknnrt` to a board's NPU:
the one by the vendor's Python wheel, which copies, the other by its C library, which reads in place.

`auto` is for a machine that has an NPU with the vendor's driver, and its graphs: `rknnrt` if there are librknnrt.so and
a DMA heap that this user may open, and if trial launches on each core are right, which no board has shown so far; else
`rknnlite`, which memory for what stays staged is of no use to. On other machines, and without graphs, it is `cpu`.
"""

PlacementName = Literal["device", "cost"]
"""What a staged runtime's device attends: `device`, all that fits its buckets; `cost`, what takes it less time than the
CPU, by `rockpage calibrate` or else by published figures."""

_log = logging.getLogger(__name__)


def open_runtime(
    name: str,
    cache: PagedKVCache,
    heads: int,
    *,
    threads: int = 1,
    rounding: Rounding = "output",
    graphs: str | os.PathLike[str] | None = None,
    placement: PlacementName | None = None,
    resident_bytes: int = 0,
    windows: Sequence[int] = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> AttentionRuntime:
    """Open an attention runtime over a cache; the caller closes it.

    Args:
        name: see `RuntimeName`.
        cache: where K and V lie; it must outlive the runtime.
        heads: query heads of the model.
        threads: threads of the `cpu` runtime, which also attends what the staged ones leave to the host.
        rounding: where the emulated NPU rounds to fp16.
        graphs: the folder that `rockpage export attention` wrote, for `rknnlite` and `rknnrt`.
        placement: see `PlacementName`; None: by cost for `auto`, else what was asked for.
        resident_bytes: memory in which decoding sequences stay staged; for devices that read it in place.
        windows: of each layer, the newest tokens that its rows see at most, 0: all; empty: no layer has one.
        cache_dir: where calibrations are kept; None: the user's cache folder.

    Raises:
        UsageError: no runtime has this name, it cannot serve this geometry, it needs graphs and has none for it, or it
            has no use for `resident_bytes`.
        BadModelFile: the folder of graphs is damaged.
        MissingExtra: what the runtime needs is not installed.
        DeviceError: the simulator's process did not start, or the NPU cannot be used.
        RegionError: the memory for staging is not there.

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
    if name not in get_args(RuntimeName):
        raise UsageError(f"no runtime is called '{name}': use one of {', '.join(get_args(RuntimeName))}", runtime=name)
    if placement not in (None, *get_args(PlacementName)):
        raise UsageError(
            f"no placement is called '{placement}': use one of {', '.join(get_args(PlacementName))}",
            placement=placement,
        )
    open_named = functools.partial(
        _open,
        cache=cache,
        heads=heads,
        threads=threads,
        rounding=rounding,
        graphs=graphs,
        resident_bytes=resident_bytes,
        windows=windows,
        cache_dir=cache_dir,
    )
    if name != "auto":
        return open_named(name, placement=placement)
    placement = placement or "cost"
    candidates, why = choose(discover(), graphs=graphs is not None, library=LIBRARY, resident=bool(resident_bytes))
    for_nothing = graphs is not None and candidates == ["cpu"]
    _log.log(logging.WARNING if for_nothing else logging.INFO, "attention runtime %s: %s", candidates[0], why)
    for candidate, next_best in pairwise(candidates):
        try:
            return open_named(candidate, placement=placement)
        except (DeviceError, RegionError) as error:  # noqa: PERF203 - two at most
            _log.warning("the %s runtime cannot be used, so %s is: %s", candidate, next_best, str(error))
    return open_named(candidates[-1], placement=placement)


def first_choice(name: str, graphs: str | os.PathLike[str] | None) -> str:
    """The runtime that a name opens if nothing is in the way; see `open_runtime`."""
    if name != "auto":
        return name
    candidates, _ = choose(discover(), graphs=graphs is not None, library=LIBRARY)
    return candidates[0]


def _open(
    name: str,
    *,
    cache: PagedKVCache,
    heads: int,
    threads: int,
    rounding: Rounding,
    graphs: str | os.PathLike[str] | None,
    placement: PlacementName | None,
    resident_bytes: int,
    windows: Sequence[int],
    cache_dir: str | os.PathLike[str] | None,
) -> AttentionRuntime:
    if name == "cpu":
        if resident_bytes:
            raise UsageError(
                f"the cpu runtime stages nothing, so it cannot keep {resident_bytes} bytes of it: leave them at 0",
                resident_bytes=resident_bytes,
            )
        return CpuAttention(cache, heads, threads, windows=windows)
    by_cost = ByCost(PUBLISHED)
    calibrations = Path(cache_dir or default_cache_dir()) if placement == "cost" else None
    host = CpuAttention(cache, heads, threads, windows=windows)
    try:
        runtime = _open_staged(
            name,
            cache,
            heads,
            rounding,
            graphs,
            host=host,
            placement=None if calibrations is None else by_cost,
            resident_bytes=resident_bytes,
            windows=windows,
        )
    except BaseException:
        host.close()  # it holds on to the cache, which the caller is about to close
        raise
    if calibrations is not None:  # what they must have been measured for is known only now
        key = CalibrationKey.here(runtime.numerics, cache.geometry, heads, threads)
        by_cost.model = load_cost_model(key, calibrations, cores=runtime.cores.count)
    return runtime


def _open_staged(
    name: str,
    cache: PagedKVCache,
    heads: int,
    rounding: Rounding,
    graphs: str | os.PathLike[str] | None,
    *,
    host: AttentionRuntime,
    placement: Placement | None,
    resident_bytes: int,
    windows: Sequence[int],
) -> StagedAttention:
    staged = functools.partial(
        StagedAttention,
        cache,
        heads,
        host=host,
        placement=placement,
        resident_bytes=resident_bytes,
        windows=windows,
    )
    geometry = cache.geometry
    if name == "emulated":
        return staged(lambda memory: EmulatedDevice(memory, rounding))
    if name == "simulator":
        simulator = SimulatorDevice(geometry.kv_heads, heads, geometry.head_dim)
        with _closed_on_error(simulator):
            return staged(lambda _memory: simulator, cores=simulator.cores)
    if graphs is None:
        raise UsageError(
            f"the {name} runtime needs the model's attention graphs: rockpage export attention MODEL --out DIR, on an "
            "x86-64 machine, and --graphs DIR here"
        )
    npu = vendor_npu(discover())
    cores = npu.cores if npu else CORES  # it may be hidden; the vendor's runtime knows
    model = (Path(graphs), geometry.kv_heads, heads, geometry.head_dim)
    if name == "rknnlite":
        copying = RknnLiteDevice(*model, cores=cores)
        with _closed_on_error(copying):
            return staged(lambda _memory: copying, cores=cores, buckets=copying.buckets, batches=copying.batches)
    device = RknnrtDevice(*model, cores=cores, library=LIBRARY, heaps=heaps_for(npu))
    buckets, batches = device.buckets, device.batches

    def tried(memory: NDArray[np.uint8]) -> RknnrtDevice:
        try_launches(device, memory, geometry, heads, buckets=buckets, batches=batches)
        return device

    with _closed_on_error(device):
        return staged(tried, cores=cores, take=device.take, buckets=buckets, batches=batches)


@contextmanager
def _closed_on_error(device: AttentionDevice) -> Iterator[None]:
    try:
        yield
    except BaseException:
        device.close()
        raise

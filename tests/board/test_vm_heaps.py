"""Regions from the kernel's own DMA heaps. Run by `make test-vm`: elsewhere there are none, and these fail."""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np
import pytest

from hostcache import HeapRegion, KVGeometry, Region
from hostcache.errors import RegionError
from hostcache.memory_budget import meminfo_bytes
from staging import StagingArena
from tests.board.vm import CMA_MIB
from tests.hostcache.fake_heaps import open_descriptors
from tests.staging.flat import flat, noisy_cache, plan_of

pytestmark = pytest.mark.vm

MIB = 1 << 20
CMA = "reserved"  # the CMA heap's name on Linux 6.1 with `cma=` on the command line


def cma_free() -> int:
    nbytes = meminfo_bytes("CmaFree")
    assert nbytes is not None, "not in the VM: the kernel has no CMA"
    return nbytes


def is_about(nbytes: int, expected: int) -> bool:
    """Pages just freed wait on a list of the CPU's own and are not counted yet: up to 4 MiB in this machine."""
    return abs(nbytes - expected) <= 4 * MIB


def seen_by_others(region: HeapRegion, piece: int) -> mmap.mmap:
    """What a driver sees that imports the piece: a mapping of its own of the same pages."""
    descriptor, offset = region.dma_buf_at(piece * region.piece_bytes)
    assert offset == 0
    return mmap.mmap(descriptor, region.piece_bytes, flags=mmap.MAP_SHARED)


@pytest.mark.parametrize(("heap", "of_cma"), [(CMA, 24 * MIB), ("system", 0)])
def test_what_the_host_writes_is_in_the_dma_buf_and_back(heap: str, of_cma: int) -> None:
    free, descriptors = cma_free(), open_descriptors()
    region = Region.dma_heap(24 * MIB, pieces=3, heaps=[heap])
    assert region.heap == heap
    assert is_about(free - cma_free(), of_cma)
    assert not region.buffer.any()
    numbers = np.arange(6 * MIB, dtype=np.uint32)  # no two pages alike
    region.buffer.view(np.uint32)[:] = numbers
    region.sync_to_device(0, 24 * MIB)
    for piece in range(3):
        device = seen_by_others(region, piece)
        assert device[:] == numbers[piece * 2 * MIB : (piece + 1) * 2 * MIB].tobytes()
        device[:4] = b"done"
        device.close()
    region.sync_from_device(0, 24 * MIB)
    for piece in range(3):
        assert region.buffer[piece * 8 * MIB :][:4].tobytes() == b"done"
    region.close()
    assert is_about(cma_free(), free)
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("heap", [CMA, "system"])
def test_a_staging_arena_lies_in_a_heap(heap: str) -> None:
    geometry = KVGeometry(layers=2, kv_heads=2, head_dim=64)
    cache = noisy_cache(geometry, 12)
    tables, lengths = [[7, 2, 9], [11, 0]], [37, 32]
    plan = plan_of(cache, tables, lengths, tokens=64, mask_rows=4)
    nbytes = StagingArena.bytes_for(2, plan.layout.nbytes)
    region = Region.dma_heap(nbytes, pieces=2, heaps=[heap])
    region.buffer[:] = 0xEE
    arena = StagingArena(region, 2, region)
    arena.acquire()
    buffer = arena.acquire()  # the second: in a dma-buf of its own
    buffer.fill(cache, plan, layer=1)
    buffer.sync_to_device()
    device = seen_by_others(region, 1)
    expected = flat(cache, tables, lengths, 64, layer=1)
    layout = plan.layout
    for which, start in ((0, layout.keys_offset), (1, layout.values_offset)):
        assert device[start : start + expected[which].nbytes] == expected[which].tobytes()
    buffer.launch()
    device[layout.out_offset : layout.out_offset + 2] = np.float16(1.5).tobytes()
    device.close()
    buffer.sync_from_device()
    assert buffer.out[0, 0, 0] == 1.5
    buffer.release()
    del buffer
    arena.close()
    cache.close()


def test_contiguous_memory_comes_first_and_pages_when_it_is_gone() -> None:
    first = Region.dma_heap(MIB)
    assert first.heap == CMA
    first.close()
    taken = exhaust(8 * MIB)
    with pytest.raises(
        RegionError, match=r"1 x 8\.0 MiB for DMA \(heap reserved: Cannot allocate memory, CmaFree .* a larger cma="
    ) as caught:
        Region.dma_heap(8 * MIB, heaps=[CMA])
    assert caught.value.values["errno"] == {CMA: errno.ENOMEM}
    instead = Region.dma_heap(8 * MIB)
    assert instead.heap == "system"
    for region in (instead, *taken):
        region.close()


def test_nothing_leaks_when_a_heap_runs_out_in_the_middle() -> None:
    free, descriptors = cma_free(), open_descriptors()
    with pytest.raises(RegionError, match="Cannot allocate memory"):
        Region.dma_heap(2 * CMA_MIB * MIB, pieces=2 * CMA_MIB // 8, heaps=[CMA])
    assert is_about(cma_free(), free)
    assert open_descriptors() == descriptors


def test_heaps_are_closed_to_others_than_root() -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(RegionError, match=r"heap reserved: Permission denied.*; heap system: Permission.*udev"):
            Region.dma_heap(MIB)
    finally:
        os.seteuid(0)


def exhaust(nbytes: int) -> list[HeapRegion]:
    """Buffers of `nbytes` until CMA gives no more."""
    taken = []
    try:
        while True:
            taken.append(Region.dma_heap(nbytes, heaps=[CMA]))
    except RegionError:
        return taken

"""Which heap is taken, what a sync touches, what is said when there is nothing to take; the ioctls are stood in for."""

from __future__ import annotations

import errno
import grp
import mmap
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hostcache import HeapRegion, Region, dma_heap
from hostcache.errors import DeviceError, RegionError, UsageError
from hostcache.memory_budget import MemoryBudget
from staging import StagingArena
from tests.hostcache.fake_heaps import FakeHeaps, open_descriptors

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def heaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **budget: int) -> FakeHeaps:
    return FakeHeaps(tmp_path / "dma_heap", budget, monkeypatch)


def test_pieces_are_dma_bufs_of_their_own_and_one_range_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = heaps(tmp_path, monkeypatch, cma=MIB)
    region = HeapRegion(6 * PAGE, 3, directory=kernel.directory)
    assert (region.kind, region.heap, region.nbytes, region.piece_bytes) == ("dma heap", "cma", 6 * PAGE, 2 * PAGE)
    region.buffer[:] = np.repeat(np.array([1, 2, 3], np.uint8), 2 * PAGE)
    for nth, fd in enumerate(kernel.handed_out):
        assert os.pread(fd, 3 * PAGE, 0) == bytes([nth + 1]) * (2 * PAGE)
        assert region.dma_buf_at(nth * 2 * PAGE + 5) == (fd, 5)
        assert region.dma_buf_at(nth * 2 * PAGE + 2 * PAGE - 1) == (fd, 2 * PAGE - 1)
    region.close()
    region.close()


def test_a_sync_touches_the_pieces_of_its_range_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = heaps(tmp_path, monkeypatch, cma=MIB)
    region = HeapRegion(4 * PAGE, 4, directory=kernel.directory)
    assert kernel.synced == [
        ("begin", 0),
        ("begin", 1),
        ("begin", 2),
        ("begin", 3),
    ]  # the host may write from the start
    kernel.synced.clear()
    region.sync_to_device(PAGE, PAGE)
    region.sync_from_device(2 * PAGE - 1, 2)
    region.sync_to_device(4 * PAGE - 1, 1)
    assert kernel.synced == [("end", 1), ("begin", 1), ("begin", 2), ("end", 3)]
    region.close()


def test_a_staging_arena_over_a_piece_for_each_buffer_syncs_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = heaps(tmp_path, monkeypatch, cma=MIB)
    nbytes = StagingArena.bytes_for(buffers=3, buffer_bytes=PAGE + 1)
    region = HeapRegion(nbytes, 3, directory=kernel.directory)
    arena = StagingArena(region, 3, region)
    assert arena.buffer_bytes == region.piece_bytes == 2 * PAGE
    assert [buffer.memory.ctypes.data - region.buffer.ctypes.data for buffer in arena.buffers] == [
        0,
        2 * PAGE,
        4 * PAGE,
    ]
    arena.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 0), (0, 2 * PAGE + 1), (2 * PAGE, 1)])
def test_a_sync_outside_the_region_is_refused(
    offset: int, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = HeapRegion(2 * PAGE, directory=heaps(tmp_path, monkeypatch, cma=MIB).directory)
    with pytest.raises(UsageError, match=r"are not in a region of"):
        region.sync_to_device(offset, nbytes)
    with pytest.raises(UsageError, match=r"are not in a region of"):
        region.sync_from_device(offset, nbytes)
    region.close()
    with pytest.raises(UsageError, match="is closed"):
        region.sync_to_device(0, 1)


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"system": MIB, "cma": MIB, "system-uncached": MIB}, "cma"),
        ({"reserved": MIB, "system": MIB}, "reserved"),
        ({"linux,cma": MIB, "system": MIB}, "linux,cma"),
        ({"system": MIB, "cma-uncached": MIB}, "system"),
        ({"system": MIB, "cma": PAGE}, "system"),  # one piece of two, then nothing: both come from the next heap
    ],
)
def test_the_first_heap_that_gives_all_is_taken(
    there: dict[str, int], taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = heaps(tmp_path, monkeypatch, **there)
    before = open_descriptors()
    region = HeapRegion(2 * PAGE, 2, directory=kernel.directory)
    assert region.heap == taken
    assert kernel.budget[taken] == MIB - 2 * PAGE
    assert open_descriptors() == before + 2
    region.close()
    assert open_descriptors() == before


def test_the_one_heap_named_refuses_what_it_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = heaps(tmp_path, monkeypatch, cma=5 * MIB, system=100 * MIB)
    monkeypatch.setattr(dma_heap, "meminfo_bytes", {"CmaFree": 62 * MIB}.get)
    before = open_descriptors()
    with pytest.raises(
        RegionError,
        match=r"^cannot take 3 x 2\.0 MiB for DMA \(heap cma: Cannot allocate memory, CmaFree 62\.0 MiB\): "
        r"take it at start before others .* in more pieces, or boot with a larger cma=$",
    ) as caught:
        HeapRegion(6 * MIB, 3, ["cma"], kernel.directory)
    assert caught.value.values["asked"] == 6 * MIB
    assert caught.value.values["errno"] == {"cma": errno.ENOMEM}
    assert caught.value.values["cma_free"] == 62 * MIB
    assert open_descriptors() == before


def test_pages_that_the_machine_has_not_are_not_even_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end processes to find them; CMA's are set aside, so asking for those harms nobody."""
    kernel = heaps(tmp_path, monkeypatch, cma=8 * PAGE, system=8 * PAGE)
    monkeypatch.setattr(dma_heap, "scarcest_budget", lambda: MemoryBudget(None, 8 * PAGE, 4 * PAGE))
    with pytest.raises(RegionError, match=r"heap system: Cannot allocate memory, MemAvailable"):
        HeapRegion(5 * PAGE, 1, ["system"], kernel.directory)
    assert kernel.handed_out == []
    HeapRegion(4 * PAGE, 1, ["system"], kernel.directory).close()
    HeapRegion(5 * PAGE, 1, ["cma"], kernel.directory).close()


@pytest.mark.parametrize("named", [True, False])  # a container may not know the names
def test_heaps_kept_closed_are_named_with_the_way_to_open_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    def known(number: int, field: str, name: str) -> SimpleNamespace:
        if not named:
            raise KeyError(number)
        return SimpleNamespace(**{field: name})

    kernel = heaps(tmp_path, monkeypatch, cma=MIB, system=PAGE)
    really_open = os.open

    def closed(path: str | Path, flags: int, mode: int = 0o777) -> int:  # root, who may run the tests, may open any
        if str(path).endswith("/cma"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", closed)
    (kernel.directory / "cma").chmod(0o640)
    names = "staff:video" if named else f"{os.getuid()}:{os.getgid()}"
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: known(uid, "pw_name", "staff"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: known(gid, "gr_name", "video"))
    with pytest.raises(
        RegionError,
        match=rf"heap cma: Permission denied, \S*/dma_heap/cma is 0640 {names}; heap system: Cannot allocate"
        r".*SUBSYSTEM==\"dma_heap\".*; or take it at",
    ):
        HeapRegion(2 * PAGE, directory=kernel.directory)


def test_no_heap_at_all_is_an_error_that_names_those_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match=r"nowhere has none of cma, linux,cma, .*CONFIG_DMABUF_HEAPS.*container"):
        HeapRegion(PAGE, directory=tmp_path / "nowhere")


def test_memory_past_the_caches_is_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = heaps(tmp_path, monkeypatch, **{"system-uncached": MIB})
    with pytest.raises(UsageError, match=r"heap system-uncached gives memory that the CPU does not cache"):
        HeapRegion(PAGE, heaps=["system-uncached"], directory=kernel.directory)
    with pytest.raises(RegionError, match="has none of"):
        HeapRegion(PAGE, directory=kernel.directory)


@pytest.mark.parametrize(("nbytes", "pieces"), [(0, 1), (PAGE, 0), (PAGE + 1, 1), (3 * PAGE, 2), (-PAGE, 1)])
def test_pieces_are_equal_and_whole_pages(nbytes: int, pieces: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="equal pieces of whole pages"):
        HeapRegion(nbytes, pieces, directory=tmp_path)


def test_a_failed_sync_is_an_error_and_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = heaps(tmp_path, monkeypatch, cma=MIB)
    region = HeapRegion(2 * PAGE, 2, directory=kernel.directory)
    before = open_descriptors()
    kernel.refusal = errno.ENODEV
    with pytest.raises(DeviceError, match=r"DMA_BUF_IOCTL_SYNC .* heap cma said: .*No such device"):
        region.sync_from_device(0, 2 * PAGE)
    with pytest.raises(DeviceError, match="take a new one"):
        HeapRegion(2 * PAGE, 2, directory=kernel.directory)
    assert open_descriptors() == before
    region.close()


def test_a_region_in_use_keeps_its_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = HeapRegion(2 * PAGE, directory=heaps(tmp_path, monkeypatch, cma=MIB).directory)
    view = region.buffer[:4]
    with pytest.raises(RegionError, match="still in use"):
        region.close()
    region.sync_to_device(0, 1)
    assert len(region.buffer) == 2 * PAGE
    del view
    region.close()


def test_the_door_of_all_regions_leads_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RegionError, match=r"has none of no such heap"):
        Region.dma_heap(2 * PAGE, pieces=2, heaps=["no such heap"])
    with pytest.raises(UsageError, match="8192 bytes are not 3 equal pieces"):
        Region.dma_heap(8192, pieces=3)

"""What a view asks of its runs, and what is said when the kernel cannot; the driver is stood in for.

That pages are shared and not copied is for `make test-vm`, where the driver is real.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from hostcache import Region, dma_buf
from hostcache.errors import DeviceError, Misaligned, UsageError
from staging.udmabuf import ContiguousView
from tests.hostcache.fake_heaps import FakeHeaps, open_descriptors

PAGE = mmap.PAGESIZE


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHeaps:
    return FakeHeaps(tmp_path / "dev", {"udmabuf": 0}, monkeypatch)


def numbered(pages: int) -> Region:
    """A memfd region whose pages hold their numbers."""
    region = Region.memfd(pages * PAGE)
    region.buffer[:] = np.repeat(np.arange(pages, dtype=np.uint8), PAGE)
    return region


def view(region: Region, driver: FakeHeaps, runs: list[tuple[int, int]]) -> ContiguousView:
    return ContiguousView(region, runs, driver.directory / "udmabuf", driver.directory)


def test_runs_lie_in_the_order_given_and_may_repeat(driver: FakeHeaps) -> None:
    region = numbered(8)
    before = open_descriptors()
    made = view(region, driver, [(6 * PAGE, PAGE), (2 * PAGE, 2 * PAGE), (6 * PAGE, PAGE)])
    assert made.buffer[::PAGE].tolist() == [6, 2, 3, 6]
    assert len(made.buffer) == 4 * PAGE
    with pytest.raises(ValueError, match="read-only"):
        made.buffer[0] = 1
    assert driver.synced == [("begin", 0)]  # the driver refuses an "end" without it
    made.sync_to_device()
    assert driver.synced[1:] == [("end", 0)]
    made.close()
    made.close()
    assert open_descriptors() == before
    with pytest.raises(UsageError, match="is closed"):
        made.sync_to_device()
    region.close()


def test_a_region_keeps_the_pages_that_a_view_shows(driver: FakeHeaps) -> None:
    region = numbered(8)
    made = view(region, driver, [(6 * PAGE, PAGE)])
    assert not region.give_back(0, 8 * PAGE)
    assert made.buffer[0] == 6
    made.close()
    assert region.give_back(0, 8 * PAGE)
    region.close()


@pytest.mark.parametrize("run", [(1, PAGE), (0, PAGE - 1), (PAGE // 2, PAGE)])
def test_what_is_not_whole_pages_is_refused(run: tuple[int, int], driver: FakeHeaps) -> None:
    region = numbered(2)
    with pytest.raises(Misaligned, match=f"{run[1]} bytes at {run[0]} are not whole pages .* gather them instead"):
        view(region, driver, [(0, PAGE), run])
    region.close()


@pytest.mark.parametrize("run", [(-PAGE, PAGE), (0, 0), (0, -PAGE), (2 * PAGE, PAGE), (PAGE, 2 * PAGE)])
def test_what_is_not_in_the_region_is_refused(run: tuple[int, int], driver: FakeHeaps) -> None:
    region = numbered(2)
    with pytest.raises(UsageError, match="not in a region of"):
        view(region, driver, [(0, PAGE), run])
    with pytest.raises(UsageError, match="at least one run"):
        view(region, driver, [])
    region.close()


def test_other_memory_than_a_memfd_is_refused(driver: FakeHeaps) -> None:
    region = Region.anonymous(PAGE)
    with pytest.raises(UsageError, match=r"kind 'anonymous' has no memfd: use Region\.memfd"):
        view(region, driver, [(0, PAGE)])
    region.close()


def test_the_drivers_limits_are_named_with_the_way_to_raise_them(driver: FakeHeaps) -> None:
    region = numbered(4)
    (driver.directory / "list_limit").write_text("2\n")
    (driver.directory / "size_limit_mb").write_text("1\n")
    view(region, driver, [(0, PAGE)] * 2).close()
    with pytest.raises(UsageError, match=r"a view of 3 runs is above .* limit of 2: .*echo 3 > .*/list_limit"):
        view(region, driver, [(0, PAGE)] * 3)
    whole = [(0, 4 * PAGE)]
    (driver.directory / "list_limit").write_text("1024\n")
    view(region, driver, whole * (2**20 // (4 * PAGE))).close()
    with pytest.raises(UsageError, match=r"a view of 2 MiB is above .* limit of 1: .*echo 2 > .*/size_limit_mb"):
        view(region, driver, whole * (2**20 // (4 * PAGE) + 1))
    region.close()


def test_a_kernel_without_the_driver_is_an_error(driver: FakeHeaps) -> None:
    region = numbered(1)
    (driver.directory / "udmabuf").unlink()
    with pytest.raises(DeviceError, match=r"udmabuf gives no view of 1 runs: No such file.*CONFIG_UDMABUF, or gather"):
        view(region, driver, [(0, PAGE)])
    region.close()


@pytest.mark.parametrize("call", ["create_list", "begin_cpu_access"])
def test_what_the_driver_refuses_leaves_nothing_open(
    call: str, driver: FakeHeaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    region = numbered(1)
    monkeypatch.setattr(dma_buf, call, refuse)
    before = open_descriptors()
    with pytest.raises(DeviceError, match="Invalid argument"):
        view(region, driver, [(0, PAGE)])
    assert open_descriptors() == before
    region.close()


def test_a_view_in_use_is_not_let_go(driver: FakeHeaps) -> None:
    region = numbered(2)
    made = view(region, driver, [(PAGE, PAGE)])
    held = made.buffer[:1]
    with pytest.raises(UsageError, match="still in use"):
        made.close()
    assert (held[0], made.buffer[0]) == (1, 1)
    del held
    made.close()
    region.close()

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hostcache import MemoryBudget, Region, scarcest_budget
from hostcache.errors import RegionError, UsageError
from hostcache.region import HUGE_PAGE, MADV_POPULATE_WRITE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("take", [Region.anonymous, Region.memfd])
@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 3 * HUGE_PAGE + 17])
def test_a_region_is_as_long_as_asked_and_zero(take: type[Region], nbytes: int) -> None:
    region = take(nbytes)  # type: ignore[call-arg, arg-type] # both constructors take the size alone
    assert region.buffer.shape == (nbytes,)
    assert not region.buffer.any()
    region.buffer[-1] = 7
    assert region.buffer[-1] == 7
    region.close()
    region.close()


def test_every_page_is_there_before_the_constructor_returns() -> None:
    before = resident_bytes()
    region = Region.anonymous(64 << 20)
    grown = resident_bytes() - before
    assert 64 << 20 <= grown < 68 << 20
    region.close()
    assert resident_bytes() - before < 4 << 20


def test_an_anonymous_region_starts_where_a_huge_page_may_start() -> None:
    region = Region.anonymous(2 * HUGE_PAGE)
    assert region.buffer.ctypes.data % HUGE_PAGE == 0
    region.close()


def test_a_memfd_shares_its_pages() -> None:
    region = Region.memfd(8192)
    region.buffer[:4] = (1, 2, 3, 4)
    assert region.fd is not None
    assert os.pread(region.fd, 4, 0) == b"\x01\x02\x03\x04"
    for length in (4096, 16384):  # sealed: whoever shares it can neither take pages away nor add some
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, length)
    fd = region.fd
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_more_than_the_machine_has_is_one_error_with_the_numbers() -> None:
    budget = scarcest_budget()
    assert budget is not None
    asked = budget.available + (1 << 40)
    match = rf"cannot take .* MiB for the pool \({budget.owner} has .* MiB left\): ask for a smaller pool"
    with pytest.raises(RegionError, match=match) as caught:
        Region.anonymous(asked)
    assert caught.value.values["asked"] == asked
    assert caught.value.values["available"] > 0


def test_a_refused_memfd_leaves_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RegionError):
        Region.memfd(1 << 60)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_are_refused(nbytes: int) -> None:
    with pytest.raises(UsageError, match="at least one byte"):
        Region.anonymous(nbytes)


def test_a_region_in_use_is_not_given_back() -> None:
    region = Region.anonymous(4096)
    view = region.buffer[:10]
    with pytest.raises(RegionError, match="still in use"):
        region.close()
    assert (region.buffer.ctypes.data, len(region.buffer)) == (view.ctypes.data, 4096)
    assert np.array_equal(view, np.zeros(10, np.uint8))
    view[:] = 7
    assert region.buffer.nbytes == 4096  # the same bytes, and not the slack around them
    assert region.buffer[:11].tolist() == [7] * 10 + [0]
    del view
    region.close()
    assert region.buffer.nbytes == 0


def test_a_pool_that_would_have_its_process_killed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget("/service", limit=1 << 30, available=8 << 20)
    monkeypatch.setattr("hostcache.region.scarcest_budget", lambda: budget)
    Region.anonymous(8 << 20).close()
    with pytest.raises(
        RegionError, match=r"cannot take 9\.0 MiB for the pool \(cgroup /service has 8\.0 MiB left\)"
    ) as caught:
        Region.anonymous(9 << 20)
    assert caught.value.values == {"asked": 9 << 20, "available": 8 << 20}


def test_where_the_kernel_does_not_say_what_is_left_a_region_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostcache.region.scarcest_budget", lambda: None)
    Region.anonymous(8192).close()


def test_a_forked_child_finds_zeros_and_the_parent_keeps_its_bytes() -> None:
    """The fork happens in a process of its own: pytest's may have threads."""
    script = """
import os
from hostcache import Region
region = Region.anonymous(3 << 20)
region.buffer[:] = 7
child = os.fork()
if child == 0:
    region.buffer[:4] += 1
    os._exit(int(region.buffer.sum()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bool((region.buffer == 7).all()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "4 True\n"  # four ones on zeros


@pytest.mark.parametrize("refused", [errno.ENOMEM, errno.EFAULT])
def test_pages_that_cannot_be_had_are_one_error(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", populating_says(refused))
    with pytest.raises(RegionError, match=r"cannot take 0\.0 MiB for the pool \(its pages cannot be had: "):
        Region.anonymous(8192)


def test_a_kernel_that_cannot_populate_gets_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", populating_says(errno.EINVAL))
    before = resident_bytes()
    region = Region.anonymous(16 << 20)
    assert resident_bytes() - before >= 16 << 20
    region.close()


def populating_says(refused: int) -> type[mmap.mmap]:
    class Mapping(mmap.mmap):
        def madvise(self, option: int, *where: int) -> None:
            if option == MADV_POPULATE_WRITE:
                raise OSError(refused, os.strerror(refused))
            super().madvise(option, *where)

    return Mapping

"""Memory that goes back to the kernel, measured where the kernel counts it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import numpy as np
import pytest

from hostcache import Region
from hostcache.errors import RegionError, UsageError
from hostcache.region import HUGE_PAGE, MADV_POPULATE_WRITE
from tests.hostcache.test_region import resident_bytes

NBYTES = 16 * HUGE_PAGE
TAKERS = [Region.anonymous, Region.memfd]


@pytest.fixture(params=TAKERS, ids=["anonymous", "memfd"])
def region(request: pytest.FixtureRequest) -> Iterator[Region]:
    take: Callable[[int], Region] = request.param
    region = take(NBYTES)
    region.buffer[:] = np.arange(NBYTES, dtype=np.uint64).view(np.uint8)[:NBYTES]  # no two pages alike
    yield region
    region.close()


def is_about(nbytes: int, expected: int) -> bool:
    """Python's own arenas come and go by less."""
    return abs(nbytes - expected) < 1 << 20


def test_what_is_given_back_leaves_the_process_and_what_stays_is_untouched(region: Region) -> None:
    content, before = region.buffer.tobytes(), resident_bytes()
    assert region.page_bytes == (HUGE_PAGE if region.huge_pages else mmap.PAGESIZE)
    given = 5 * HUGE_PAGE
    assert region.give_back(2 * HUGE_PAGE, given)
    assert is_about(before - resident_bytes(), given)
    assert region.buffer[: 2 * HUGE_PAGE].tobytes() == content[: 2 * HUGE_PAGE]
    assert region.buffer[7 * HUGE_PAGE :].tobytes() == content[7 * HUGE_PAGE :]


def test_pages_that_come_again_are_zeros_and_those_beside_them_stay(region: Region) -> None:
    beside = region.buffer[12 * HUGE_PAGE :].tobytes()
    before = resident_bytes()
    region.give_back(4 * HUGE_PAGE, 8 * HUGE_PAGE)
    region.populate(4 * HUGE_PAGE, 9 * HUGE_PAGE)  # one more than was given back
    assert is_about(resident_bytes(), before)
    assert not region.buffer[4 * HUGE_PAGE : 12 * HUGE_PAGE].any()
    assert region.buffer[12 * HUGE_PAGE :].tobytes() == beside


def test_a_region_smaller_than_a_huge_page_gives_back_pages() -> None:
    region = Region.anonymous(40 * mmap.PAGESIZE)
    region.buffer[:] = 7
    assert region.page_bytes == mmap.PAGESIZE
    assert region.give_back(3 * mmap.PAGESIZE, mmap.PAGESIZE)
    assert (region.buffer == 0).nonzero()[0].tolist() == list(range(3 * mmap.PAGESIZE, 4 * mmap.PAGESIZE))
    region.close()


@pytest.mark.parametrize("take", TAKERS)
def test_an_old_kernel_touches_the_pages_without_writing_them(take: Callable[[int], Region]) -> None:
    with patch.object(mmap, "mmap", refusing(MADV_POPULATE_WRITE, errno.EINVAL)):
        region = take(NBYTES)
    region.buffer[:] = 7
    before = resident_bytes()
    region.give_back(0, NBYTES // 2)
    region.populate(100, NBYTES // 2 + 5000)  # begins and ends within pages
    assert is_about(resident_bytes(), before)
    assert not region.buffer[: NBYTES // 2].any()
    assert (region.buffer[NBYTES // 2 :] == 7).all()
    region.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(1, HUGE_PAGE), (0, HUGE_PAGE - 1), (0, 0), (0, -HUGE_PAGE), (-HUGE_PAGE, HUGE_PAGE), (NBYTES, HUGE_PAGE)],
)
def test_only_whole_pages_of_the_region_are_given_back(offset: int, nbytes: int) -> None:
    region = Region.anonymous(NBYTES)
    region.buffer[:] = 7
    with pytest.raises(UsageError, match=f"{nbytes} bytes at {offset} cannot be given back: whole pages of"):
        region.give_back(offset, nbytes)
    assert (region.buffer == 7).all()
    region.close()


def test_locked_pages_stay(region: Region) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(region.buffer.ctypes.data), ctypes.c_size_t(HUGE_PAGE)
    if libc.mlock(address, nbytes):
        assert ctypes.get_errno() in (errno.ENOMEM, errno.EPERM)
        pytest.skip("this user may not lock 2 MiB: see ulimit -l")
    content = region.buffer.tobytes()
    assert not region.give_back(0, 2 * HUGE_PAGE)
    assert not region.gives_back
    assert not region.give_back(4 * HUGE_PAGE, HUGE_PAGE)  # not asked again
    assert region.buffer.tobytes() == content


def test_pages_that_a_device_uses_stay_until_it_lets_them_go(region: Region) -> None:
    region.hold_pages()
    region.hold_pages()
    region.let_pages_go()
    assert not region.gives_back
    assert not region.give_back(0, HUGE_PAGE)
    assert region.buffer[:HUGE_PAGE].any()
    region.let_pages_go()
    assert region.give_back(0, HUGE_PAGE)


def test_pages_that_cannot_be_had_again_are_one_error() -> None:
    with patch.object(mmap, "mmap", refusing(MADV_POPULATE_WRITE, errno.EINVAL)) as mapping:
        region = Region.anonymous(NBYTES)
        mapping.refused = errno.ENOMEM  # type: ignore[attr-defined] # of the class below
        with pytest.raises(RegionError, match=r"cannot take 2\.0 MiB for the pool \(its pages cannot be had"):
            region.populate(0, HUGE_PAGE)
    region.close()


def test_a_heap_keeps_its_pages() -> None:
    with open(os.memfd_create("heap"), "r+b") as file:
        file.truncate(4096)
        region = Region("dma heap", 4096, mmap.mmap(file.fileno(), 4096))
    region.buffer[:] = 7
    assert not region.gives_back
    assert not region.give_back(0, 4096)
    assert (region.buffer == 7).all()
    region.close()


def test_a_closed_region_has_nothing_to_give() -> None:
    region = Region.anonymous(NBYTES)
    assert region.gives_back
    region.close()
    assert not region.give_back(0, HUGE_PAGE)


def refusing(advice: int, error: int) -> type[mmap.mmap]:
    class Mapping(mmap.mmap):
        refused = error

        def madvise(self, option: int, *where: int) -> None:
            if option == advice:
                raise OSError(self.refused, os.strerror(self.refused))
            super().madvise(option, *where)

    return Mapping

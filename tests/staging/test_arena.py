"""The arena: cut once, handed out, taken back."""

from __future__ import annotations

import pytest

from hostcache import Region
from hostcache.errors import Misaligned, RegionError, StagingError, UsageError
from staging import BufferState, StagingArena
from tests.staging.flat import MemoryLog, arena_of


def test_buffers_are_equal_pieces_that_start_on_pages_and_do_not_overlap() -> None:
    region = Region.anonymous(3 * 8192 + 5000)  # the remainder is too small to make each a page larger
    arena = StagingArena(region, 3, MemoryLog())
    assert arena.buffer_bytes == 8192
    base = region.buffer.__array_interface__["data"][0]
    starts = [buffer.memory.__array_interface__["data"][0] - base for buffer in arena.buffers]
    assert starts == [0, 8192, 16384]
    assert [buffer.memory.nbytes for buffer in arena.buffers] == [8192] * 3
    assert base % 4096 == 0


def test_bytes_for_rounds_each_buffer_up_to_pages() -> None:
    assert StagingArena.bytes_for(6, 4097) == 6 * 8192
    with pytest.raises(UsageError, match="at least one buffer, got 0"):
        StagingArena.bytes_for(0, 4096)


def test_spare_bytes_at_the_end_belong_to_no_buffer() -> None:
    arena = StagingArena(Region.anonymous(2 * 8192 + 3 * 4096), 2, MemoryLog(), spare=3 * 4096)
    assert [buffer.memory.nbytes for buffer in arena.buffers] == [8192, 8192]
    with pytest.raises(UsageError, match="an arena of 4096 bytes cannot be cut into 2"):
        StagingArena(Region.anonymous(3 * 4096), 2, MemoryLog(), spare=2 * 4096)


def test_an_exhausted_arena_says_so_and_serves_again_after_a_release() -> None:
    arena = arena_of(2, 1)
    first, second = arena.acquire(), arena.acquire()
    assert first is not second
    assert arena.free == 0
    with pytest.raises(StagingError, match=r"all 2 staging buffers are in use \(filling, filling\)"):
        arena.acquire()
    second.release()
    assert arena.free == 1
    assert arena.acquire() is second
    assert second.state is BufferState.FILLING


@pytest.mark.parametrize(("nbytes", "buffers"), [(4096, 0), (4096, 2), (8191, 2)])
def test_an_arena_that_cannot_be_cut_is_refused(nbytes: int, buffers: int) -> None:
    with pytest.raises(UsageError, match=f"an arena of {nbytes} bytes cannot be cut into {buffers}"):
        StagingArena(Region.anonymous(nbytes), buffers, MemoryLog())


def test_an_arena_off_its_page_is_refused() -> None:
    region = Region.anonymous(3 * 4096)
    region.buffer = region.buffer[64 : 64 + 8192]
    region.nbytes = 8192
    with pytest.raises(Misaligned, match="not on a page"):
        StagingArena(region, 2, MemoryLog())


def test_close_gives_the_memory_back_and_names_a_view_that_is_left() -> None:
    arena = arena_of(1, 1)
    view = arena.buffers[0].memory[:8]
    with pytest.raises(RegionError, match="drop every view"):
        arena.close()
    del view
    arena.close()
    arena.close()

"""Scattered blocks as one dma-buf, by the kernel's own driver. Run by `make test-vm`."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from hostcache import KVGeometry, PagedKVCache, Region
from hostcache.errors import UsageError
from staging import StagingArena
from staging.udmabuf import PARAMETERS, ContiguousView
from tests.hostcache.fake_heaps import open_descriptors
from tests.staging.flat import MemoryLog, plan_of

pytestmark = pytest.mark.vm

PAGE = mmap.PAGESIZE
GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=128)  # a row of 16 tokens is a page
BLOCKS = 24
ZERO = BLOCKS - 1  # a block that stays zero, for what lies behind a context


def noisy_pool() -> tuple[Region, PagedKVCache]:
    """A pool over a memfd, full of noise but for the block of zeros; the region is the cache's."""
    region = Region.memfd(BLOCKS * GEOMETRY.block_bytes)
    cache = PagedKVCache(GEOMETRY, region)
    cache.pool.allocate(BLOCKS)
    cache.buffer[:] = np.random.default_rng(0).integers(0, 256, cache.buffer.nbytes, np.uint8)
    cache.buffer[ZERO * GEOMETRY.block_bytes :] = 0
    return region, cache


def runs_of(tables: list[list[int]], blocks: int, layer: int, values: bool) -> list[tuple[int, int]]:
    """The pages of `[batch * kv_heads, blocks * 16, 128]`, K or V of a layer, in order."""
    start = layer * GEOMETRY.layer_bytes + values * GEOMETRY.kv_bytes
    return [
        (block * GEOMETRY.block_bytes + start + head * GEOMETRY.row_bytes, GEOMETRY.row_bytes)
        for table in tables
        for head in range(GEOMETRY.kv_heads)
        for block in [*table, *[ZERO] * (blocks - len(table))]
    ]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_view_is_what_the_gather_copies_byte_for_byte(layer: int) -> None:
    region, cache = noisy_pool()
    tables = [[12, 3, 19], [7], [20, 0, 5, 16]]
    plan = plan_of(cache, tables, [48, 16, 64], tokens=64, mask_rows=4)
    arena = StagingArena(Region.anonymous(StagingArena.bytes_for(1, plan.layout.nbytes)), 1, MemoryLog())
    buffer = arena.acquire()
    buffer.fill(cache, plan, layer)
    for values, gathered in ((False, buffer.keys), (True, buffer.values)):
        view = ContiguousView(region, runs_of(tables, 4, layer, values))
        assert view.buffer.tobytes() == gathered.tobytes()
        view.close()
    del buffer, gathered
    arena.close()
    cache.close()


def test_a_view_shows_what_is_written_later_and_survives_the_pool() -> None:
    descriptors = open_descriptors()
    region, cache = noisy_pool()
    view = ContiguousView(region, runs_of([[9, 4]], 2, layer=0, values=False))
    table = cache.table()
    cache.pool.release_all([4, 9])
    table.append(32)  # the lowest free block first: 4, then 9
    assert table.blocks == [4, 9]
    keys = np.arange(32 * 2 * 128, dtype=np.float32).reshape(32, 2, 128) % 2048
    cache.write(0, table.slots(0, 32), keys, keys)
    view.sync_to_device()
    seen = view.buffer.view(np.float16).reshape(2, 2, 16, 128)  # head, block 9 then 4, token, channel
    np.testing.assert_array_equal(seen[:, 1], keys[:16].transpose(1, 0, 2))
    np.testing.assert_array_equal(seen[:, 0], keys[16:].transpose(1, 0, 2))
    del seen
    cache.close()
    assert view.buffer.any()
    view.close()
    assert open_descriptors() == descriptors


def test_the_drivers_limit_is_refused_by_name_and_can_be_raised() -> None:
    limit = PARAMETERS / "list_limit"
    assert (limit.read_text(), (PARAMETERS / "size_limit_mb").read_text()) == ("1024\n", "64\n")
    region, cache = noisy_pool()
    longest = runs_of([[1] * 256], 256, layer=0, values=False) * 4  # T = 4096, 8 heads: 2048 runs
    with pytest.raises(UsageError, match=r"2048 runs is above the kernel's limit of 1024: .*echo 2048 > "):
        ContiguousView(region, longest)
    limit.write_text("2048")
    try:
        view = ContiguousView(region, longest)
        assert len(view.buffer) == 2048 * PAGE
        view.close()
    finally:
        limit.write_text("1024")
    cache.close()

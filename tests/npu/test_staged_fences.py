"""Blocks that a step's launches copy out of are not reused before it has ended, whatever becomes of their tables."""

from __future__ import annotations

from contextlib import closing

import pytest

from hostcache.errors import BlockStateError
from npu.attention import AttentionBatch
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from tests.npu.test_emulated_attention import BUCKETS, HEADS, World


def given_up(world: World) -> tuple[int, int]:
    """Give up every table's blocks; blocks that are fenced then, and free."""
    for table in world.tables:
        world.cache.pool.release_all(table)
    return world.cache.pool.fenced, world.cache.pool.free


def test_blocks_given_up_during_a_step_wait_for_its_end() -> None:
    world = World([40, 20], [1, 17])  # 3 and 2 blocks, of a decode launch and of two tiles
    with closing(EmulatedAttention(world.cache, HEADS, buckets=BUCKETS)) as runtime:
        runtime.begin_step(world.batch)
        assert given_up(world) == (5, 0)
        runtime.end_step()
        assert (world.cache.pool.fenced, world.cache.pool.free) == (0, 5)
        world.cache.pool.check()


def test_closing_ends_the_step() -> None:
    world = World([40], [1])
    runtime = EmulatedAttention(world.cache, HEADS, buckets=BUCKETS)
    runtime.begin_step(world.batch)
    runtime.close()
    assert given_up(world) == (0, 3)


def test_a_step_that_does_not_begin_leaves_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's share, of a context that no bucket holds, fails behind the device's."""
    world = World([40, 300], [1, 1])
    host = CpuAttention(world.cache, HEADS)

    def fail(_: AttentionBatch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "begin_step", fail)
    with closing(EmulatedAttention(world.cache, HEADS, buckets=BUCKETS, host=host)) as runtime:
        with pytest.raises(KeyboardInterrupt):
            runtime.begin_step(world.batch)
        assert given_up(world) == (0, 3 + 19)


def test_a_free_block_is_not_staged() -> None:
    world = World([40], [1])
    given_up(world)
    with (
        closing(EmulatedAttention(world.cache, HEADS, buckets=BUCKETS)) as runtime,
        pytest.raises(BlockStateError, match="was fenced while free"),
    ):
        runtime.begin_step(world.batch)

"""The life of a staging buffer, and what a fill protects and leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hostcache import KVGeometry, PagedKVCache
from hostcache.errors import OutsideArena, UsageError, WrongState
from staging import BufferState, StagingBuffer
from tests.staging.flat import MemoryLog, arena_of, flat, marked, noisy_cache, plan_of

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8)
OPERATIONS: dict[str, Callable[[StagingBuffer, PagedKVCache], None]] = {
    "acquire": lambda buffer, _: buffer.acquire(),
    "fill": lambda buffer, cache: buffer.fill(cache, plan_of(cache, [[0]], [5], 64), 0),
    "sync_to_device": lambda buffer, _: buffer.sync_to_device(),
    "launch": lambda buffer, _: buffer.launch(),
    "sync_from_device": lambda buffer, _: buffer.sync_from_device(),
    "release": lambda buffer, _: buffer.release(),
}
# What leads to a state, and what is allowed there.
PATHS = {
    "free": ([], {"acquire"}),
    "acquired": (["acquire"], {"fill", "release"}),
    "filled": (["acquire", "fill"], {"sync_to_device", "release"}),
    "ready": (["acquire", "fill", "sync_to_device"], {"launch", "release"}),
    "in flight": (["acquire", "fill", "sync_to_device", "launch"], {"sync_from_device", "release"}),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", PATHS)
def test_every_wrong_step_of_a_life_is_refused_and_changes_nothing(state: str, operation: str) -> None:
    cache = noisy_cache(GEOMETRY, blocks=2)
    path, allowed = PATHS[state]
    device = MemoryLog()
    [buffer] = arena_of(1, 4, device).buffers
    for step in path:
        OPERATIONS[step](buffer, cache)
    before, synced = buffer.state, list(device.synced)
    if operation in allowed:
        OPERATIONS[operation](buffer, cache)
    else:
        with pytest.raises(WrongState, match="staging buffer 0"):
            OPERATIONS[operation](buffer, cache)
        assert buffer.state is before
        assert device.synced == synced
    if buffer.state is not BufferState.FREE:
        buffer.release()
    OPERATIONS["acquire"](buffer, cache)  # whatever happened, the buffer can be used again
    OPERATIONS["fill"](buffer, cache)


def test_a_launch_syncs_all_operands_at_once_and_only_the_result_back() -> None:
    cache = noisy_cache(GEOMETRY, blocks=2)
    device = MemoryLog()
    arena = arena_of(2, 4, device)
    arena.acquire()
    buffer = arena.acquire()  # the second, so that the offset in the arena shows
    OPERATIONS["fill"](buffer, cache)
    layout = buffer.layout
    buffer.sync_to_device()
    buffer.launch()
    buffer.sync_from_device()
    start = 4 * 4096
    assert device.synced == [("to", start, layout.nbytes), ("from", start + layout.out_offset, layout.out_bytes)]


def test_a_shorter_context_leaves_nothing_of_the_longer_one_before() -> None:
    cache = noisy_cache(GEOMETRY, blocks=8)
    buffer = arena_of(1, 4).acquire()
    long = plan_of(cache, [[0, 1, 2, 3]], [64], 64)
    buffer.fill(cache, long, 1)
    assert buffer.keys[:, 63].view(np.uint16).any()  # there is something to leave behind
    buffer.release()
    buffer.acquire()
    buffer.fill(cache, plan_of(cache, [[4]], [3], 64), 1)
    keys, values = flat(cache, [[4]], [3], 64, 1)
    np.testing.assert_array_equal(buffer.keys.view(np.uint16), marked(keys, [3]))
    np.testing.assert_array_equal(buffer.values.view(np.uint16), values)
    assert not buffer.values[:, 3:].view(np.uint16).any()


def test_a_closed_cache_is_not_read() -> None:
    cache = noisy_cache(GEOMETRY, blocks=2)
    buffer = arena_of(1, 4).acquire()
    plan = plan_of(cache, [[0]], [5], 64)
    buffer.fill(cache, plan, 0)
    buffer.release()
    buffer.acquire()
    cache.close()
    with pytest.raises(UsageError, match="the cache is closed"):
        buffer.fill(cache, plan, 0)


def test_a_plan_of_another_cache_or_layer_is_refused() -> None:
    cache = noisy_cache(GEOMETRY, blocks=4)
    buffer = arena_of(1, 4).acquire()
    plan = plan_of(cache, [[3]], [16], 64)
    smaller = noisy_cache(GEOMETRY, blocks=3)
    deeper = noisy_cache(KVGeometry(layers=3, kv_heads=2, head_dim=8), blocks=4)
    buffer.fill(cache, plan, 0)  # a plan that fits one cache need not fit the next
    buffer.release()
    buffer.acquire()
    for other in (smaller, deeper):
        with pytest.raises(UsageError, match="the plan is for 4 blocks"):
            buffer.fill(other, plan, 0)
    for layer in (-1, 2):
        with pytest.raises(UsageError, match=f"layer {layer} is outside 0..1"):
            buffer.fill(cache, plan, layer)
    buffer.fill(cache, plan, 1)


def test_operands_larger_than_a_buffer_are_refused() -> None:
    # Values of one sequence at 256 tokens: 2 * 256 * 8 * 2 = 8192 bytes, two pages before anything else.
    cache = noisy_cache(GEOMETRY, blocks=4)
    buffer = arena_of(1, pages=1).acquire()
    with pytest.raises(OutsideArena, match="do not fit a staging buffer of 4096"):
        buffer.fill(cache, plan_of(cache, [[3]], [16], 256), 0)

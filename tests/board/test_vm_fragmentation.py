"""Why rockpage pages: memory that is free and cannot be had, beside a pool that goes on. Run by `make test-vm`."""

# ruff: noqa: T201 - the figures are the point
from __future__ import annotations

import errno
import random

import numpy as np
import pytest

from hostcache import BlockTable, KVGeometry, PagedKVCache, Region
from hostcache.errors import OutOfBlocks, RegionError
from tests.board.test_vm_heaps import CMA, MIB, cma_free, exhaust

pytestmark = pytest.mark.vm

GEOMETRY = KVGeometry(layers=24, kv_heads=2, head_dim=128)  # 1.1B parameters: 384 KiB a block
POOL_BLOCKS = 128
LAYERS = (0, 23)  # written and read: the first and the last of a block


class Session:
    """A conversation whose every token is known."""

    def __init__(self, cache: PagedKVCache, number: int) -> None:
        self.cache = cache
        self.table: BlockTable = cache.table()
        self.number = number

    def kv(self, tokens: range) -> np.ndarray[tuple[int, int, int], np.dtype[np.float32]]:
        """Small integers, exact in fp16, another row for each token of each conversation."""
        marks = (self.number * 37 + np.arange(tokens.start, tokens.stop)) % 2000
        return np.broadcast_to(marks[:, None, None], (len(tokens), 2, 128)).astype(np.float32)

    def speak(self, count: int) -> None:
        """Append tokens.

        Raises:
            OutOfBlocks: the pool is full.
        """
        before = self.table.length
        self.table.append(count)
        new = range(before, before + count)
        for layer in LAYERS:
            self.cache.write(layer, self.table.slots(new.start, new.stop), self.kv(new) + layer, -self.kv(new))

    def check(self) -> None:
        """Every token is what was written."""
        expected = self.kv(range(self.table.length))
        for layer in LAYERS:
            keys, values = self.cache.read(layer, self.table.blocks, self.table.length)
            np.testing.assert_array_equal(keys, expected + layer)
            np.testing.assert_array_equal(values, -expected)


def test_fragmented_cma_has_no_room_for_a_slab_and_the_pool_goes_on() -> None:
    pool_bytes = POOL_BLOCKS * GEOMETRY.block_bytes
    assert pool_bytes == 48 * MIB
    cache = PagedKVCache(GEOMETRY, Region.dma_heap(pool_bytes, heaps=[CMA]))
    others = exhaust(8 * MIB)  # what display, camera and codec do
    for buffer in others[::2]:
        buffer.close()
    print(f"\nthe pool took {pool_bytes // MIB} MiB; others took {len(others)} x 8 MiB and gave half of them back")
    free = cma_free()
    assert free >= 64 * MIB  # far more than is asked for below
    for slab in (40 * MIB, 16 * MIB):
        with pytest.raises(RegionError, match=r"heap reserved: Cannot allocate memory, CmaFree") as caught:
            Region.dma_heap(slab, heaps=[CMA])
        assert caught.value.values["errno"] == {CMA: errno.ENOMEM}
        print(f"CmaFree {free / MIB:.1f} MiB, {slab // MIB} MiB in one piece: {caught.value}")
    pieces = Region.dma_heap(40 * MIB, pieces=5, heaps=[CMA])
    print(f"the same 40 MiB in {pieces.nbytes // pieces.piece_bytes} pieces: taken")
    pieces.close()

    served, handed_out = churn(cache, steps=150)
    print(f"meanwhile in the pool: {served} conversations, {handed_out} blocks handed out of {POOL_BLOCKS}")
    assert served > 20
    assert handed_out > 4 * POOL_BLOCKS
    fragment_and_fill(cache)
    assert cache.pool.free == POOL_BLOCKS
    for buffer in others[1::2]:
        buffer.close()
    cache.close()


def churn(cache: PagedKVCache, steps: int) -> tuple[int, int]:
    """Let conversations come, grow, and go when they are long or the pool is full; check one at a time, all at the end.

    Returns:
        Conversations, and blocks handed out to them.
    """
    dice = random.Random(0)
    alive: list[Session] = []
    number = 0
    generations = sum(cache.pool.generation)
    for _ in range(steps):
        if len(alive) < 4 or dice.random() < 0.3:
            alive.append(Session(cache, number))
            number += 1
        dice.shuffle(alive)
        while True:
            try:
                alive[0].speak(dice.randrange(1, 200))
                break
            except OutOfBlocks:
                alive.pop().table.release()
        if alive[0].table.length > 1000:
            alive.pop(0).table.release()
            continue
        dice.choice(alive).check()
    for session in alive:
        session.check()
        session.table.release()
    return number, sum(cache.pool.generation) - generations


def fragment_and_fill(cache: PagedKVCache) -> None:
    """What CMA could not do: with every other block free, one conversation takes half the pool."""
    small = [Session(cache, number) for number in range(POOL_BLOCKS)]
    for session in small:
        session.speak(GEOMETRY.block_tokens)
    small.sort(key=lambda session: session.table.blocks[0])
    for session in small[::2]:
        session.table.release()
    long = Session(cache, 999)
    long.speak(POOL_BLOCKS // 2 * GEOMETRY.block_tokens)
    long.check()
    assert np.diff(long.table.blocks).tolist() == [2] * (POOL_BLOCKS // 2 - 1)  # no two of them are neighbours
    print(f"no two free blocks side by side: a conversation of {long.table.length} tokens took all {POOL_BLOCKS // 2}")
    for session in (long, *small[1::2]):
        session.check()
        session.table.release()

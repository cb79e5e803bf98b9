"""Blocks of sequences that lost their place in the pool, kept so that they need not be recomputed."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .bandwidth import Bandwidth
from .cache import PagedKVCache
from .codec import FP16, Codec
from .errors import BlockStateError, SwapError, UsageError
from .swap_store import FileStore, MemoryStore, SwapStore

__all__ = ["SwapSpace", "SwapStats", "SwapTicket"]


@dataclass(frozen=True, eq=False)
class SwapTicket:
    """What to give for blocks that were put into a swap space; good for one `SwapSpace.take` or `SwapSpace.drop`.

    Attributes:
        id: unique within its swap space.
        blocks: how many blocks were put.
        codec: theirs.
    """

    id: int
    blocks: int
    codec: Codec = FP16


@dataclass
class SwapStats:
    """Counters since start.

    Attributes:
        put_blocks: blocks copied out of the pool.
        taken_blocks: of those, blocks copied back.
        dropped_blocks: of those, blocks given up or lost.
        refused: times there was no room.
        failures: times the file failed.
    """

    put_blocks: int = 0
    taken_blocks: int = 0
    dropped_blocks: int = 0
    refused: int = 0
    failures: int = 0


class SwapSpace:
    """Bounded room beside the pool, in memory or in a file, for blocks that are needed again.

    What was put stays until it is taken or dropped: making room for one sequence never costs another its blocks.
    A put that finds no room says so, and the caller recomputes instead. If a file fails, those who put blocks into it
    learn that when they take them, nobody puts any more, and `failure` says what happened.

    Room is counted in units of the cache's memory (`ExtentPool`), of which a block takes as many as it has there; where
    only fp16 is in use a unit is a block.

    Args:
        nbytes: most bytes, rounded down to whole units.
        cache: whose blocks.
        folder: where to make a file without a name; None keeps the blocks in memory.
        clock: seconds, for the bandwidth.

    Attributes:
        total: units there is room for.
        stats: what happened so far.
        failure: why the file is not used any more; None while all is well.

    Raises:
        UsageError: not even one unit fits.
        RegionError: the memory or the disk space is not there.

    Example:
        >>> from hostcache import KVGeometry, PagedKVCache, SwapSpace
        >>> cache = PagedKVCache.create(KVGeometry(layers=1, kv_heads=1, head_dim=64), nbytes=1 << 20)
        >>> swap = SwapSpace(1 << 16, cache)
        >>> table = cache.table()
        >>> table.append(40)
        >>> ticket = swap.put(table.blocks)
        >>> table.release()  # others have the pool meanwhile
        >>> table.append(40)
        >>> swap.take(ticket, table.blocks)  # wherever they are now
        >>> swap.used, swap.stats.taken_blocks
        (0, 3)
    """

    def __init__(
        self,
        nbytes: int,
        cache: PagedKVCache,
        folder: str | os.PathLike[str] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        unit_bytes = cache.unit_bytes
        self.total = nbytes // unit_bytes
        if self.total < 1:
            raise UsageError(
                f"a swap space of {nbytes} bytes does not hold one block of {unit_bytes} bytes: give it more, or none",
                nbytes=nbytes,
                block_bytes=unit_bytes,
            )
        self.stats = SwapStats()
        self.failure: str | None = None
        self._cache = cache
        self._store: SwapStore = (
            MemoryStore(self.total, unit_bytes) if folder is None else FileStore(self.total, unit_bytes, Path(folder))
        )
        self._free = list(range(self.total))  # a heap
        self._slots: dict[SwapTicket, list[int]] = {}
        self._tokens = [0] * self.total  # by slot: tokens written in the block that begins there
        self._ids = itertools.count(1)
        self._clock = clock
        self._out, self._back = Bandwidth(), Bandwidth()

    @property
    def free(self) -> int:
        """Units there is room for now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Units that tickets stand for."""
        return self.total - self.free

    def seconds_for(self, blocks: int, codec: Codec = FP16) -> float:
        """How long putting and taking so many blocks will take, by the bandwidth so far; 0 before any was measured."""
        nbytes = blocks * self._cache.layout(codec).block_bytes
        return self._out.seconds_for(nbytes) + self._back.seconds_for(nbytes)

    def put(self, blocks: Sequence[int], codec: Codec = FP16) -> SwapTicket | None:
        """Copy blocks out. They are only read: the caller keeps its references, and gives them back when it likes.

        Args:
            blocks: block ids, in the order in which they will be taken back.
            codec: theirs.

        Returns:
            What to take them back with; None: no room, or a file that has failed.

        Raises:
            BlockStateError: a block is free: there is nothing in it.
            UsageError: there is no such block, or the cache does not serve the codec.
        """
        pool = self._cache.pool_of(codec)
        for block in blocks:
            self._cache.view(block, codec)
            if not pool.refs[block] and not pool.is_kept(block):
                raise BlockStateError(f"block {block} was put into swap while free", block=block)
        if self.failure is not None or len(blocks) * pool.span > self.free:
            self.stats.refused += 1
            return None
        slots = [heapq.heappop(self._free) for _ in range(len(blocks) * pool.span)]
        started = self._clock()
        try:
            for place, block in zip(_by_block(slots, pool.span), blocks, strict=True):
                self._tokens[place[0]] = self._cache.tokens_written(block)
                self._write(place, self._cache.view(block, codec))
        except OSError as error:
            self._give_back(slots)
            self._fail(error)
            return None
        except BaseException:  # Ctrl-C
            self._give_back(slots)
            raise
        self._out.add(len(blocks) * self._cache.layout(codec).block_bytes, self._clock() - started)
        self.stats.put_blocks += len(blocks)
        ticket = SwapTicket(next(self._ids), len(blocks), codec)
        self._slots[ticket] = slots
        return ticket

    def take(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        """Copy blocks back in, which frees their room here. All bytes are there when this returns.

        Args:
            ticket: what `put` returned.
            blocks: as many blocks of the same codec, each of one table and not kept; what they held is overwritten.

        Raises:
            SwapError: the bytes are lost, and the ticket is gone; the blocks hold anything, so give them back unread.
            BlockStateError: the ticket was taken or dropped before, or a block cannot be written. Nothing was done.
            UsageError: other blocks than were put, by their number. Nothing was done.
        """
        slots, codec = self._slots_of(ticket), ticket.codec
        if len(blocks) != ticket.blocks:
            raise UsageError(
                f"{ticket.blocks} blocks were put, {len(blocks)} are to take them",
                put=ticket.blocks,
                given=len(blocks),
            )
        pool, nbytes = self._cache.pool_of(codec), self._cache.layout(codec).block_bytes
        for block in blocks:
            if not 0 <= block < self._cache.units or not pool.writable(block):
                raise BlockStateError(f"block {block} cannot be overwritten: it is free, shared or kept", block=block)
        started = self._clock()
        try:
            for place, block in zip(_by_block(slots, pool.span), blocks, strict=True):
                self._cache.overwrite(block, self._read(place, nbytes), self._tokens[place[0]], codec)
        except OSError as error:
            self.drop(ticket)
            self._fail(error)
            raise SwapError(
                f"{ticket.blocks} swapped blocks are lost ({self.failure}): their sequence must be recomputed",
                blocks=ticket.blocks,
            ) from error
        self._back.add(ticket.blocks * nbytes, self._clock() - started)
        self.stats.taken_blocks += ticket.blocks
        self._give_back(self._slots.pop(ticket))

    def drop(self, ticket: SwapTicket) -> None:
        """Nobody will take these blocks back.

        Raises:
            BlockStateError: the ticket was taken or dropped before.
        """
        self._give_back(self._slots_of(ticket))
        del self._slots[ticket]
        self.stats.dropped_blocks += ticket.blocks

    def check(self) -> None:
        """Prove that every slot is free or stands behind one ticket. O(total): for tests and idle moments.

        Raises:
            BlockStateError: what does not add up.
        """
        behind = [slot for slots in self._slots.values() for slot in slots]
        if sorted(behind + self._free) != list(range(self.total)):
            raise BlockStateError(f"{len(behind)} slots behind tickets and {self.free} free of {self.total}")
        stats = self.stats
        blocks = sum(ticket.blocks for ticket in self._slots)
        if stats.put_blocks != stats.taken_blocks + stats.dropped_blocks + blocks:
            raise BlockStateError(f"{blocks} blocks behind tickets, but {stats}")

    def close(self) -> None:
        """Give memory or file back; every ticket is void. Safe to call twice."""
        self._slots.clear()
        self._free = list(range(self.total))
        self.failure = self.failure or "the swap space is closed"
        self._store.close()

    def _write(self, place: Sequence[int], content: NDArray[np.uint8]) -> None:
        """Keep a block's bytes in its slots."""
        unit = self._cache.unit_bytes
        for index, slot in enumerate(place):
            self._store.write(slot, content[index * unit : (index + 1) * unit])

    def _read(self, place: Sequence[int], nbytes: int) -> NDArray[np.uint8]:
        """A block's bytes from its slots; valid until the next write."""
        unit = self._cache.unit_bytes
        parts = [self._store.read(slot, max(0, min(unit, nbytes - index * unit))) for index, slot in enumerate(place)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _slots_of(self, ticket: SwapTicket) -> list[int]:
        slots = self._slots.get(ticket)
        if slots is None:
            raise BlockStateError(f"swap ticket {ticket.id} was taken or dropped before", id=ticket.id)
        return slots

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

    def _fail(self, error: OSError) -> None:
        self.stats.failures += 1
        self.failure = f"the swap file failed: {error.strerror or error}"


def _by_block(slots: Sequence[int], span: int) -> list[Sequence[int]]:
    """The slots of each block."""
    return [slots[first : first + span] for first in range(0, len(slots), span)]

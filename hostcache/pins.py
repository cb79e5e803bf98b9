"""Prefixes that somebody asked to keep: whose they are, how many blocks that may be, and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .blocks import BlockPool
from .errors import UsageError
from .extents import ExtentPool

__all__ = ["PinRoom", "PrefixPins"]


@dataclass(frozen=True, eq=False)
class _Pin:
    """What one owner keeps of one prompt.

    Attributes:
        blocks: in order.
        until: when it ends, by the clock.
    """

    blocks: tuple[int, ...]
    until: float


class PinRoom:
    """How much of the pool pins may keep, of all codecs together.

    It is counted in extents, since one pinned block keeps the extent from other codecs; for fp16 that is a block.

    Args:
        extents: the pool's memory.
        most: most extents with a pinned block; None: half of them.

    Attributes:
        most: as given.
    """

    def __init__(self, extents: ExtentPool, most: int | None = None) -> None:
        self.most = extents.total // 2 if most is None else most
        self._units = extents.units
        self._pinned: Counter[int] = Counter()  # by extent: pinned blocks

    @property
    def taken(self) -> int:
        """Extents with a pinned block."""
        return len(self._pinned)

    def needed(self, blocks: Iterable[int]) -> int:
        """Extents that pinning these would take besides."""
        return len({block // self._units for block in blocks} - self._pinned.keys())

    def take(self, block: int) -> None:
        """A block is pinned."""
        self._pinned[block // self._units] += 1

    def give_back(self, block: int) -> None:
        """A block is pinned no more."""
        extent = block // self._units
        self._pinned[extent] -= 1
        if not self._pinned[extent]:
            del self._pinned[extent]


class PrefixPins:
    """References to blocks that hold them in the pool although no sequence uses them.

    A pinned block is used, not cached, so nothing can evict it. That takes it from everybody else: hence the cap, and
    an end for every pin. A block that several pins keep is referred to, and counts, once.

    Args:
        pool: holds the blocks.
        room: how much all pins together may keep.
        clock: seconds.
    """

    def __init__(self, pool: BlockPool, room: PinRoom, clock: Callable[[], float]) -> None:
        self._room = room
        self._pool = pool
        self._clock = clock
        self._pins: dict[tuple[str, bytes, bytes], _Pin] = {}  # by owner, namespace and tokens
        self._holders: Counter[int] = Counter()  # by block: pins that keep it
        self._next_end = float("inf")

    @property
    def blocks(self) -> int:
        """Blocks that are pinned."""
        return len(self._holders)

    def ids(self) -> set[int]:
        """The pinned blocks: for tests and reports."""
        return set(self._holders)

    def add(self, owner: str, space: bytes, tokens: bytes, blocks: Sequence[int], seconds: float) -> None:
        """Pin blocks. What the owner had pinned of the same tokens is replaced.

        Args:
            owner: on whose behalf.
            space: key of their namespace.
            tokens: what they hold.
            blocks: distinct ids, all of them kept.
            seconds: for how long.

        Raises:
            UsageError: `seconds` is not positive, or the cap would be exceeded. Nothing was changed.
        """
        if not seconds > 0:  # true for NaN, too
            raise UsageError(f"a pin lasts a positive number of seconds, got {seconds}", seconds=seconds)
        name = (owner, space, tokens)
        fresh = [block for block in blocks if block not in self._holders]
        room = self._room
        if room.taken + room.needed(fresh) > room.most:
            raise UsageError(
                f"{owner!r} cannot pin {len(blocks)} blocks: {room.taken} of the {room.most} that may be pinned "
                "are pinned already; release a pin, or allow more",
                owner=owner,
                asked=len(blocks),
                pinned=room.taken,
                max_pinned=room.most,
            )
        for block in fresh:
            self._pool.acquire(block)
            room.take(block)
        self._holders.update(blocks)
        old = self._pins.get(name)
        self._pins[name] = _Pin(tuple(blocks), self._clock() + seconds)
        if old is not None:
            self._let_go(old)
        self._note_next_end()

    def release(self, owner: str) -> int:
        """End all pins of an owner; returns how many."""
        return self._end(name for name in self._pins if name[0] == owner)

    def release_space(self, space: bytes) -> int:
        """End all pins in a namespace, by its key; returns how many."""
        return self._end(name for name in self._pins if name[1] == space)

    def expire(self) -> int:
        """End the pins whose time is over; returns how many. O(1) while there is none."""
        if not self._pins:
            return 0
        now = self._clock()
        if now < self._next_end:
            return 0
        return self._end(name for name, pin in self._pins.items() if pin.until <= now)

    def _end(self, names: Iterable[tuple[str, bytes, bytes]]) -> int:
        ended = list(names)
        for name in ended:
            self._let_go(self._pins.pop(name))
        self._note_next_end()
        return len(ended)

    def _let_go(self, pin: _Pin) -> None:
        """One pin fewer on each of its blocks."""
        for block in pin.blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._room.give_back(block)
                self._pool.release(block)

    def _note_next_end(self) -> None:
        self._next_end = min((pin.until for pin in self._pins.values()), default=float("inf"))

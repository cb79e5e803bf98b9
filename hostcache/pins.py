"""Prefixes that somebody asked to keep: whose they are, how many blocks that may be, and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .blocks import BlockPool
from .errors import UsageError

__all__ = ["PrefixPins"]


@dataclass(frozen=True, eq=False)
class _Pin:
    """What one owner keeps of one prompt.

    Attributes:
        blocks: in order.
        until: when it ends, by the clock.
    """

    blocks: tuple[int, ...]
    until: float


class PrefixPins:
    """References to blocks that hold them in the pool although no sequence uses them.

    A pinned block is used, not cached, so nothing can evict it. That takes it from everybody else: hence the cap, and
    an end for every pin. A block that several pins keep is referred to, and counts, once.

    Args:
        pool: holds the blocks.
        max_blocks: most blocks that all pins together may keep.
        clock: seconds.
    """

    def __init__(self, pool: BlockPool, max_blocks: int, clock: Callable[[], float]) -> None:
        self.max_blocks = max_blocks
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
        if self.blocks + len(fresh) > self.max_blocks:
            raise UsageError(
                f"{owner!r} cannot pin {len(blocks)} blocks: {self.blocks} of the {self.max_blocks} that may be pinned "
                "are pinned already; release a pin, or allow more",
                owner=owner,
                asked=len(blocks),
                pinned=self.blocks,
                max_pinned=self.max_blocks,
            )
        for block in fresh:
            self._pool.acquire(block)
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
                self._pool.release(block)

    def _note_next_end(self) -> None:
        self._next_end = min((pin.until for pin in self._pins.values()), default=float("inf"))

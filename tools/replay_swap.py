"""A swap space without bytes: it counts blocks, and says what moving them would have taken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hostcache.codec import FP16, Codec
from hostcache.errors import BlockStateError
from hostcache.swap import SwapTicket

__all__ = ["BYTES_PER_SECOND", "ModelledSwap"]

BYTES_PER_SECOND = 10.1e9
"""One thread copies so much within the memory of an RK3588 (Orange Pi 5, ggml-org/whisper.cpp#89)."""


class ModelledSwap:
    """What `hostcache.SwapSpace` in RAM is to the scheduler.

    Args:
        nbytes: what it may hold.
        block_bytes: of a block, which is what is copied.
        unit_bytes: of what a block takes up.

    Attributes:
        free: blocks that there is room for.
    """

    def __init__(self, nbytes: int, block_bytes: int, unit_bytes: int) -> None:
        self.free = nbytes // unit_bytes
        self._block_seconds = block_bytes / BYTES_PER_SECOND
        self._held: dict[int, int] = {}  # blocks by ticket
        self._ids = itertools.count(1)
        self._seconds = 0.0

    @property
    def used(self) -> int:
        """Blocks that it holds."""
        return sum(self._held.values())

    def put(self, blocks: Sequence[int], codec: Codec = FP16) -> SwapTicket | None:
        """Take blocks out of the pool; None: no room."""
        if len(blocks) > self.free:
            return None
        ticket = SwapTicket(next(self._ids), len(blocks), codec)
        self._held[ticket.id] = ticket.blocks
        self.free -= ticket.blocks
        self._seconds += ticket.blocks * self._block_seconds
        return ticket

    def take(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        """Put them back into as many fresh blocks.

        Raises:
            BlockStateError: the ticket is no good, or the blocks are not as many.
        """
        if len(blocks) != ticket.blocks:
            raise BlockStateError(f"{ticket.blocks} blocks were put, {len(blocks)} are to be filled")
        self.drop(ticket)
        self._seconds += ticket.blocks * self._block_seconds

    def drop(self, ticket: SwapTicket) -> None:
        """Nobody will take them.

        Raises:
            BlockStateError: they were taken or dropped before.
        """
        if self._held.pop(ticket.id, None) is None:
            raise BlockStateError(f"swap ticket {ticket.id} was used before", id=ticket.id)
        self.free += ticket.blocks

    def seconds_for(self, blocks: int, _codec: Codec = FP16) -> float:
        """How long putting and taking so many takes."""
        return 2 * blocks * self._block_seconds

    def seconds_passed(self) -> float:
        """How long all that was moved since the last call took."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

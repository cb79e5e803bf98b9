"""What a slot holds, as numbers that name all that its KV depends on.

A token's keys and values follow from the tokens it sees, through the layers from all that those see, and from where
they were rotated. All of that goes into a digest; where the key stands rotated now stands beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostcache.prefix import Namespace
from hostcache.step import StepPlan

__all__ = ["DIGEST_VALUES", "HEAD_DIM", "KEY_POSITION", "Fault", "View", "digest_rows", "values_of"]

HEAD_DIM = 8
DIGEST_VALUES = 2 * HEAD_DIM  # K and V of one head
KEY_POSITION = HEAD_DIM - 1
"""The element of a key that says where it stands rotated; the others, and the value, hold a digest."""


class Fault(AssertionError):
    """The shadow disagrees with the cache."""


@dataclass(frozen=True)
class View:
    """What the tokens of one sequence see, and how far they go.

    Attributes:
        window: newest tokens; None: all.
        sinks: first tokens besides.
        context: positions there are.
        slides: whether it goes on behind them.
        block_tokens: tokens per block, of which a gap consists.
    """

    window: int | None
    sinks: int
    context: int
    slides: bool
    block_tokens: int

    @property
    def front(self) -> int:
        """Tokens of the blocks that hold sinks."""
        return -(-self.sinks // self.block_tokens) * self.block_tokens

    def sees_all(self, row: int) -> bool:
        """Whether the row sees all in front of itself."""
        return self.window is None or row < self.window

    def visible(self, row: int) -> list[int]:
        """The positions that the row sees in front of itself."""
        newest = 0 if self.window is None else max(0, row - self.window + 1)
        return [*range(min(self.sinks, newest)), *range(newest, row)]

    def gap(self, row: int) -> int:
        """Tokens in whole blocks behind the front that neither the row nor any after it sees."""
        if self.window is None:
            return 0
        gone = 0
        while self.front + gone + self.block_tokens <= row - self.window + 1:
            gone += self.block_tokens
        return gone

    def turned(self, row: int) -> int:
        """Positions by which the row and those it sees behind the front were turned back: step by step, as told."""
        turned = position = 0
        while self.slides:
            position = self.context + turned  # the first row for which there is no position
            if row < position:
                break
            turned = self.gap(position)
        return turned

    def check_rows(self, plan: StepPlan, index: int, start: int, stop: int) -> None:
        """Where the plan puts the rows `start` to `stop - 1` of its sequence with that index."""
        turned, rows = self.turned(start), slice(*plan.query_starts[index : index + 2])
        if self.turned(stop - 1) != turned:
            raise Fault(f"rows {start}..{stop} are computed at once, before and after keys are turned, {self}")
        if plan.positions[rows].tolist() != list(range(start - turned, stop - turned)):
            raise Fault(f"the rows from {start} on are at {plan.positions[rows]}, turned by {turned}, {self}")
        if plan.context_lens[index] != stop - self.gap(start):
            raise Fault(f"the table holds {plan.context_lens[index]} tokens, not {stop} - {self.gap(start)}, {self}")

    def check_slots(
        self, memory: NDArray[np.float16], table: NDArray[np.int32], start: int, digests: list[bytes]
    ) -> None:
        """What lies in the slots that rows from `start` on see in front of it."""
        seen = np.array(self.visible(start), np.int64)
        if not seen.size:
            return
        in_front = seen < self.front
        blocks, offsets = np.divmod(np.where(in_front, seen, seen - self.gap(start)), self.block_tokens)
        found = memory[table[blocks], :, offsets].reshape(len(seen), -1)
        expected = values_of([digests[p] for p in seen.tolist()], np.where(in_front, seen, seen - self.turned(start)))
        if not np.array_equal(found, expected):
            bad = int(seen[(found != expected).any(axis=1)][0])
            raise Fault(f"a row at {start} would read KV at {bad} that was computed for other tokens, {self}")


def digest_rows(
    namespace: Namespace, tokens: NDArray[np.int32], known: list[bytes], view: View | None = None
) -> list[bytes]:
    """Extend `known`, the digests of the first tokens, to all tokens; without a view, each sees all before it."""
    for position in range(len(known), len(tokens)):
        if view is None or view.sees_all(position):  # and so did the last one
            before = known[position - 1] if position else repr(namespace).encode()
        else:
            before = b"".join(known[p] for p in view.visible(position)) + view.turned(position).to_bytes(4, "little")
        known.append(hashlib.blake2b(before + int(tokens[position]).to_bytes(4, "little"), digest_size=32).digest())
    return known


def values_of(digests: Sequence[bytes], positions: ArrayLike | None = None) -> NDArray[np.float32]:
    """What slots hold, `[n, 16]`: integers up to 2048, which fp16 holds exactly.

    Args:
        digests: of the slots' tokens.
        positions: by which their keys are rotated; None: nobody looks at that.
    """
    packed = np.frombuffer(b"".join(digests), dtype=np.uint16).reshape(-1, DIGEST_VALUES)
    values = (packed & 2047).astype(np.float32)
    if positions is not None:
        values[:, KEY_POSITION] = positions
    return values

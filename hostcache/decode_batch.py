"""The running requests that decode, as arrays that change only where they do."""

from __future__ import annotations

import bisect
import operator
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._batch import ffi, lib
from .blocks import BlockPool
from .codec import FP16
from .fairness import ClientAccount
from .prefix_node import TOKEN_BYTES
from .request import Request
from .window import MAX_TOKENS

__all__ = ["RANK", "DecodeBatch", "DecodeRows", "FilledBlock"]

RANK = operator.attrgetter("rank")
"""The order of those that run."""

GAP, WINDOW, SINKS, TURNED, GAP_GROWS_AT, TURN_AT = range(6)
"""What is counted of a sequence's window, see `TableGap` and `WindowLayout`."""

NO_WINDOW = (0, 0, 0, 0, MAX_TOKENS, MAX_TOKENS)

RECENT_TOKENS = 256
"""Newest tokens that are kept of each sequence, if a block holds less than half as many: whoever has got so many is
told of them at once. A choice."""

STEPPED = ["tokens", "positions", "limits", "slots", "in_flight", "own_until", "windowing", "newest", "tables"]
HANDED_OVER = ["sampled", "fresh", "filled", "texts", "ended"]
"""The arrays that C sees: what is counted of sequences, and what goes in and comes out. It has them by these names."""

FilledBlock: TypeAlias = tuple[Request, int, bytes, int]
"""A request, where in its table the block is that it has filled, the block's tokens as int32 bytes, and the block."""


@dataclass(eq=False, slots=True)  # frozen would set each field by a call, in every step
class DecodeRows:
    """One row for each of some decoding requests; the arrays are the receiver's.

    Attributes:
        requests: whose rows, in order.
        tokens: int32 `[n]`, each one's newest token.
        positions: int32 `[n]`, where it stands, by which it is rotated.
        slots: int64 `[n]`, where its K and V go.
        context_lens: int32 `[n]`, tokens in its table, itself included.
        tables: int32 `[n, width]`, block ids; unused entries are 0.
        windowing: int32 `[3, n]`, as in `StepPlan`; None: none has a window.
        codecs: uint8 `[n]`, as there; None: all are fp16.
    """

    requests: list[Request]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    context_lens: NDArray[np.int32]
    tables: NDArray[np.int32]
    windowing: NDArray[np.int32] | None
    codecs: NDArray[np.uint8] | None = None


class DecodeBatch:
    """Decoding requests in order of rank, and what a step needs of them.

    A decoding sequence changes little from step to step: its token and position, and its table once in a block of
    tokens. So all of them are counted in arrays, which a step copies and moves on as a whole; a request is touched
    when it is asked for what it holds (see `settle`), needs a block, fills one, or ends.

    Args:
        capacity: most requests.
        block_tokens: tokens per block.

    Attributes:
        requests: in order of rank. Read it; change it only through the methods.
        clock: rises with every change that the requests have not been told of.
        only_pool: the pool from which the blocks of all come; None: from several, or there is no request.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.requests: list[Request] = []
        self.clock = 0
        self._block_tokens = block_tokens
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._limits = np.zeros(capacity, dtype=np.int32)  # the position of the last token that has a place
        self._in_flight = np.zeros(capacity, dtype=np.bool_)
        self._slots = np.zeros(capacity, dtype=np.int64)  # of the newest tokens, where they have one
        # The newest tokens by block, that of position p in entry p % (blocks * block_tokens): at least those that its
        # request's buffer lacks, as whoever comes to the last entry is settled, and the block that was filled last.
        blocks = max(2, RECENT_TOKENS // block_tokens)
        self._newest = np.zeros((capacity, blocks, block_tokens), dtype=np.int32)
        self._tables = np.zeros((capacity, 16), dtype=np.int32)  # grows to the right by doubling
        self._own_until = np.zeros(capacity, dtype=np.int32)  # of each table, see there
        self._windowed = 0  # how many have a window; where none has, this is all that is looked at
        self._windowing = np.zeros((capacity, len(NO_WINDOW)), dtype=np.int64)
        self.only_pool: BlockPool | None = None
        self._pools: Counter[BlockPool] = Counter()  # by how many of them each is used
        self._codes = np.zeros(capacity, dtype=np.uint8)  # of codecs
        self._clients: list[tuple[ClientAccount, int]] | None = None  # of all requests; None: not counted yet
        # What goes to C and comes back, see _batch.h. Void elements become bytes in a list.
        self._sampled = np.zeros(capacity, dtype=np.int32)
        self._fresh = np.zeros(capacity, dtype=np.int32)
        self._filled = np.zeros((capacity, 3), dtype=np.int32)
        self._texts = np.zeros(capacity, dtype=f"V{block_tokens * TOKEN_BYTES}")
        self._ended = np.zeros(capacity, dtype=np.int64)
        self._c = ffi.new("rp_batch *")  # points to the arrays
        self._c.block_tokens, self._c.kept_blocks = block_tokens, blocks
        self._c.windowing_width = len(NO_WINDOW)
        for name in STEPPED + HANDED_OVER:
            self._point_to(name)
        self._c.table_width = self._tables.shape[1]

    def add(self, request: Request) -> None:
        """A request decodes from now on: all of its tokens but one have been computed."""
        index, count = self._place(request), len(self.requests)
        for array in self._columns:
            array[index + 1 : count + 1] = array[index:count].copy()
        self.requests.insert(index, request)
        self._clients = None
        position = request.computed
        begun = position // self._block_tokens
        block = request.buffer[begun * self._block_tokens : position + 1]
        self._newest[index, begun % self._newest.shape[1], : len(block)] = block
        self._tokens[index] = block[-1]
        self._positions[index] = position
        self._limits[index] = request.limit - 1
        self._in_flight[index] = False
        self._windowed += request.layout is not None
        self._count_pool(request.pool, 1)
        self._codes[index] = request.codec.code
        self._windowing[index] = NO_WINDOW
        self._refresh(index)
        request.arrays, request.settled_at = self, self.clock

    def remove(self, request: Request) -> None:
        """A request decodes no more."""
        index, count = self._place(request), len(self.requests)
        if request.settled_at != self.clock:
            self._settle(index)
        request.arrays = None
        self._windowed -= request.layout is not None
        self._count_pool(request.pool, -1)
        for array in self._columns:
            array[index : count - 1] = array[index + 1 : count].copy()
        del self.requests[index]
        self._clients = None

    def has(self, request: Request) -> bool:
        """Whether the request is one of them."""
        return request.arrays is self

    def settle(self, request: Request) -> None:
        """Write to the request and its table what they have not been told yet."""
        self._settle(self._place(request))

    def without_room(self) -> NDArray[np.intp]:
        """The places of those whose next token needs a block, or a copy of a shared one."""
        count = len(self.requests)
        return (self._positions[:count] >= self._own_until[:count]).nonzero()[0]

    def needs_copy(self, places: NDArray[np.intp]) -> bool:
        """Whether one of these, which have no room, needs it for a copy of a shared block."""
        return bool(np.count_nonzero(self._held(places) % self._block_tokens))

    def by_pool(self, places: NDArray[np.intp]) -> dict[BlockPool, NDArray[np.intp]]:
        """These places by the pool that their requests' blocks come from."""
        codes = self._codes[places]
        parts = (places[codes == code] for code in np.unique(codes))
        return {self.requests[part[0]].pool: part for part in parts}

    def grow(self, places: NDArray[np.intp], pool: BlockPool) -> bool:
        """Give the next tokens of these, which have no room, slots in blocks of their own, all from one pool.

        Returns:
            Whether that was done: there are blocks for all, and none needs a copy.
        """
        count, c_places = len(places), ffi.from_buffer("int64_t[]", places)
        width = lib.rp_batch_width_to_grow(self._c, c_places, count)
        if width < 0 or count > pool.available:
            return False
        if width > self._tables.shape[1]:
            self._widen(width)
        self._fresh[:count] = pool.allocate(count)
        lib.rp_batch_grow(self._c, c_places, count)
        self.clock += 1
        return True

    def passed_blocks(self) -> list[Request]:
        """Those whose windows have passed a block that they hold."""
        return self._due(GAP_GROWS_AT)

    def at_turn(self) -> list[Request]:
        """Those whose keys must be turned back before their next token is computed."""
        return self._due(TURN_AT)

    def table_changed(self, request: Request) -> bool:
        """The request's table got a block, got another one in place of one, lost one, or was forked.

        Returns:
            Whether the request is one of them; otherwise nothing was done.
        """
        if not self.has(request):
            return False
        self._refresh(self._place(request))
        return True

    def take(self, requests: list[Request]) -> None:
        """A step computes these, all of the batch or some, whose next tokens have room."""
        self._in_flight[self._picked(requests)] = True
        self.clock += 1

    def take_back(self) -> None:
        """The step is not computed."""
        self._in_flight[: len(self.requests)] = False
        self.clock += 1

    def advance(self, requests: list[Request], tokens: Sequence[int]) -> tuple[list[FilledBlock], list[int]]:
        """Each of these requests, all of the batch or some, has computed its row and got one token more.

        Returns:
            The blocks that have been filled, and which of `requests` must not grow any more.
        """
        if not requests:
            return [], []
        count = len(requests)
        struct.pack_into(f"{count}i", self._sampled.data, 0, *tokens)  # takes half of what numpy takes for a list
        picked = self._picked(requests)
        places = ffi.NULL if isinstance(picked, slice) else ffi.from_buffer("int64_t[]", np.array(picked, np.int64))
        filled = lib.rp_batch_advance(self._c, places, count)
        self.clock += 1
        ended = self._ended[: self._c.ended_count].tolist() if self._c.ended_count else []
        return self._filled_blocks(filled) if filled else [], ended

    def charge(self, requests: list[Request]) -> None:
        """Each of these requests, all of the batch or some, got a token that its client pays for."""
        if requests != self.requests:
            for request in requests:
                request.account.charge_output(1)
            return
        if self._clients is None:
            self._clients = list(Counter(request.account for request in requests).items())
        for account, count in self._clients:
            account.charge_output(count)

    def rows(self, requests: list[Request]) -> DecodeRows:
        """The rows of these requests, all of the batch or some, in order of rank; each has a slot for its token."""
        picked = self._picked(requests)
        positions, contexts, windowing = self._positions[picked].copy(), self._held(picked) + 1, None
        if self._windowed:
            positions -= self._windowing[picked, TURNED].astype(np.int32)
            windowing = self._windowing[picked, WINDOW:GAP_GROWS_AT].T.astype(np.int32, order="C")
        width = -(-int(contexts[contexts.argmax()]) // self._block_tokens)
        tokens, slots, tables = self._tokens[picked], self._slots[picked], self._tables[picked, :width]
        only = self.only_pool
        codecs = None if only is not None and only.codec is FP16 else self._codes[picked].copy()
        return DecodeRows(requests, tokens.copy(), positions, slots.copy(), contexts, tables.copy(), windowing, codecs)

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        counts = self._tokens, self._positions, self._slots, self._limits, self._in_flight, self._own_until
        return *counts, self._windowing, self._codes, self._newest, self._tables

    def _held(self, picked: slice | list[int] | NDArray[np.intp]) -> NDArray[np.int32]:
        """Tokens in the tables of these, their newest ones not included."""
        positions = self._positions[picked]
        return positions - self._windowing[picked, GAP].astype(np.int32) if self._windowed else positions

    def _due(self, column: int) -> list[Request]:
        """Those whose next token has come to the position that the column of `_windowing` names."""
        if not self._windowed:
            return []
        count = len(self.requests)
        due = self._positions[:count] >= self._windowing[:count, column]
        return [self.requests[place] for place in due.nonzero()[0].tolist()]

    def _picked(self, requests: list[Request]) -> slice | list[int]:
        """Where these are; the whole batch is a slice, which is copied faster than picked rows."""
        return slice(len(requests)) if requests == self.requests else [self._place(request) for request in requests]

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self.requests, request.rank, key=RANK)

    def _settle(self, index: int) -> None:
        request = self.requests[index]
        length, in_flight = int(self._positions[index]) + 1, bool(self._in_flight[index])
        blocks = -(-int(self._own_until[index] - self._windowing[index, GAP]) // self._block_tokens)
        request.settle(self._newest[index].reshape(-1), length, self._tables[index, :blocks], in_flight=in_flight)
        request.settled_at = self.clock

    def _filled_blocks(self, count: int) -> list[FilledBlock]:
        """What so many sequences have just filled."""
        kept, requests, rows = self._newest.shape[1], self.requests, self._filled[:count].tolist()
        for place, number, _ in rows:
            if number % kept == kept - 1:
                self._settle(place)
        filled = zip(rows, self._texts[:count].tolist(), strict=True)
        return [(requests[place], number, text, block) for (place, number, block), text in filled]

    def _refresh(self, index: int) -> None:
        request, position = self.requests[index], int(self._positions[index])
        table, layout = request.table, request.layout
        ids = table.ids
        if layout is not None:
            gap = table.gap
            due = layout.gap_grows_at(gap.tokens), layout.turn_at(gap.turned)
            self._windowing[index] = gap.tokens, layout.shown, layout.window.sinks, gap.turned, *due
        if position < len(ids) * self._block_tokens + table.gap.tokens:
            self._slots[index] = table.slot(position)
        if len(ids) > self._tables.shape[1]:
            self._widen(len(ids))
        self._own_until[index] = table.own_until
        self._tables[index, : len(ids)] = ids
        self._tables[index, len(ids) :] = 0

    def _count_pool(self, pool: BlockPool, change: int) -> None:
        self._pools[pool] += change
        if not self._pools[pool]:
            del self._pools[pool]
        self.only_pool = next(iter(self._pools)) if len(self._pools) == 1 else None

    def _widen(self, width: int) -> None:
        grown = np.zeros((len(self._tables), 2 * width), dtype=np.int32)
        grown[:, : self._tables.shape[1]] = self._tables
        self._tables = grown
        self._point_to("tables")
        self._c.table_width = grown.shape[1]

    def _point_to(self, name: str) -> None:
        """Tell C where an array is, which this object keeps alive."""
        setattr(self._c, name, ffi.from_buffer("void *", getattr(self, f"_{name}"), require_writable=True))

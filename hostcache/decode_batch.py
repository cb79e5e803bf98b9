"""The running requests that decode, as arrays that change only where they do."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .request import Request

__all__ = ["RANK", "DecodeBatch", "DecodeRows"]

RANK = operator.attrgetter("rank")
"""The order of those that run."""


@dataclass(frozen=True)
class DecodeRows:
    """One row for each of some decoding requests; the arrays are the receiver's.

    Attributes:
        requests: whose rows, in order.
        tokens: int32 `[n]`, each one's newest token.
        positions: int32 `[n]`, where it stands.
        slots: int64 `[n]`, where its K and V go.
        tables: int32 `[n, width]`, block ids; unused entries are 0.
    """

    requests: list[Request]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]


class DecodeBatch:
    """Decoding requests in order of rank, and what a step needs of them.

    A decoding sequence changes little from step to step: its token and position, and its table once in a block of
    tokens. So the arrays stay, and a step copies them; building them anew would take longer than all else in a step.

    Args:
        capacity: most requests.
        block_tokens: tokens per block.

    Attributes:
        requests: in order of rank. Read it; change it only through the methods.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.requests: list[Request] = []
        self._block_tokens = block_tokens
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._tables = np.zeros((capacity, 16), dtype=np.int32)  # grows to the right by doubling
        self._own_until = np.zeros(capacity, dtype=np.int32)  # of each table, see there
        self._rows = np.arange(capacity)

    def add(self, request: Request) -> None:
        """A request decodes from now on: all of its tokens but one have been computed."""
        index, count = self._place(request), len(self.requests)
        for array in self._columns:
            array[index + 1 : count + 1] = array[index:count].copy()
        self.requests.insert(index, request)
        self._refresh(index)

    def remove(self, request: Request) -> None:
        """A request decodes no more."""
        index, count = self._place(request), len(self.requests)
        for array in self._columns:
            array[index : count - 1] = array[index + 1 : count].copy()
        del self.requests[index]

    def has(self, request: Request) -> bool:
        """Whether the request is one of them."""
        index = self._place(request)
        return index < len(self.requests) and self.requests[index] is request

    def without_room(self) -> list[Request]:
        """Those whose next token needs a block, or a copy of a shared one."""
        count = len(self.requests)
        places = np.flatnonzero(self._positions[:count] >= self._own_until[:count])
        return [self.requests[place] for place in places.tolist()]

    def table_changed(self, request: Request) -> bool:
        """The request's table got a block, got another one in place of one, lost one, or was forked.

        Returns:
            Whether the request is one of them; otherwise nothing was done.
        """
        index = self._place(request)
        if index == len(self.requests) or self.requests[index] is not request:
            return False
        self._refresh(index)
        return True

    def advance(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Each of these requests, all of the batch or some, has computed its row and got one token more."""
        if requests == self.requests:
            self._tokens[: len(tokens)] = tokens
            self._positions[: len(tokens)] += 1
        else:
            places = [self._place(request) for request in requests]
            self._tokens[places] = tokens
            self._positions[places] += 1

    def rows(self, requests: list[Request]) -> DecodeRows:
        """The rows of these requests, all of the batch or some, in order of rank; each has a slot for its token."""
        count, size = len(requests), self._block_tokens
        # The whole batch is a slice, which is copied faster than picked rows.
        picked = slice(count) if requests == self.requests else [self._place(request) for request in requests]
        positions = self._positions[picked].copy()
        width = int(positions.max()) // size + 1
        tables = self._tables[picked, :width].copy()
        blocks, offsets = np.divmod(positions, size)
        slots = tables[self._rows[:count], blocks].astype(np.int64) * size + offsets
        return DecodeRows(requests, self._tokens[picked].copy(), positions, slots, tables)

    @property
    def _columns(self) -> tuple[NDArray[np.int32], ...]:
        return self._tokens, self._positions, self._own_until, self._tables

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self.requests, request.rank, key=RANK)

    def _refresh(self, index: int) -> None:
        request = self.requests[index]
        ids = request.table.ids
        if len(ids) > self._tables.shape[1]:
            grown = np.zeros((len(self._tables), 2 * len(ids)), dtype=np.int32)
            grown[:, : self._tables.shape[1]] = self._tables
            self._tables = grown
        self._own_until[index] = request.table.own_until
        self._tokens[index] = request.buffer[request.computed]
        self._positions[index] = request.computed
        self._tables[index, : len(ids)] = ids
        self._tables[index, len(ids) :] = 0

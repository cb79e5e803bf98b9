"""A request: its tokens, how far its KV has been computed, and how it ended."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool
from .codec import Codec
from .errors import RockpageError
from .fairness import ClientAccount
from .prefix import Namespace, PrefixNode
from .swap import SwapTicket
from .table import NO_GAP, BlockTable, TableGap
from .window import WindowLayout

__all__ = ["FinishReason", "Request", "RequestState", "SwappedTail", "TokenArrays"]


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, at the place it had
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request is finished."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # as many tokens as it may have
    CONTEXT = "context"  # fewer than were asked for, since the context is full; whoever cut them says so
    ABORTED = "aborted"  # the caller asked
    FAILED = "failed"  # see `Request.error`


@dataclass(frozen=True)
class SwappedTail:
    """What was swapped out of a preempted request: its blocks behind those that others hold, too.

    Attributes:
        ticket: for the blocks' bytes.
        first: index of the first of them in the request's table.
        tokens: of the whole sequence whose KV had been computed.
        gap: what the table had let go of, behind `first` blocks or later.
    """

    ticket: SwapTicket
    first: int
    tokens: int
    gap: TableGap = NO_GAP


class TokenArrays(Protocol):
    """Where requests that decode are counted together; `DecodeBatch` is it.

    Attributes:
        clock: rises whenever the arrays change in a way that requests have not been told of.
    """

    clock: int

    def settle(self, request: Request) -> None:
        """Write to a request what the arrays say of it."""


@dataclass(eq=False, slots=True)
class Request:
    """One sequence that grows token by token.

    While it decodes, its tokens are counted in arrays, and it learns of them when it is asked: nothing is done for each
    request in each step.

    Attributes:
        id: unique within a scheduler, ascending in order of arrival.
        prompt_length: tokens of the prompt.
        namespace: whose KV it may share.
        node: last published node, held; None while it waits.
        published: full blocks that `node` stands behind.
        hit_tokens: tokens that need not be computed when it was last admitted: the prefix cache had them, or they were
            swapped in.
        preemptions: how often it lost its blocks.
        doomed: why it ends as soon as the step in flight is over; None if it does not.
        priority: as given; higher goes first.
        account: what its client has had.
        deadline: time by which it must have ended.
        admit_by: time by which it must have been admitted for the first time.
        age: levels it has gained by waiting.
        waited: seconds it waited before it was last admitted.
        waiting_since: while it waits, when that would have begun had it waited all the time.
        promotion: when it gains the next level; None while it does not wait.
        skips: later requests that were admitted while it did not fit.
        dedup_steps: steps for which it waited for another one to compute what both begin with.
        promised: blocks that admission keeps for it.
        announced: what it will publish next, for equal prompts that wait for it.
        swapped: what lies in the swap space for it.
        computed_earlier: tokens computed for it before it was last admitted.
        branches: begin with the same prompt, and wait in no queue until this request has computed it.
        leader: whose branch it is, as long as that one computes the prompt.
        rank: while it runs, its place among those that do: the highest level first, then in order of arrival.
        arrays: while it decodes, where it is counted.
        settled_at: their clock when it learnt of them last.
        layout: what its window means for its blocks; None: it has none.
        limit: tokens it may grow to.
    """

    id: int
    _buffer: NDArray[np.int32]
    _length: int
    prompt_length: int
    namespace: Namespace
    _table: BlockTable
    state: RequestState = RequestState.WAITING
    _computed: int = 0
    node: PrefixNode | None = None
    published: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    _in_flight: bool = False
    doomed: FinishReason | None = None
    finish_reason: FinishReason | None = None
    error: RockpageError | None = None
    priority: int = 0
    account: ClientAccount = field(default_factory=ClientAccount)
    deadline: float = math.inf
    admit_by: float = math.inf
    age: int = 0
    waited: float = 0.0
    waiting_since: float = 0.0
    promotion: float | None = None
    skips: int = 0
    dedup_steps: int = 0
    promised: int = 0
    announced: tuple[int, bytes] | None = None
    swapped: SwappedTail | None = None
    computed_earlier: int = 0
    branches: list[Request] = field(default_factory=list)
    leader: Request | None = None
    rank: tuple[int, int] = (0, 0)
    arrays: TokenArrays | None = None
    settled_at: int = 0
    layout: WindowLayout | None = None
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = len(self._buffer)

    @property
    def buffer(self) -> NDArray[np.int32]:
        """Prompt, then output, int32; its size is the most the request may grow to."""
        self._settle()
        return self._buffer

    @property
    def length(self) -> int:
        """Tokens in `buffer`."""
        self._settle()
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        self._settle()
        self._length = tokens

    @property
    def table(self) -> BlockTable:
        """Its blocks; empty while it waits."""
        self._settle()
        return self._table

    @table.setter
    def table(self, table: BlockTable) -> None:
        self._table = table

    @property
    def pool(self) -> BlockPool:
        """Where its blocks come from."""
        return self._table.pool

    @property
    def codec(self) -> Codec:
        """How its KV is stored."""
        return self._table.pool.codec

    @property
    def computed(self) -> int:
        """Leading tokens whose KV is in the table (or will be once the step in flight is committed)."""
        self._settle()
        return self._computed

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._settle()
        self._computed = tokens

    @property
    def in_flight(self) -> bool:
        """Whether it is part of a step that was scheduled and not yet committed."""
        self._settle()
        return self._in_flight

    @in_flight.setter
    def in_flight(self, value: bool) -> None:
        self._settle()
        self._in_flight = value

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output so far: a view that later tokens do not change."""
        return self.buffer[: self.length]

    @property
    def output(self) -> NDArray[np.int32]:
        """Output so far."""
        return self.buffer[self.prompt_length : self.length]

    @property
    def level(self) -> int:
        """Its priority, and what waiting has added to it; unchanged while it runs."""
        return self.priority + self.age

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV was computed for it over its whole life, recomputation included."""
        return self.computed_earlier + self.computed - self.hit_tokens

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a decoding request."""
        return self.length - self.computed

    @property
    def most_computed(self) -> int:
        """Tokens that may have to be computed for it, at most: the last one that it may grow to never is."""
        return self.limit - 1

    @property
    def shareable(self) -> int:
        """Leading tokens that may be shared with others: their KV is any other's, and none of it was let go."""
        if self.layout is None:
            return self.limit
        if self._table.gap.tokens:
            return self.published * self.layout.block_tokens
        return self.layout.shareable

    @property
    def next_turn(self) -> int:
        """The position in front of which the keys must be turned back; beyond the limit: never."""
        return self.limit if self.layout is None else self.layout.turn_at(self.table.gap.turned)

    @property
    def attended(self) -> int:
        """Tokens that its next one looks at, besides itself."""
        return self.computed if self.layout is None else self.layout.attended(self.computed)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.state is RequestState.FINISHED

    @property
    def full(self) -> bool:
        """Whether it may not grow any more."""
        return self.length == self.limit

    def let_go(self) -> bool:
        """Give up the blocks that its window has passed; returns whether there were any."""
        layout = self.layout
        return layout is not None and self.table.let_go(layout.front, layout.gap_at(self.computed))

    def settle(self, newest: NDArray[np.int32], length: int, table_ids: NDArray[np.int32], *, in_flight: bool) -> None:
        """It decodes, and has come to hold `length` tokens, its newest one not computed.

        Args:
            newest: int32; the token of position p is at `p % len(newest)`. It holds at least those that `buffer` lacks.
            length: tokens it holds.
            table_ids: int32, the blocks of its table.
            in_flight: whether a step in flight computes the newest token.
        """
        start, size = self._length, len(newest)
        while start < length:  # at most twice: up to the last column, and from the first
            column = start % size
            stop = min(length, start + size - column)
            self._buffer[start:stop] = newest[column : column + stop - start]
            start = stop
        self._length, self._computed, self._in_flight = length, length - 1, in_flight
        self._table.catch_up(table_ids, length - 1 + in_flight)

    def _settle(self) -> None:
        if self.arrays is not None and self.arrays.clock != self.settled_at:
            self.arrays.settle(self)

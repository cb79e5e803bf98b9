"""A request: its tokens, how far its KV has been computed, and how it ended."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .errors import RockpageError
from .fairness import ClientAccount
from .prefix import Namespace, PrefixNode
from .swap import SwapTicket
from .table import BlockTable

__all__ = ["FinishReason", "Request", "RequestState", "SwappedTail"]


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, at the place it had
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request is finished."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    ABORTED = "aborted"  # the caller asked
    FAILED = "failed"  # see `Request.error`


@dataclass(frozen=True)
class SwappedTail:
    """What was swapped out of a preempted request: its blocks behind those that others hold, too.

    Attributes:
        ticket: for the blocks' bytes.
        first: index of the first of them in the request's table.
        tokens: of the whole sequence whose KV had been computed.
    """

    ticket: SwapTicket
    first: int
    tokens: int


@dataclass(eq=False, slots=True)
class Request:
    """One sequence that grows token by token.

    Attributes:
        id: unique within a scheduler, ascending in order of arrival.
        buffer: int32; prompt, then output; its size is the most the request may grow to.
        length: tokens in `buffer`.
        prompt_length: tokens of the prompt.
        namespace: whose KV it may share.
        table: its blocks; empty while it waits.
        computed: leading tokens whose KV is in the table (or will be once the step in flight is committed).
        node: last published node, held; None while it waits.
        published: full blocks that `node` stands behind.
        hit_tokens: tokens that need not be computed when it was last admitted: the prefix cache had them, or they were
            swapped in.
        preemptions: how often it lost its blocks.
        in_flight: it is part of a step that was scheduled and not yet committed.
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
        limit: tokens it may grow to.
    """

    id: int
    buffer: NDArray[np.int32]
    length: int
    prompt_length: int
    namespace: Namespace
    table: BlockTable
    state: RequestState = RequestState.WAITING
    computed: int = 0
    node: PrefixNode | None = None
    published: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    in_flight: bool = False
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
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = len(self.buffer)

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
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.state is RequestState.FINISHED

    @property
    def full(self) -> bool:
        """Whether it may not grow any more."""
        return self.length == self.limit

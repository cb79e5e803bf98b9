"""A request: its tokens, how far its KV has been computed, and how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .errors import RockpageError
from .prefix import Namespace, PrefixNode
from .table import BlockTable

__all__ = ["FinishReason", "Request", "RequestState"]


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, at the place it had; everything will be recomputed
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request is finished."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    ABORTED = "aborted"  # the caller asked
    FAILED = "failed"  # see `Request.error`


@dataclass(eq=False)
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
        hit_tokens: tokens that came from the prefix cache when it was last admitted.
        computed_tokens: tokens whose KV was computed for it over its whole life, recomputation included.
        preemptions: how often it lost its blocks.
        in_flight: it is part of a step that was scheduled and not yet committed.
        doomed: why it ends as soon as the step in flight is over; None if it does not.
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
    computed_tokens: int = 0
    preemptions: int = 0
    in_flight: bool = False
    doomed: FinishReason | None = None
    finish_reason: FinishReason | None = None
    error: RockpageError | None = field(default=None)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output so far: a view that later tokens do not change."""
        return self.buffer[: self.length]

    @property
    def output(self) -> NDArray[np.int32]:
        """Output so far."""
        return self.buffer[self.prompt_length : self.length]

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a decoding request."""
        return self.length - self.computed

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.state is RequestState.FINISHED

    @property
    def full(self) -> bool:
        """Whether it may not grow any more."""
        return self.length == len(self.buffer)

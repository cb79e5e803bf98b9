"""What becomes a request, and what is refused at the door."""

from __future__ import annotations

import itertools
import math
import numbers

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .blocks import BlockPool
from .codec import FP16, Codec
from .errors import RequestRefused, UsageError
from .prefix import Namespace
from .request import Request, RequestState
from .scheduler_state import SchedulerState
from .window import AttentionWindow, WindowLayout, blocks_at_most

__all__ = ["MAX_TOKEN", "Intake", "require_terms"]

MAX_TOKEN = 2**31 - 1
"""Tokens travel as int32: a larger id would become another one."""

PER_FREE_PLACE = 8
"""Places of the queue that a named client may hold for each that is free: alone it comes to 8 of 9, two that flood to 8
of 17 each, and whoever comes next finds room. Source: the dynamic threshold of Choudhury and Hahne, "Dynamic Queue
Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking 6(2), 1998; the value is our
choice."""


def require_terms(priority: object, client: object, deadline: object, max_queue_seconds: object) -> None:
    """Do nothing if a request can be queued on these terms, which are `Scheduler.submit`'s.

    Requests are compared by them, so one that has no order would be in the way of all others.

    Raises:
        UsageError: the priority is no integer, the client no text, or a time no number.
    """
    if not isinstance(priority, numbers.Integral):
        raise UsageError(f"priority is {priority!r}; it must be an integer", priority=priority)
    if not isinstance(client, str):
        raise UsageError(f"client is {client!r}; it must be text", client=client)
    for name, value in (("deadline", deadline), ("max_queue_seconds", max_queue_seconds)):
        if value is not None and not (isinstance(value, numbers.Real) and not math.isnan(value)):
            raise UsageError(f"{name} is {value!r}; it must be a number of seconds, or None", name=name, value=value)


class Intake:
    """Makes requests of prompts and of running sequences.

    Args:
        state: what it is checked against.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._context = state.config.context_length
        self._ids = itertools.count(1)

    def request(
        self,
        prompt: ArrayLike,
        namespace: Namespace,
        max_tokens: int | None,
        window: AttentionWindow | None,
        codec: Codec = FP16,
        *,
        slide: bool,
        client: str = "",
    ) -> Request:
        """A request that could be served by the empty pool; it has no account yet.

        Raises:
            RequestRefused: it can never fit; the message says which limit it breaks and by how much.
            UsageError: as `Scheduler.submit`.
        """
        layout = self._layout(window, max_tokens, slide=slide)
        tokens = self._checked(prompt, max_tokens, layout, self._state.cache.pool_of(codec).total)
        self._check_place(client)
        limit = self._context if max_tokens is None else len(tokens) + max_tokens
        return self._new(tokens, limit, len(tokens), namespace, layout, codec=codec)

    def fork_of(self, parent: Request, max_tokens: int | None) -> Request:
        """A request for what follows a running one's tokens; it has neither account nor blocks yet.

        Raises:
            RequestRefused: it would wait for a place, and too many wait already.
            UsageError: the parent does not run, or is part of a step in flight; or `max_tokens` is used up already, or
                exceeds the context.
        """
        if parent.state is not RequestState.RUNNING or parent.in_flight or parent.node is None:
            raise UsageError(f"request {parent.id} is {parent.state.value} and cannot be forked now", id=parent.id)
        limit = parent.limit if max_tokens is None else parent.prompt_length + max_tokens
        if not parent.length < limit <= self._most_tokens(parent.layout):
            raise UsageError(
                f"a fork of {parent.length} tokens cannot end at {limit}: that must be more, and within the context of "
                f"{self._context}",
                tokens=parent.length,
                limit=limit,
            )
        if len(self._state.running) >= self._state.config.max_sequences:
            self._check_place(parent.account.name)
        fork = self._new(
            parent.tokens, limit, parent.prompt_length, parent.namespace, parent.layout, codec=parent.codec
        )
        fork.priority, fork.deadline = parent.priority, parent.deadline
        fork.age, fork.waited = parent.age, parent.waited
        return fork

    def branch_of(self, leader: Request) -> Request:
        """A request for another answer to a waiting one's prompt; it has no account yet.

        Raises:
            RequestRefused: too many wait already.
            UsageError: the leader does not wait for its first admission, or is a branch itself.
        """
        if leader.state is not RequestState.WAITING or leader.leader is not None:
            raise UsageError(f"request {leader.id} cannot be branched: it has begun, or is a branch", id=leader.id)
        self._check_place(leader.account.name)
        shared = leader.prompt_length, leader.namespace, leader.layout
        branch = self._new(leader.tokens, leader.limit, *shared, codec=leader.codec)
        branch.priority, branch.deadline, branch.leader = leader.priority, leader.deadline, leader
        leader.branches.append(branch)
        self._state.queue.announce(leader.account, 1)
        return branch

    def _layout(self, window: AttentionWindow | None, max_tokens: int | None, *, slide: bool) -> WindowLayout | None:
        config, size = self._state.config, self._state.cache.geometry.block_tokens
        of_model = config.model_window > 0
        if of_model:
            if window is not None:
                raise UsageError(
                    f"the model's layers have a window of {config.model_window} tokens of their own: give none",
                    model_window=config.model_window,
                )
            window = AttentionWindow(config.model_window)
        if window is not None and not isinstance(window, AttentionWindow):
            raise UsageError(f"window is {window!r}; it must be an AttentionWindow", window=window)
        if slide and (window is None or max_tokens is None or self._state.turn is None):
            raise UsageError(
                "a request that slides past the context needs a window, max_tokens, as nothing else ends it, and a "
                f"scheduler that can turn keys; got window={window}, max_tokens={max_tokens}, turn={self._state.turn}"
            )
        if window is None:
            return None
        chunk = min(config.prefill_chunk, config.max_rows)
        layout = WindowLayout(window, size, chunk, self._context if slide else None, of_model)
        if not layout.fits_context:
            raise RequestRefused(
                f"{window.sinks} sinks in whole blocks of {size}, a window of {window.tokens} tokens and one block "
                f"more exceed the context of {self._context}: to slide, choose a smaller window",
                sinks=window.sinks,
                tokens=window.tokens,
                context_length=self._context,
            )
        return layout

    def _most_tokens(self, layout: WindowLayout | None) -> int:
        """Tokens that a sequence may come to."""
        return self._context if layout is None or layout.context_length is None else MAX_TOKEN

    def _checked(
        self, prompt: ArrayLike, max_tokens: int | None, layout: WindowLayout | None, total: int
    ) -> NDArray[np.generic]:
        """The tokens of a prompt that can be served from a pool of `total` blocks."""
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise RequestRefused(
                f"a prompt is a non-empty list of token ids, got shape {tokens.shape} of {tokens.dtype}",
                shape=tokens.shape,
            )
        if tokens.min() < 0 or tokens.max() > MAX_TOKEN:
            raise RequestRefused(f"token ids are 0..{MAX_TOKEN}, got {tokens.min()}..{tokens.max()}")
        room = self._most_tokens(layout) - len(tokens)
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens and {max_tokens or 1} to generate exceed the context of "
                f"{self._most_tokens(layout)}: shorten the prompt or ask for fewer tokens",
                prompt_tokens=len(tokens),
                max_tokens=max_tokens,
                context_length=self._context,
            )
        if max_tokens is not None and max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, got {max_tokens}", max_tokens=max_tokens)
        blocks = blocks_at_most(layout, self._state.cache.geometry.blocks_for(len(tokens)))
        if blocks > total:
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens needs {blocks} blocks, the whole pool has {total}: "
                "shorten the prompt, or its window, or give the pool more memory",
                prompt_tokens=len(tokens),
                blocks=blocks,
                total=total,
            )
        return tokens

    def _check_place(self, client: str) -> None:
        """Refuse one more that waits, if as many as may do, of all or of this client."""
        waiting, most = len(self._state.queue) + self._state.queue.announced, self._state.config.max_waiting
        own, free = self._state.accounts.places(client), most - waiting
        if free <= 0:
            reason = f"{waiting} requests wait already, and no more than {most} may"
        elif client and own >= PER_FREE_PLACE * free:
            others = f"the {free} free places of {most} are for other clients"
            reason = f"{own} requests of client {client!r} wait already; {others}"
        else:
            return
        self._state.stats.refused += 1
        raise RequestRefused(f"{reason}: try again later", waiting=waiting, max_waiting=most, of_client=own)

    def _new(
        self,
        tokens: NDArray[np.generic],
        limit: int,
        prompt_length: int,
        namespace: Namespace,
        layout: WindowLayout | None,
        *,
        codec: Codec,
    ) -> Request:
        """A request that waits with these tokens, and may grow to `limit`."""
        table = self._state.cache.table(codec)
        buffer = self._buffer(tokens, limit, layout, table.pool)
        return Request(next(self._ids), buffer, len(tokens), prompt_length, namespace, table, layout=layout)

    def _buffer(
        self, tokens: NDArray[np.generic], limit: int, layout: WindowLayout | None, pool: BlockPool
    ) -> NDArray[np.int32]:
        """Room for `limit` tokens, the first of them filled in.

        Without a window, the token behind those that fill the whole pool fails the request, so there is never room for
        more. The context alone is no bound: a damaged model may claim any.
        """
        if layout is None:
            limit = min(limit, pool.total * pool.block_tokens + 2)
        try:
            buffer = np.empty(limit, dtype=np.int32)  # memory is taken as it is written
        except MemoryError as error:
            raise RequestRefused(f"there is no memory for {limit} tokens: ask for fewer", tokens=limit) from error
        buffer[: len(tokens)] = tokens
        return buffer

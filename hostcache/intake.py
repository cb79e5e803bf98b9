"""What becomes a request, and what is refused at the door."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import RequestRefused, UsageError
from .prefix import Namespace
from .request import Request, RequestState
from .scheduler_state import SchedulerState

__all__ = ["MAX_TOKEN", "Intake"]

MAX_TOKEN = 2**31 - 1
"""Tokens travel as int32: a larger id would become another one."""


class Intake:
    """Makes requests of prompts and of running sequences.

    Args:
        state: what it is checked against.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._context = state.config.context_length
        self._ids = itertools.count(1)

    def request(self, prompt: ArrayLike, namespace: Namespace, max_tokens: int | None) -> Request:
        """A request that could be served by the empty pool; it has no account yet.

        Raises:
            RequestRefused: it can never fit; the message says which limit it breaks and by how much.
        """
        tokens = self._checked(prompt, max_tokens)
        limit = self._context if max_tokens is None else len(tokens) + max_tokens
        buffer = self._buffer(tokens, limit)
        return Request(next(self._ids), buffer, len(tokens), len(tokens), namespace, self._state.cache.table())

    def fork_of(self, parent: Request, max_tokens: int | None) -> Request:
        """A request for what follows a running one's tokens; it has neither account nor blocks yet.

        Raises:
            UsageError: the parent does not run, or is part of a step in flight; or `max_tokens` is used up already, or
                exceeds the context.
        """
        if parent.state is not RequestState.RUNNING or parent.in_flight or parent.node is None:
            raise UsageError(f"request {parent.id} is {parent.state.value} and cannot be forked now", id=parent.id)
        limit = len(parent.buffer) if max_tokens is None else parent.prompt_length + max_tokens
        if not parent.length < limit <= self._context:
            raise UsageError(
                f"a fork of {parent.length} tokens cannot end at {limit}: that must be more, and within the context of "
                f"{self._context}",
                tokens=parent.length,
                limit=limit,
            )
        return Request(
            next(self._ids),
            self._buffer(parent.tokens, limit),
            parent.length,
            parent.prompt_length,
            parent.namespace,
            self._state.cache.table(),
            priority=parent.priority,
            deadline=parent.deadline,
            age=parent.age,
            waited=parent.waited,
        )

    def branch_of(self, leader: Request) -> Request:
        """A request for another answer to a waiting one's prompt; it has no account yet.

        Raises:
            UsageError: the leader does not wait for its first admission, or is a branch itself.
        """
        if leader.state is not RequestState.WAITING or leader.leader is not None:
            raise UsageError(f"request {leader.id} cannot be branched: it has begun, or is a branch", id=leader.id)
        branch = Request(
            next(self._ids),
            leader.buffer.copy(),
            leader.length,
            leader.prompt_length,
            leader.namespace,
            self._state.cache.table(),
            priority=leader.priority,
            deadline=leader.deadline,
            leader=leader,
        )
        leader.branches.append(branch)
        return branch

    def _checked(self, prompt: ArrayLike, max_tokens: int | None) -> NDArray[np.generic]:
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise RequestRefused(
                f"a prompt is a non-empty list of token ids, got shape {tokens.shape} of {tokens.dtype}",
                shape=tokens.shape,
            )
        if tokens.min() < 0 or tokens.max() > MAX_TOKEN:
            raise RequestRefused(f"token ids are 0..{MAX_TOKEN}, got {tokens.min()}..{tokens.max()}")
        room = self._context - len(tokens)
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens and {max_tokens or 1} to generate exceed the context of "
                f"{self._context}: shorten the prompt or ask for fewer tokens",
                prompt_tokens=len(tokens),
                max_tokens=max_tokens,
                context_length=self._context,
            )
        if max_tokens is not None and max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, got {max_tokens}", max_tokens=max_tokens)
        blocks, total = self._state.cache.geometry.blocks_for(len(tokens)), self._state.pool.total
        if blocks > total:
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens needs {blocks} blocks, the whole pool has {total}: "
                "shorten the prompt or give the pool more memory",
                prompt_tokens=len(tokens),
                blocks=blocks,
                total=total,
            )
        waiting, most = len(self._state.queue), self._state.config.max_waiting
        if waiting >= most:
            self._state.stats.refused += 1
            raise RequestRefused(
                f"{waiting} requests wait already, and no more than {most} may: try again later",
                waiting=waiting,
                max_waiting=most,
            )
        return tokens

    def _buffer(self, tokens: NDArray[np.generic], limit: int) -> NDArray[np.int32]:
        """Room for `limit` tokens, the first of them filled in.

        The token behind those that fill the whole pool fails the request, so there is never room for more. The
        context alone is no bound: a damaged model may claim any.
        """
        pool = self._state.pool
        buffer = np.empty(min(limit, pool.total * pool.block_tokens + 2), dtype=np.int32)
        buffer[: len(tokens)] = tokens
        return buffer

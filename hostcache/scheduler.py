"""Which tokens the next step computes, and who has to give blocks back for it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .cache import PagedKVCache
from .errors import RequestFailed, RequestRefused, RockpageError, UsageError
from .prefix import Namespace, PrefixCache
from .request import FinishReason, Request, RequestState
from .scheduler_config import SchedulerConfig
from .scheduler_stats import SchedulerStats
from .step import Chunk, StepPlan

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]

MAX_TOKEN = 2**31 - 1
"""Tokens travel as int32: a larger id would become another one."""


class Scheduler:
    """Continuous batching over one pool: `schedule` a step, compute it, `commit` it.

    Decoding sequences go first, running prefills take what is left of the rows, then waiting requests are
    admitted in order of arrival. A sequence that cannot grow takes the blocks of a newer one, which waits again
    at the place it had and is recomputed (mostly from the prefix cache, where its blocks stay while nobody
    needs them). The last sequence that cannot grow fails alone.

    Every waiting request fits the empty pool (others are refused by `submit`), so whenever requests wait and
    none runs, the next step admits one or fails one; `schedule` checks it.

    Args:
        cache: the pool and its bytes; nobody else keeps blocks of it over a step.
        prefix: the prefix cache over the same pool.
        config: limits.

    Example:
        >>> from hostcache import KVGeometry, Namespace, PagedKVCache, PrefixCache, Scheduler, SchedulerConfig
        >>> cache = PagedKVCache.create(KVGeometry(layers=1, kv_heads=1, head_dim=64), nbytes=1 << 20)
        >>> scheduler = Scheduler(cache, PrefixCache(cache.pool), SchedulerConfig(context_length=64))
        >>> request = scheduler.submit([5, 6, 7], Namespace("my model"), max_tokens=2)
        >>> plan = scheduler.schedule()
        >>> plan.tokens.tolist(), plan.positions.tolist()
        ([5, 6, 7], [0, 1, 2])
        >>> scheduler.commit(plan, tokens=[8], stops=[False])  # 8 was sampled, and goes on
        >>> scheduler.schedule().tokens.tolist()
        [8]
    """

    def __init__(self, cache: PagedKVCache, prefix: PrefixCache, config: SchedulerConfig) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self.running: list[Request] = []  # in order of arrival
        self.waiting: list[Request] = []  # in order of arrival, preempted requests at their old place
        self._cache = cache
        self._pool = cache.pool
        self._prefix = prefix
        self._ids = itertools.count(1)
        self._in_flight: StepPlan | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def submit(self, prompt: ArrayLike, namespace: Namespace, max_tokens: int | None = None) -> Request:
        """Accept a request; it waits until a step admits it.

        Args:
            prompt: token ids, one-dimensional.
            namespace: whose KV it may share.
            max_tokens: most tokens to generate; None: up to the model's context.

        Raises:
            RequestRefused: it can never fit; the message says which limit it breaks and by how much.
        """
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise RequestRefused(
                f"a prompt is a non-empty list of token ids, got shape {tokens.shape} of {tokens.dtype}",
                shape=tokens.shape,
            )
        if tokens.min() < 0 or tokens.max() > MAX_TOKEN:
            raise RequestRefused(f"token ids are 0..{MAX_TOKEN}, got {tokens.min()}..{tokens.max()}")
        room = self.config.context_length - len(tokens)
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens and {max_tokens or 1} to generate exceed the context of "
                f"{self.config.context_length}: shorten the prompt or ask for fewer tokens",
                prompt_tokens=len(tokens),
                max_tokens=max_tokens,
                context_length=self.config.context_length,
            )
        if max_tokens is not None and max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, got {max_tokens}", max_tokens=max_tokens)
        blocks = self._cache.geometry.blocks_for(len(tokens))
        if blocks > self._pool.total:
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens needs {blocks} blocks, the whole pool has {self._pool.total}: "
                "shorten the prompt or give the pool more memory",
                prompt_tokens=len(tokens),
                blocks=blocks,
                total=self._pool.total,
            )
        buffer = self._buffer(tokens, len(tokens) + (room if max_tokens is None else max_tokens))
        request = Request(next(self._ids), buffer, len(tokens), len(tokens), namespace, self._cache.table())
        self.waiting.append(request)
        return request

    def fork(self, parent: Request, max_tokens: int | None = None) -> Request:
        """Start a sequence that shares everything a running one has computed so far.

        It counts as a sequence of its own: where `max_sequences` run already it waits its turn, and then shares what
        the prefix cache still has.

        Args:
            parent: whose tokens and blocks it starts from.
            max_tokens: most tokens behind the prompt, those it shares included; None: as many as the parent's.

        Raises:
            UsageError: the parent is not running, or is part of a step in flight; or `max_tokens` is used up already,
                or exceeds the context.
        """
        if parent.state is not RequestState.RUNNING or parent.in_flight or parent.node is None:
            raise UsageError(f"request {parent.id} is {parent.state.value} and cannot be forked now", id=parent.id)
        limit = len(parent.buffer) if max_tokens is None else parent.prompt_length + max_tokens
        if not parent.length < limit <= self.config.context_length:
            raise UsageError(
                f"a fork of {parent.length} tokens cannot end at {limit}: that must be more, and within the context of "
                f"{self.config.context_length}",
                tokens=parent.length,
                limit=limit,
            )
        child = Request(
            next(self._ids),
            self._buffer(parent.tokens, limit),
            parent.length,
            parent.prompt_length,
            parent.namespace,
            self._cache.table(),
        )
        if len(self.running) >= self.config.max_sequences:
            self.waiting.append(child)
            return child
        self._prefix.hold_node(parent.node)
        child.table, child.node, child.published = parent.table.fork(), parent.node, parent.published
        child.computed = child.hit_tokens = parent.computed
        child.state = RequestState.RUNNING
        self.running.append(child)
        return child

    def schedule(self) -> StepPlan:
        """Plan the next step and take its slots. Commit it or roll it back before the next call.

        A request that cannot be continued is finished with an error here. The plan may be empty. If anything is
        raised, the slots taken so far go back.

        Raises:
            UsageError: the previous step is still in flight.
            RockpageError: nothing can go on, and blocks are missing that no request holds.
        """
        if self._in_flight is not None:
            raise UsageError("the previous step was neither committed nor rolled back")
        chunks: list[Chunk] = []
        try:
            self._fill_step(chunks)
            plan = StepPlan.build(chunks)
        except BaseException:
            self._take_back(chunks)
            raise
        if chunks:
            self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan, tokens: Sequence[int], stops: Sequence[bool]) -> None:
        """The step has been computed: publish its blocks and append what was sampled.

        Args:
            plan: the plan in flight.
            tokens: one sampled token per entry of `plan.logit_rows`.
            stops: for each of them, whether it ends its request.
        """
        if len(tokens) != len(plan.logit_rows) or len(stops) != len(tokens):
            raise UsageError(f"{len(plan.logit_rows)} tokens expected, got {len(tokens)} and {len(stops)} stops")
        self._land(plan)
        sampled = iter(zip(tokens, stops, strict=True))
        for chunk in plan.chunks:
            request = chunk.request
            token, stop = next(sampled) if chunk.samples else (-1, False)
            request.computed = chunk.start + chunk.count
            request.computed_tokens += chunk.count
            self.stats.computed_tokens += chunk.count
            self._publish(request)
            if request.doomed is not None:
                self._finish(request, request.doomed)
            elif chunk.samples:
                request.buffer[request.length] = token
                request.length += 1
                if stop or request.full:
                    self._finish(request, FinishReason.STOP if stop else FinishReason.LENGTH)
        self.stats.steps += 1

    def rollback(self, plan: StepPlan) -> None:
        """The step was not computed: give its slots back; the requests go on from where they were."""
        self._land(plan)
        self._take_back(plan.chunks)

    def end(self, request: Request, reason: FinishReason, error: RockpageError | None = None) -> None:
        """End a request in whatever state it is; its blocks go back at once, or after the step in flight.

        Ending a finished request does nothing: the client and the engine may both notice the end.
        """
        if request.finished:
            return
        request.error = request.error or error
        if request.in_flight:
            request.doomed = request.doomed or reason
        else:
            self._finish(request, reason)

    def _buffer(self, tokens: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
        """Room for `limit` tokens, the first of them filled in.

        The token behind those that fill the whole pool fails the request, so there is never room for more. The
        context alone is no bound: a damaged model may claim any.
        """
        buffer = np.empty(min(limit, self._pool.total * self._pool.block_tokens + 2), dtype=np.int32)
        buffer[: len(tokens)] = tokens
        return buffer

    def _fill_step(self, chunks: list[Chunk]) -> None:
        """Choose what the next step computes."""
        preemptions = self.stats.preemptions
        had_work, ended = not self.idle, False
        rows = self.config.max_rows
        decoding = [request for request in self.running if request.remaining == 1]
        prefilling = [request for request in self.running if request.remaining > 1]
        for request in decoding + prefilling:
            if rows and request.state is RequestState.RUNNING:  # an older one may have preempted it by now
                rows -= self._take_chunk(request, rows, chunks)
                ended |= request.finished
        while self.waiting and rows and self.stats.preemptions == preemptions:
            request = self.waiting[0]
            if self._cache.geometry.blocks_for(request.length) > self._pool.total:
                self._fail(request)  # it filled the pool together with a fork of itself, and lost its place
                ended = True
                continue
            if len(self.running) >= self.config.max_sequences or not self._admit(request):
                break
            rows -= self._take_chunk(request, rows, chunks)
        if had_work and not chunks and not ended and not self._pool.fenced:
            raise RockpageError(
                f"no progress: {len(self.waiting)} requests wait, {len(self.running)} run, "
                f"{self._pool.available} of {self._pool.total} blocks are available and no request holds the others"
            )

    def _take_chunk(self, request: Request, rows: int, chunks: list[Chunk]) -> int:
        """Take slots for the request's next tokens; returns how many."""
        count = min(request.remaining, rows, self.config.prefill_chunk)
        if not self._reserve(request, count):
            if not chunks:
                self._stand_back(request)
            return 0  # others are in this step: keep the blocks until one of them needs them
        request.in_flight = True
        chunks.append(Chunk(request, request.computed, count, count == request.remaining))
        return count

    def _reserve(self, request: Request, count: int) -> bool:
        """Grow the request's table, at the expense of newer requests if need be."""
        while request.table.blocks_needed(count) > self._pool.available:
            victim = self._victim(request)
            if victim is not None:
                self._preempt(victim)
            elif not self._free_tail(request):
                return False
        request.table.append(count)
        return True

    def _free_tail(self, request: Request) -> bool:
        """Let the prefix cache forget the tail that only this request uses: then it needs no private copy."""
        tail = request.table.shared_tail
        if tail is None or self._pool.refs[tail] > 1:
            return False
        self._prefix.forget(tail)
        return True

    def _stand_back(self, request: Request) -> None:
        """Nobody can make room for the first request of a step: wait for those it shares blocks with, or fail."""
        if len(self.running) > 1 or self._pool.fenced:
            self._preempt(request)
        else:
            self._fail(request)

    def _fail(self, request: Request) -> None:
        request.error = RequestFailed(
            f"request {request.id} has grown to {request.length} tokens and the pool of {self._pool.total} blocks of "
            f"{self._pool.block_tokens} has no room for the next one: give the pool more memory",
            id=request.id,
            tokens=request.length,
            total=self._pool.total,
        )
        self._finish(request, FinishReason.FAILED)

    def _victim(self, request: Request) -> Request | None:
        """The newest request behind `request` that is not in this step and whose end frees a block."""
        for candidate in reversed(self.running):
            if candidate is request:
                return None
            if not candidate.in_flight and any(map(self._pool.would_free, candidate.table.blocks)):
                return candidate
        return None

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        self.running.remove(request)
        request.state = RequestState.PREEMPTED
        request.computed = request.published = 0
        request.preemptions += 1
        self.stats.preemptions += 1
        bisect.insort(self.waiting, request, key=lambda waiting: waiting.id)

    def _admit(self, request: Request) -> bool:
        """Move the head of the queue into the running set if all of its tokens fit now."""
        reserved = 0
        if self.running:
            reserved = sum(running.table.blocks_needed(running.remaining) for running in self._growing())
            reserved += max(1, int(self._pool.total * self.config.watermark))
        hit = self._prefix.match(request.namespace, request.tokens)
        needed = self._cache.geometry.blocks_for(request.length) - len(hit.blocks)
        blocks, tokens = hit.blocks, len(hit.blocks) * self._pool.block_tokens
        if hit.partial >= 0 and needed + reserved <= self._pool.available:
            # Shared for now: the first append replaces it by a private copy, which `needed` counts.
            blocks, tokens = [*blocks, hit.partial], tokens + hit.partial_tokens
        elif hit.partial >= 0:
            self._pool.release(hit.partial)  # without it one block more may be available
        if needed + reserved > self._pool.available:
            self._pool.release_all(blocks)
            self._prefix.release_node(hit.node)
            return False
        request.table.adopt(blocks, tokens)
        request.node = hit.node
        request.published = len(hit.blocks)
        request.computed = request.hit_tokens = request.table.length
        self.stats.prompt_tokens += request.length
        self.stats.hit_tokens += request.hit_tokens
        request.state = RequestState.RUNNING
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=lambda running: running.id)
        return True

    def _growing(self) -> list[Request]:
        """Running requests whose prompt has not been computed to its end."""
        return [request for request in self.running if request.remaining > 1]

    def _publish(self, request: Request) -> None:
        """Make the request's newly computed full blocks known to others."""
        size = self._pool.block_tokens
        for index in range(request.published, request.computed // size):
            tokens = request.buffer[index * size : (index + 1) * size]
            assert request.node is not None
            request.node = self._prefix.publish(request.node, tokens, request.table.blocks[index])
            request.published += 1

    def _finish(self, request: Request, reason: FinishReason) -> None:
        size = self._pool.block_tokens
        tail = request.buffer[request.published * size : request.computed]
        if request.node is not None and len(tail):
            self._prefix.publish(request.node, tail, request.table.blocks[request.published])
        self._give_back(request)
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def _give_back(self, request: Request) -> None:
        request.table.release()
        if request.node is not None:
            self._prefix.release_node(request.node)
            request.node = None

    def _take_back(self, chunks: Sequence[Chunk]) -> None:
        """Undo what `_take_chunk` did for a step that will not be computed."""
        for chunk in chunks:
            chunk.request.in_flight = False
            chunk.request.table.truncate(chunk.start)
            if chunk.request.doomed is not None:
                self._finish(chunk.request, chunk.request.doomed)

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise UsageError("this plan is not the one in flight")
        self._in_flight = None
        for chunk in plan.chunks:
            chunk.request.in_flight = False

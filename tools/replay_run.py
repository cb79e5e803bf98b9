"""Traffic through the real scheduler, pool and prefix cache, on a clock that a cost model moves."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hostcache import (
    FinishReason,
    Namespace,
    PrefixCaches,
    Request,
    Scheduler,
    StepPlan,
    UnbackedCache,
)
from hostcache.block_layout import BlockLayout
from hostcache.codec_pools import unit_bytes
from hostcache.errors import BlockStateError, RequestRefused

from .replay_measure import Measurement, PoolState
from .replay_setup import Setup
from .replay_swap import ModelledSwap
from .replay_trace import TraceRequest

__all__ = ["Replay"]

FULL_CHECK_STEPS = 10_000
"""Steps between two proofs that every block is in one state and every node of the prefix tree counts right: they take
some hundred times as long as the balance that is struck at every step."""

OWN_TOKENS = 1 << 30
"""A request's own tokens are its number below this, so that no two share by chance for the next 10^9 requests."""


class _Session:
    """A request of the trace on its way."""

    __slots__ = ("asked", "first", "last", "left", "request", "started", "token")

    def __init__(self, asked: TraceRequest, request: Request, token: int, left: int) -> None:
        self.asked = asked
        self.request = request
        self.token = token  # what is "sampled" for it
        self.left = left  # tokens until its answer ends
        self.started = False  # a step has computed a part of it
        self.first = True  # the next token is its first
        self.last = asked.arrival  # when its newest token came


class Replay:
    """One run of a trace.

    Args:
        setup: what it meets.
        measurement: is told what happens.

    Attributes:
        now: seconds of the trace's clock.
        scheduler: the real one.
    """

    def __init__(self, setup: Setup, measurement: Measurement) -> None:
        self.now = 0.0
        self._setup = setup
        self._measure = measurement
        self._cache = UnbackedCache(setup.geometry, setup.extents, setup.codec)
        self._pool = self._cache.pool_of(setup.codec)
        self._prefix = PrefixCaches(self._cache.pools, clock=self._clock)
        layout = BlockLayout(setup.geometry, setup.codec)
        self._swap = ModelledSwap(setup.swap_bytes, layout.block_bytes, unit_bytes(setup.geometry, setup.codec))
        self.scheduler = Scheduler(self._cache, self._prefix, setup.config, clock=self._clock, swap=self._swap)
        self._namespace = Namespace("replay")
        self._serials = itertools.count()
        self._waiting: dict[int, _Session] = {}  # not computed in any step so far, by the request's id
        self._started: dict[int, _Session] = {}
        self._finished = 0  # requests of which the scheduler knows that they have ended, and so do we
        self._aborts: list[tuple[float, int]] = []  # a heap of times and ids

    def run(self, trace: Iterable[TraceRequest]) -> Measurement:
        """Replay all of it, until the last request has ended.

        Raises:
            UsageError: a line of the trace is no request.
            BlockStateError: the pool's books do not balance: a bug.
        """
        arrivals = iter(trace)
        upcoming = next(arrivals, None)
        while upcoming is not None or not self.scheduler.idle:
            if self.scheduler.idle and upcoming is not None:
                self._pass(upcoming.arrival)
            while upcoming is not None and upcoming.arrival <= self.now:
                self._submit(upcoming)
                upcoming = next(arrivals, None)
            self._abort_due()
            if not self.scheduler.idle:
                self._step()
        self._check_fully()
        self._measure.end(self.now, self.scheduler.stats, leaked_blocks=self._pool.used)
        return self._measure

    def _clock(self) -> float:
        return self.now

    def _submit(self, asked: TraceRequest) -> None:
        """Hand a request to the scheduler."""
        self._measure.arrived(asked)
        token = next(self._serials) % OWN_TOKENS
        try:
            request = self.scheduler.submit(
                self._prompt(asked, token),
                self._namespace,
                priority=asked.priority,
                client=asked.client,
                codec=self._setup.codec,
            )
        except RequestRefused as refusal:
            self._measure.refused(asked, refusal)
            return
        room = self._setup.config.context_length - asked.prompt_tokens
        self._waiting[request.id] = _Session(asked, request, token, min(asked.output_tokens, room))
        if asked.abort < math.inf:
            heapq.heappush(self._aborts, (asked.abort, request.id))

    def _prompt(self, asked: TraceRequest, token: int) -> NDArray[np.int32]:
        prompt = np.full(asked.prompt_tokens, token, dtype=np.int32)
        if asked.prefix and self._setup.reserved_blocks is None:
            prompt[: asked.prefix_tokens] = _prefix_text(asked.prefix, asked.prefix_tokens)
        return prompt

    def _abort_due(self) -> None:
        """End the requests whose clients have given up by now."""
        while self._aborts and self._aborts[0][0] <= self.now:
            _, number = heapq.heappop(self._aborts)
            session = self._waiting.get(number) or self._started.get(number)
            if session is not None:
                self.scheduler.end(session.request, FinishReason.ABORTED)
        self._drop_ended()

    def _step(self) -> None:
        """Plan a step, let its time pass, commit it."""
        plan = self.scheduler.schedule()
        if moving := self._swap.seconds_passed():
            self._pass(self.now + moving)
        self._drop_ended()
        if not plan.rows:  # a request failed or was preempted; the scheduler refuses to stand still
            return
        seconds = self._setup.cost.seconds(plan)
        for session in self._newly_started(plan):
            self._measure.started(session.asked, self.now)
        self._pass(self.now + seconds)
        tokens, stops = self._sample(plan)
        self.scheduler.commit(plan, tokens, stops, seconds=seconds)
        self._drop_ended()
        self._measure.steps += 1
        if self._measure.steps % FULL_CHECK_STEPS == 0:
            self._check_fully()

    def _newly_started(self, plan: StepPlan) -> Iterator[_Session]:
        """Sessions of which this step is the first to compute anything."""
        if not self._waiting:
            return
        for request in plan.requests:
            session = self._waiting.pop(request.id, None)
            if session is not None:
                self._started[request.id] = session
                yield session

    def _sample(self, plan: StepPlan) -> tuple[list[int], list[bool]]:
        """One token for each sequence that gets one, and whether its answer ends with it."""
        tokens: list[int] = []
        stops: list[bool] = []
        gaps: dict[float, int] = {}
        now = self.now
        for request in plan.sampling:
            session = self._started[request.id]
            session.left -= 1
            tokens.append(session.token)
            stops.append(session.left <= 0)
            if session.first:
                session.first = False
                self._measure.first_token_came(session.asked, now)
            else:  # most had their last one at the same time: at the end of the previous step
                gaps[session.last] = gaps.get(session.last, 0) + 1
            session.last = now
        for last, count in gaps.items():
            self._measure.gap.add(now - last, count)
        return tokens, stops

    def _pass(self, until: float) -> None:
        """Let time pass in which the pool does not change, and strike the balance of it."""
        pool = self._pool
        running = self.scheduler.running
        blocks = tokens = 0
        for request in running:
            blocks += len(request.table.blocks)
            tokens += request.table.held
        held = pool.total - pool.refs.count(0)
        if blocks != sum(pool.refs) or held + pool.free + pool.cached + pool.fenced + pool.withheld != pool.total:
            raise BlockStateError(
                f"after step {self._measure.steps} the pool counts {sum(pool.refs)} references to {held} blocks, but "
                f"tables hold {blocks}; {pool.free} blocks are free, {pool.cached} cached and {pool.fenced} fenced"
            )
        waiting = len(self._waiting) + len(self._started) - len(running)
        cached, reserved = pool.cached, self._setup.reserved_blocks
        if reserved is not None:
            blocks = held = len(running) * reserved
            cached = 0
        self._measure.hold(self.now, until, PoolState(len(running), waiting, tokens, blocks, held, cached))
        self.now = until

    def _drop_ended(self) -> None:
        """Part with sessions that have ended since the last call."""
        ended = self.scheduler.stats.finished - self._finished
        if not ended:
            return
        self._finished += ended
        for sessions in (self._started, self._waiting):
            over = [number for number, session in sessions.items() if session.request.finished]
            for number in over:
                session = sessions.pop(number)
                self._measure.ended(session.asked, session.request)
            ended -= len(over)
            if not ended:
                return

    def _check_fully(self) -> None:
        self._pool.check()
        self._prefix.check()
        if self._swap.used and self.scheduler.idle:
            raise BlockStateError(f"{self._swap.used} blocks lie in the swap space, and no request to take them")


@lru_cache(maxsize=256)
def _prefix_text(name: str, tokens: int) -> NDArray[np.int32]:
    """The beginning of the text that a prefix names: other tokens for every name, and none that a request has alone."""
    words = np.frombuffer(hashlib.blake2b(name.encode()).digest(), dtype="<u4") % OWN_TOKENS + OWN_TOKENS
    return np.resize(words.astype(np.int32), tokens)

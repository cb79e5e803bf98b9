"""What is measured while a trace is replayed, in memory that does not grow with it."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hostcache import FinishReason, Request
from hostcache.errors import RockpageError
from hostcache.scheduler_stats import SchedulerStats

from .replay_stats import Histogram, Trend
from .replay_trace import TraceRequest

__all__ = ["Measurement", "Outcomes", "PoolState"]

NUMBER = re.compile(r"\d[\d.]*")


@dataclass
class Outcomes:
    """How requests ended.

    Attributes:
        requests: that arrived.
        finished: whose answer ended by itself.
        aborted: whose client gave up.
        failed: that were accepted and could not be finished.
        refused: that were not accepted.
        first_token: seconds from arrival to the first token.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    first_token: Histogram = field(default_factory=Histogram)


class PoolState(NamedTuple):
    """Who holds what of the pool during one step.

    Attributes:
        running: sequences that hold blocks.
        waiting: requests that do not.
        tokens: that the tables hold, each counted by itself.
        table_blocks: of all tables, each counted by itself.
        held_blocks: that any table holds; one that several share counts once.
        cached_blocks: that only the prefix cache keeps.
    """

    running: int
    waiting: int
    tokens: int
    table_blocks: int
    held_blocks: int
    cached_blocks: int


class Measurement:
    """Counts, times and shares of the pool.

    Args:
        total_blocks: of the pool.
        block_tokens: tokens per block.
        bounds: seconds at which a new phase of the trace begins, ascending; the first one begins at 0.

    Attributes:
        phases: how the requests that arrived in each phase ended.
        gap: seconds between two tokens of a sequence.
        queue: seconds from arrival to the first step that computes something for the request.
        reasons: why requests failed or were refused, with N for their numbers.
        used: share of the pool's blocks that tables hold.
        cached: share of those that only the prefix cache keeps.
        waiting: requests that wait.
        first_token: seconds to the first token, by the time of arrival.
        steps: steps computed.
        seconds: from the trace's start to the end of the last request.
        idle_seconds: of those, without anything that runs.
        drain_seconds: from the last arrival to the end of the last request.
        leaked_blocks: blocks that were still referred to when every request had ended.
        stats: the scheduler's counters.
    """

    def __init__(self, total_blocks: int, block_tokens: int, bounds: Sequence[float] = ()) -> None:
        self.phases = [Outcomes() for _ in range(len(bounds) + 1)]
        self.gap, self.queue = Histogram(), Histogram()
        self.reasons: Counter[str] = Counter()
        self.used, self.cached, self.waiting, self.first_token = Trend(), Trend(), Trend(), Trend()
        self.steps = self.leaked_blocks = 0
        self.seconds = self.idle_seconds = self.drain_seconds = 0.0
        self.stats = SchedulerStats()
        self._total_blocks, self._block_tokens = total_blocks, block_tokens
        self._bounds = bounds
        self._last_arrival = 0.0
        self._asked_tokens = self._asked_blocks = 0  # of all requests, at their longest
        # Times seconds:
        self._tokens = self._table_blocks = self._held_blocks = self._cached_blocks = 0.0

    def arrived(self, asked: TraceRequest) -> None:
        """A request has come."""
        self._outcomes(asked).requests += 1
        self._last_arrival = asked.arrival
        length = asked.prompt_tokens + asked.output_tokens
        self._asked_tokens += length
        self._asked_blocks += -(-length // self._block_tokens)

    def refused(self, asked: TraceRequest, error: RockpageError) -> None:
        """It was not accepted."""
        self._outcomes(asked).refused += 1
        self._note(error)

    def started(self, asked: TraceRequest, now: float) -> None:
        """A step begins that is the first to compute something for it."""
        self.queue.add(now - asked.arrival)

    def first_token_came(self, asked: TraceRequest, now: float) -> None:
        """Its answer begins."""
        self._outcomes(asked).first_token.add(now - asked.arrival)
        self.first_token.point(asked.arrival, now - asked.arrival)

    def ended(self, asked: TraceRequest, request: Request) -> None:
        """It has ended, for whatever reason."""
        outcomes = self._outcomes(asked)
        if request.finish_reason is FinishReason.ABORTED:
            outcomes.aborted += 1
        elif request.finish_reason is FinishReason.FAILED:
            outcomes.failed += 1
            self._note(request.error)
        else:
            outcomes.finished += 1

    def hold(self, start: float, end: float, state: PoolState) -> None:
        """The pool was in this state from `start` to `end`."""
        seconds = end - start
        self._tokens += state.tokens * seconds
        self._table_blocks += state.table_blocks * seconds
        self._held_blocks += state.held_blocks * seconds
        self._cached_blocks += state.cached_blocks * seconds
        if not state.running:
            self.idle_seconds += seconds
        self.used.hold(start, end, state.held_blocks / self._total_blocks)
        self.cached.hold(start, end, state.cached_blocks / self._total_blocks)
        self.waiting.hold(start, end, state.waiting)

    def end(self, now: float, stats: SchedulerStats, leaked_blocks: int) -> None:
        """The last request has ended."""
        self.seconds, self.drain_seconds = now, now - self._last_arrival
        self.stats, self.leaked_blocks = stats, leaked_blocks

    @property
    def outcomes(self) -> Outcomes:
        """How all requests ended."""
        total = Outcomes()
        for phase in self.phases:
            for name in ("requests", "finished", "aborted", "failed", "refused"):
                setattr(total, name, getattr(total, name) + getattr(phase, name))
            total.first_token.merge(phase.first_token)
        return total

    @property
    def utilisation(self) -> float:
        """Tokens over the room for tokens in the blocks of the tables, each table by itself; mean over time."""
        return _ratio(self._tokens, self._table_blocks * self._block_tokens)

    @property
    def trace_utilisation(self) -> float:
        """What whole blocks allow at best: all requests' tokens at their end over the room in their blocks."""
        return _ratio(self._asked_tokens, self._asked_blocks * self._block_tokens)

    @property
    def waste(self) -> float:
        """Share of the room that is held in the pool but has no token in it; what is shared counts once."""
        empty = self._table_blocks * self._block_tokens - self._tokens
        return _ratio(empty, self._held_blocks * self._block_tokens)

    @property
    def used_share(self) -> float:
        """Share of the pool that tables hold; mean over time."""
        return _ratio(self._held_blocks, self._total_blocks * self.seconds)

    @property
    def cached_share(self) -> float:
        """Share of the pool that only the prefix cache keeps; mean over time."""
        return _ratio(self._cached_blocks, self._total_blocks * self.seconds)

    @property
    def hit_rate(self) -> float:
        """Share of the admitted prompts' tokens that the prefix cache had."""
        return _ratio(self.stats.hit_tokens, self.stats.prompt_tokens)

    def _outcomes(self, asked: TraceRequest) -> Outcomes:
        return self.phases[bisect.bisect_right(self._bounds, asked.arrival)]

    def _note(self, error: RockpageError | None) -> None:
        self.reasons[NUMBER.sub("N", str(error))] += 1


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

"""Who gives way when blocks or places run out, and what becomes of what it has computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from .promises import Promises
from .relief import Relief
from .request import Request, RequestState, SwappedTail
from .scheduler_state import SchedulerState

__all__ = ["Preemption"]


class Preemption:
    """Sends running requests back into the queue.

    The lowest level gives way first, and the newest within it; never one whose blocks would not come free, and never
    one that has lost them too often already.

    Args:
        state: who waits, who runs, and what there is.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._stats = state.stats
        self._running = state.running
        self._queue = state.queue
        self._cost = state.cost
        self._swap = state.swap

    def victims_behind(self, request: Request, blocks: int) -> list[Request]:
        """Who gives way to a running request that must grow; none if not all `blocks` it lacks would come free."""
        spared = lambda candidate: candidate.rank <= request.rank  # noqa: E731 - said at once what it is for
        return self._choose(request, spared, blocks, places=0, promises=self._running.guaranteed)

    def victims_for(self, request: Request, blocks: int, places: int) -> list[Request]:
        """Who gives way to a waiting request of higher priority.

        Ageing brings a request to the front of the queue and protects it while it runs, but takes nothing from others:
        the waiting one's priority is compared with the running one's level.

        Args:
            request: it waits.
            blocks: how many it lacks; 0 or less: none.
            places: how many it lacks in the running set: one or none.

        Returns:
            Those to preempt; none if not all it lacks would come free.
        """
        spared = lambda candidate: candidate.level >= request.priority  # noqa: E731 - said at once what it is for
        return self._choose(request, spared, blocks, places, promises=self._running.promised)

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; it waits again at the place it had."""
        request.swapped = self._swap_out(request)
        self._running.leave(request)
        request.computed_earlier = request.computed_tokens
        request.computed = request.hit_tokens = request.published = 0
        request.preemptions += 1
        request.state = RequestState.PREEMPTED
        self._stats.preemptions += 1
        self._queue.push(request, now)

    def _choose(
        self, request: Request, spared: Callable[[Request], bool], blocks: int, places: int, *, promises: Promises
    ) -> list[Request]:
        """The lowest of those that run, up to the first that is spared, until all that is lacking would come free.

        Args:
            request: who lacks it.
            spared: whether a request, and all above it, must not give way.
            blocks: how many must come free for the request's codec.
            places: how many must.
            promises: what has to be kept. What was promised to a victim need not be, if it is among that.
        """

        def relief(ended: list[Request]) -> Relief:
            return Relief(request.pool, promises, ended, with_promised=promises is self._running.promised)

        victims: list[Request] = []
        useless: list[Request] = []  # unless others that hold the same blocks, or extents, give way, too
        so_far = relief([])
        for candidate in self._running.lowest_first():
            freed = so_far.blocks
            if freed >= blocks and len(victims) >= places:
                break
            if spared(candidate):
                return []
            if candidate.in_flight or self._running.has_guarantee(candidate):
                continue
            so_far.add(candidate)
            if so_far.blocks <= freed and len(victims) >= places:
                useless.append(candidate)
            victims.append(candidate)
        if so_far.blocks < blocks or len(victims) < places:
            return []
        for candidate in useless:
            others = [victim for victim in victims if victim is not candidate]
            if relief(others).blocks >= blocks:
                victims = others
        return victims

    def _swap_out(self, request: Request) -> SwappedTail | None:
        """Keep what nobody else holds of the request's KV, if bringing it back is cheaper than computing it again.

        What others hold will be a hit. What only the prefix cache knows will not: blocks are being taken from running
        requests, so whatever is merely cached goes before them.
        """
        if self._swap is None or not request.computed:
            return None
        pool, blocks, gap = request.pool, request.table.blocks, request.table.gap
        first = sum(1 for _ in itertools.takewhile(lambda block: pool.refs[block] > 1, blocks))
        if gap.tokens:  # nothing behind it can be a hit
            first = min(first, gap.front // pool.block_tokens)
        if first == len(blocks):
            return None
        front = first * pool.block_tokens
        most = None if request.layout is None else request.layout.attended(request.computed)
        recomputing = self._cost.chunk_seconds(front, request.computed - front, most)
        if self._cost.known and recomputing <= self._swap.seconds_for(len(blocks) - first, pool.codec):
            return None
        ticket = self._swap.put(blocks[first:], pool.codec)
        if ticket is None:
            return None
        self._stats.swapped_out += 1
        return SwappedTail(ticket, first, request.computed, gap)

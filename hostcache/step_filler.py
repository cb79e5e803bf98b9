"""Fills one step: who decodes, which prompts go on, who is admitted, and who gives way for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .admission import Admission
from .codec import FP16
from .decode_batch import RANK
from .errors import RequestFailed, RockpageError
from .lifecycle import Lifecycle
from .preemption import Preemption
from .request import FinishReason, Request, RequestState
from .scheduler_state import SchedulerState
from .step import Chunk, StepPlan
from .step_budget import StepBudget
from .window import blocks_at_most

__all__ = ["Drafts", "StepFiller"]

Drafts: TypeAlias = Mapping[Request, NDArray[np.int32]]
"""Tokens that are likely to follow those of a request, int32, by request."""

MOST_ASIDE = 16
"""Waiting requests that one step looks at without admitting them: bounds what they cost."""


class StepFiller:
    """Chooses what a step computes and takes its slots.

    Args:
        state: who waits, who runs, and what there is.
        preemption: sends requests back.
        lifecycle: ends them.

    Attributes:
        decodes: requests of this step that decode.
        chunks: what it computes of prompts.
    """

    def __init__(self, state: SchedulerState, preemption: Preemption, lifecycle: Lifecycle) -> None:
        self.decodes: list[Request] = []
        self.chunks: list[Chunk] = []
        self._geometry = state.cache.geometry
        self._state = state
        self._extents = state.extents
        self._config = state.config
        self._stats = state.stats
        self._cost = state.cost
        self._turn_block = state.turn
        self._running = state.running
        self._queue = state.queue
        self._admission = Admission(state)
        self._preemption = preemption
        self._lifecycle = lifecycle

    @property
    def taken(self) -> list[Request]:
        """Running requests that may have slots in this step."""
        requests = self.decodes + [chunk.request for chunk in self.chunks]
        return [request for request in requests if request.state is RequestState.RUNNING]

    def fill(self, now: float, drafts: Drafts, *, paused: bool) -> StepPlan:
        """Take the slots of the next step; it may be empty. What is raised leaves them in `taken`.

        Args:
            now: the time.
            drafts: what may follow the tokens of requests.
            paused: whether nobody is admitted while others run.
        """
        self.decodes, self.chunks = [], []
        preemptions = self._stats.preemptions
        if not paused:
            self._make_way(now)
        stuck = self._take_decodes(now)
        rows = self._running.decoding.rows(self.decodes) if self.decodes else None
        attended = 0.0
        if rows is not None and self._config.step_seconds is not None:
            attended = self._cost.work.of_decodes(rows.context_lens)
        budget = StepBudget(self._config, self._cost, len(self.decodes), attended)
        for request in self._running.prefilling.copy():
            if request.state is RequestState.RUNNING and not self._take_chunk(request, budget, now):
                stuck.append(request)
        # Whoever gave way in this step is not to be admitted in it again.
        if not stuck and self._stats.preemptions == preemptions:
            self._admit(budget, 1 if paused else self._config.max_sequences, now)
        stuck = [request for request in stuck if request.state is RequestState.RUNNING]  # still
        if stuck and not self.decodes and not self.chunks:
            # Whoever pins blocks can take what was promised: then those go first that were promised nothing.
            self._stand_back(max(stuck, key=lambda r: (not self._running.has_guarantee(r), r.rank)), now)
        if drafts and self._take_drafts(drafts, budget):
            rows = self._running.decoding.rows(self.decodes) if self.decodes else None
        return StepPlan.build(self.chunks, rows)

    def require_hope(self) -> None:
        """Nothing could be planned: blocks must come back that no request holds, or nothing ever will be.

        Raises:
            RockpageError: none will; somebody outside holds them.
        """
        if not self._blocks_will_return and not any(map(self._awaits_fence, self._running.lowest_first())):
            raise RockpageError(
                f"no progress: {len(self._queue)} requests wait, {len(self._running)} run, {self._extents.common} of "
                f"{self._extents.total} {'blocks' if self._extents.units == 1 else 'extents'} are available and no "
                "request holds the others"
            )

    def _make_way(self, now: float) -> None:
        """Let requests run whose priority is above what runs, at the expense of that."""
        while len(self._running):
            request = self._queue.first()
            if request is None or request.priority <= self._running.lowest_level:
                return
            obstacle = self._admission.obstacle(request)
            places = int(len(self._running) >= self._config.max_sequences)
            if (obstacle is None and not places) or (obstacle is not None and obstacle.coming):
                return  # its turn comes in this step, or it waits for somebody who runs
            victims = self._preemption.victims_for(request, 0 if obstacle is None else obstacle.missing, places)
            for victim in victims:
                self._preemption.preempt(victim, now)
            if not victims or self._admission.admit(request) is not None:
                return
            self._queue.remove(request, now)

    def _take_decodes(self, now: float) -> list[Request]:
        """A slot for each sequence that decodes; returns those that got none."""
        batch = self._running.decoding
        self.decodes = batch.requests.copy()  # known before any of them takes a slot, should one raise
        turning, places = batch.at_turn(), batch.without_room()
        stuck: list[Request] = []
        if turning or (len(places) and (self._running.guaranteed.total or not self._grow_together(places))):
            growing = [batch.requests[place] for place in places.tolist()]
            # In order of rank: nobody gives way who has got a slot. It may have given way when its turn comes.
            due = sorted({*turning, *growing}, key=RANK)
            stuck = [r for r in due if r.state is RequestState.RUNNING and not self._go_on(r, now)]
            self.decodes = [request for request in batch.requests if request not in stuck]
        if self.decodes:
            batch.take(self.decodes)
        return stuck

    def _take_chunk(self, request: Request, budget: StepBudget, now: float) -> bool:
        """Slots for the next tokens of a prompt, if the budget has any for it; False: the pool has none."""
        start, before = request.computed, request.attended
        # A prompt that is to be answered several times is forked in front of its last token.
        wanted = max(1, request.remaining - 1) if request.branches else request.remaining
        count = 0 if budget.exhausted else budget.grant(before, wanted)
        if count == 0:
            return True
        if start == request.next_turn and not self._turn(request, now):
            return False
        count = min(count, request.next_turn - start)
        if request.branches and request.remaining == 1:
            self._lifecycle.release_branches(request)
        if not self._grow(request, count, now):
            return False
        request.in_flight = True
        self.chunks.append(Chunk(request, start, count, count == request.remaining))
        budget.spend(before, count)
        return True

    def _take_drafts(self, drafts: Drafts, budget: StepBudget) -> bool:
        """Slots for proposed tokens behind those that decode, of what all others leave; False: for none.

        Nobody gives way for them, and what they take comes back when the step is over, but for those accepted.
        """
        taken = []
        for request in self.decodes:
            draft = drafts.get(request)
            if draft is None:
                continue
            # Behind an accepted draft comes a token of the model's own, which must fit, too.
            most = min(request.limit - 1, request.next_turn) - request.length
            before = request.attended + 1  # the newest one
            count = budget.spare(before, min(len(draft), most))
            if self._running.promised.missing(request.pool, request.table.blocks_needed(count)) > 0:
                count = min(count, request.table.own_until - request.table.length)
            if count < 1:
                continue
            self._running.pause_decoding(request)
            taken.append(request)
            request.buffer[request.length : request.length + count] = draft[:count]
            request.table.append(count)
            self.chunks.append(Chunk(request, request.computed, 1 + count, samples=True, drafted=count))
            budget.spend(before, count)
        self.decodes = [request for request in self.decodes if request not in taken]
        return bool(taken)

    def _admit(self, budget: StepBudget, places: int, now: float) -> None:
        """Let waiting requests run, up to `places` in all, in order; a few may pass one that does not fit."""
        aside: list[Request] = []  # taken from the queue and not admitted, or not yet
        blocked: list[Request] = []  # of those, the ones that do not fit
        try:
            while not budget.exhausted and len(self._running) < places and len(aside) < MOST_ASIDE:
                request = self._queue.take()
                if request is None:
                    break
                aside.append(request)
                if blocks_at_most(request.layout, self._geometry.blocks_for(request.length)) > request.pool.total:
                    self._queue.put_back(aside.pop())
                    self._fail(request)  # it filled the pool together with a fork of itself, and lost its place
                    continue
                obstacle = self._admission.admit(request)
                if obstacle is None:
                    self._queue.leave(aside.pop(), now)
                    self._take_chunk(request, budget, now)
                    for passed in blocked:
                        passed.skips += 1
                    self._stats.skips += len(blocked)
                elif obstacle.coming:
                    request.dedup_steps += 1
                    self._stats.dedup_waits += 1
                else:
                    blocked.append(request)
                if any(request.skips >= self._config.max_skips for request in blocked):
                    break
        finally:
            for request in aside:
                self._queue.put_back(request)
        if blocked and not len(self._running) and self._state.prefix.pinned and not self._blocks_will_return:
            self._fail(blocked[0])

    @property
    def _blocks_will_return(self) -> bool:
        """Whether there are blocks that nobody holds and that cannot be had for now: fenced or withheld ones."""
        return bool(self._extents.withheld) or self._fenced

    @property
    def _fenced(self) -> bool:
        """Whether a running copy keeps a block that nobody refers to."""
        return any(pool.fenced for pool in self._state.cache.pools.values())

    def _grow_together(self, places: NDArray[np.intp]) -> bool:
        """Give those that decode and need a block one each; False: there are not enough, or a shared one is copied."""
        batch = self._running.decoding
        if batch.only_pool is not None:
            return batch.grow(places, batch.only_pool)
        # None may grow unless all can: in the worst case each block takes an extent.
        if len(places) > self._extents.common or batch.needs_copy(places):
            return False
        return all(batch.grow(part, pool) for pool, part in batch.by_pool(places).items())

    def _grow(self, request: Request, count: int, now: float) -> bool:
        """Give a request's next tokens slots, at the expense of those below it if need be."""
        missing = self._missing(request, request.table.blocks_needed(count))
        if (
            missing > 0
            and not self._make_room(request, missing, now)
            and not (missing == 1 and self._free_tail(request))
        ):
            return False
        request.table.append(count)
        self._running.update(request)
        return True

    def _go_on(self, request: Request, now: float) -> bool:
        """Give a decoding request's next token a slot, its keys turned back before if that is due."""
        if request.computed == request.next_turn and not self._turn(request, now):
            return False
        return self._grow(request, 1, now)

    def _turn(self, request: Request, now: float) -> bool:
        """Turn a request's keys back, so that it can go on, at the expense of those below it if need be."""
        assert self._turn_block is not None  # no request slides without
        turn = self._turn_block if request.codec is FP16 else partial(self._turn_block, codec=request.codec)
        missing = self._missing(request, request.table.blocks_to_turn())
        if missing > 0 and not self._make_room(request, missing, now):
            return False
        request.table.turn(turn)
        self._running.update(request)
        return True

    def _missing(self, request: Request, blocks: int) -> int:
        """How many of the blocks that a running request needs are not there for it."""
        # What was promised to others that must not be preempted is theirs.
        own = request.promised if self._running.has_guarantee(request) else 0
        return self._running.guaranteed.missing(request.pool, blocks - own)

    def _make_room(self, request: Request, missing: int, now: float) -> bool:
        """Preempt requests below this one for the blocks that it lacks; False: they have not got that many."""
        victims = self._preemption.victims_behind(request, missing)
        for victim in victims:
            self._preemption.preempt(victim, now)
        return bool(victims)

    def _free_tail(self, request: Request) -> bool:
        """Let the prefix cache forget the tail that only this request uses: then it needs no private copy.

        A tail behind a fence stays as it is: somebody may be copying what it held for another request.
        """
        tail = request.table.shared_tail
        if tail is None or not request.pool.would_free(tail):
            return False
        self._state.prefix_of(request).forget(tail)
        return True

    def _awaits_fence(self, request: Request) -> bool:
        """Whether somebody is copying a block that the request's next token would land in, or that is to be turned."""
        tail = request.table.shared_tail
        if request.computed == request.next_turn:
            return any(map(request.pool.is_fenced, request.table.blocks))
        return tail is not None and request.pool.is_fenced(tail)

    def _stand_back(self, request: Request, now: float) -> None:
        """Nobody can go on, and this is the lowest of them: wait for fences, give way, or fail."""
        if self._fenced or self._awaits_fence(request):
            return
        if len(self._running) > 1 or self._extents.withheld:
            self._preemption.preempt(request, now)
        else:
            self._fail(request)

    def _fail(self, request: Request) -> None:
        pinned, pool = self._state.prefix.pinned, request.pool
        error = RequestFailed(
            f"request {request.id} has grown to {request.length} tokens and the pool of {pool.total} blocks of "
            f"{pool.block_tokens} has no room for the next one"
            + (f" beside {pinned} pinned ones: unpin some, or" if pinned else ":")
            + " give the pool more memory",
            id=request.id,
            tokens=request.length,
            total=pool.total,
            pinned=pinned,
        )
        self._lifecycle.end(request, FinishReason.FAILED, error)

"""How a request's state changes when a step was computed, or when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from .errors import RockpageError
from .request import FinishReason, Request, RequestState
from .scheduler_state import SchedulerState
from .step import Chunk, StepPlan

__all__ = ["Lifecycle"]

_Sampled: TypeAlias = tuple[Request, int, bool]
"""A request, a token of its own, and whether that ends it."""


class Lifecycle:
    """Moves requests forward, back and to their end.

    Args:
        state: what goes with them.
        clock: seconds.
    """

    def __init__(self, state: SchedulerState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self._block_tokens = state.cache.geometry.block_tokens
        self._doomed: list[Request] = []  # to be ended when the step in flight is over

    def advance(self, plan: StepPlan, tokens: Sequence[int], stops: Sequence[bool]) -> None:
        """A plan was computed: publish full blocks, append what was sampled."""
        running, decodes = self._state.running, plan.decodes
        self._advance_decodes(decodes, tokens[: len(decodes)], stops[: len(decodes)])
        if plan.prefills:
            self._advance_chunks(plan, tokens[len(decodes) :], stops[len(decodes) :])
        for request in running.decoding.passed_blocks():
            request.let_go()
            running.update(request)
        self._end_doomed()

    def begin_fork(self, child: Request, parent: Request) -> None:
        """A new request goes on from where a running one stands: at once, or when there is a place for it."""
        running = self._state.running
        if len(running) >= self._state.config.max_sequences or running.has_guarantee(parent):
            self._state.queue.push(child, self._clock())
        else:
            running.add_fork(child, parent)

    def release_branches(self, leader: Request) -> None:
        """All of a running leader's prompt but its last token has been computed: its branches go their own ways."""
        branches, leader.branches = leader.branches, []
        self._state.queue.announce(leader.account, -len(branches))
        for branch in branches:
            branch.leader = None
            branch.age, branch.waited = leader.age, leader.waited
            self.begin_fork(branch, leader)

    def take_back(self, requests: Sequence[Request]) -> None:
        """The step that these are part of is not computed: undo what was taken for it."""
        self._state.running.decoding.take_back()
        for request in requests:
            request.in_flight = False
            request.table.truncate(request.computed)
            self._state.running.update(request)
        self._end_doomed()

    def end(self, request: Request, reason: FinishReason, error: RockpageError | None = None) -> None:
        """End a request in whatever state it is, at once or after the step in flight; once is enough."""
        if request.finished:
            return
        request.error = request.error or error
        if not request.in_flight:
            self._finish(request, reason)
        elif request.doomed is None:
            request.doomed = reason
            self._doomed.append(request)

    def _advance_decodes(self, decodes: list[Request], tokens: Sequence[int], stops: Sequence[bool]) -> None:
        """Each of these got a token; only those that filled a block or end are looked at one by one."""
        batch = self._state.running.decoding
        filled, ended = batch.advance(decodes, tokens)
        known = self._state.prefix.of(batch.only_pool.codec) if filled and batch.only_pool is not None else None
        for request, index, text, block in filled:
            # A fork of one that came back from the swap space has published nothing yet.
            if request.published < index or request.layout is not None:
                self._publish(request)
                self._state.running.update(request)
                continue
            assert request.node is not None
            prefix = self._state.prefix_of(request) if known is None else known
            request.node = prefix.publish_full(request.node, text, block)
            request.published += 1
        paying = decodes
        if self._doomed:  # ended while their step was computed: its token is not theirs
            for request in filter(batch.has, self._doomed):
                request.length -= 1
            paying = [request for request in decodes if request.doomed is None]
        batch.charge(paying)
        if not ended and not any(stops):
            return
        for index in sorted({*ended, *(index for index, stop in enumerate(stops) if stop)}):
            if decodes[index].doomed is None:
                self._finish(decodes[index], FinishReason.STOP if stops[index] else FinishReason.LENGTH)

    def _advance_chunks(self, plan: StepPlan, tokens: Sequence[int], stops: Sequence[bool]) -> None:
        """What was computed of prompts, and of drafts, with what was sampled behind them."""
        for chunk in plan.prefills:
            chunk.request.in_flight = False
            if not chunk.drafted:
                chunk.request.computed += chunk.count
                self._publish(chunk.request)
        chunks, drafts = plan.sampling[len(plan.decodes) :], plan.drafts
        sampled = list(zip(chunks, tokens, stops, strict=True))
        if drafts:
            sampled = self._verify(drafts, sampled)
        for request, token, stop in sampled:
            if request.doomed is not None:  # ended while its step was computed
                continue
            request.buffer[request.length] = token
            request.length += 1
            request.account.charge_output(1)
            if stop or request.length == request.limit:
                self._finish(request, FinishReason.STOP if stop else FinishReason.LENGTH)
        for chunk in plan.prefills:
            if not chunk.request.finished and chunk.request.doomed is None:
                chunk.request.let_go()
                self._state.running.computed_chunk(chunk.request)

    def _end_doomed(self) -> None:
        """The step is over in which these were ended."""
        doomed, self._doomed = self._doomed, []
        for request in doomed:
            assert request.doomed is not None
            self._finish(request, request.doomed)

    def _verify(self, drafts: list[Chunk], sampled: list[_Sampled]) -> list[_Sampled]:
        """Keep of the drafts, which have the last rows, what was sampled in front of it, too; the tokens that count."""
        row = len(sampled) - sum(chunk.count for chunk in drafts)
        counting = sampled[:row]
        for chunk in drafts:
            request, own = chunk.request, sampled[row : row + chunk.count]
            row += chunk.count
            proposed = request.buffer[chunk.start + 1 : chunk.start + chunk.count].tolist()
            accepted = 0
            for (_, token, stop), guess in zip(own, proposed, strict=False):  # behind the last row is no guess
                if stop or token != guess:
                    break
                accepted += 1
            kept = accepted + 1  # rows: that of the newest token is never in vain
            counting += own[:kept]
            request.computed += kept
            request.table.truncate(chunk.start + kept)
            self._publish(request)
            self._state.stats.drafted_tokens += chunk.drafted
            self._state.stats.accepted_tokens += accepted
        return counting

    def _publish(self, request: Request) -> None:
        """Make the request's newly computed full blocks known to others."""
        size, prefix = self._block_tokens, self._state.prefix_of(request)
        for index in range(request.published, min(request.computed, request.shareable) // size):
            tokens = request.buffer[index * size : (index + 1) * size]
            assert request.node is not None
            request.node = prefix.publish(request.node, tokens, request.table.blocks[index])
            request.published += 1

    def _finish(self, request: Request, reason: FinishReason) -> None:
        state = self._state
        if request.state is RequestState.RUNNING:
            self._publish(request)
            shared = min(request.computed, request.shareable)
            tail = request.buffer[request.published * self._block_tokens : shared]
            if request.node is not None and len(tail):
                state.prefix_of(request).publish(request.node, tail, request.table.blocks[request.published])
            state.running.leave(request)
        elif request.leader is not None:
            request.leader.branches.remove(request)
            request.leader = None
            state.queue.announce(request.account, -1)
        else:
            state.queue.remove(request, self._clock())
        self._replace_leader(request)
        if request.swapped is not None and state.swap is not None:
            state.swap.drop(request.swapped.ticket)
            request.swapped = None
        state.accounts.close(request.account)
        state.stats.finished += 1
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def _replace_leader(self, leader: Request) -> None:
        """A request has ended; the first of its branches, if it has any left, computes the prompt for the others."""
        if not leader.branches:
            return
        heir, *others = leader.branches
        leader.branches, heir.leader, heir.branches = [], None, others
        heir.age, heir.waited = leader.age, leader.waited
        for branch in others:
            branch.leader = heir
        self._state.queue.announce(heir.account, -1)
        self._state.queue.push(heir, self._clock())

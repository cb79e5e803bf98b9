"""Which tokens the next step computes, and who has to give blocks back for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from numpy.typing import ArrayLike

from .attention_work import AttentionWork
from .block_cache import BlockCache
from .codec import FP16, Codec
from .deadlines import Deadlines
from .errors import RockpageError, UsageError
from .intake import Intake, require_terms
from .lifecycle import Lifecycle
from .preemption import Preemption
from .prefix import Namespace
from .prefix_caches import PrefixSource
from .request import FinishReason, Request
from .scheduler_config import SchedulerConfig
from .scheduler_state import SchedulerState, SwapRoom
from .scheduler_stats import SchedulerStats
from .step import StepPlan
from .step_filler import Drafts, StepFiller
from .table import TurnAnyBlock
from .window import AttentionWindow

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Continuous batching over one pool: `schedule` a step, compute it, `commit` it.

    Sequences that decode go first, prompts take what is left of the step's rows and of its time, then waiting requests
    are admitted: see `WaitingQueue` for the order, `Admission` for what fits, `Preemption` for who gives way. The last
    sequence that cannot grow fails alone.

    Every waiting request fits the empty pool (others are refused by `submit`), so whenever requests wait and none runs,
    the next step admits one or fails one; `schedule` checks it. The same calls at the same times give the same plans.

    Args:
        cache: the pool and its bytes; nobody else keeps blocks of it over a step.
        prefix: the prefix cache over the same pool; where several codecs are in use, `PrefixCaches`.
        config: limits and rules.
        clock: seconds, from any beginning: all times here are its times.
        swap: where preempted requests may leave their KV; None: it is computed again.
        turn: turns the keys of a block by some positions, for requests that slide; None: there are none. For a codec
            other than fp16 it is given that, too.
        work: how much attention steps are for whoever computes them; None: no more than their rows look at.

    Attributes:
        config: as given.
        stats: counters.
        cost: what steps cost, learnt from the `seconds` of `commit`.
        pause_reason: why only one request may run at a time; empty: that is not so.

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

    def __init__(
        self,
        cache: BlockCache,
        prefix: PrefixSource,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        swap: SwapRoom | None = None,
        turn: TurnAnyBlock | None = None,
        work: AttentionWork | None = None,
    ) -> None:
        self._state = SchedulerState.begin(cache, prefix, config, swap, turn, work=work)
        self.config = config
        self.stats = self._state.stats
        self.cost = self._state.cost
        self.pause_reason = ""
        self._clock = clock
        self._intake = Intake(self._state)
        self._deadlines = Deadlines()
        self._lifecycle = Lifecycle(self._state, clock)
        self._preemption = Preemption(self._state)
        self._filler = StepFiller(self._state, self._preemption, self._lifecycle)
        self._in_flight: StepPlan | None = None

    @property
    def running(self) -> list[Request]:
        """Requests that run, in order of arrival."""
        return sorted(self._state.running.lowest_first(), key=lambda request: request.id)

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait, the next one first."""
        return list(self._state.queue)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not len(self._state.running) and not len(self._state.queue)

    def submit(
        self,
        prompt: ArrayLike,
        namespace: Namespace,
        max_tokens: int | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        max_queue_seconds: float | None = None,
        window: AttentionWindow | None = None,
        slide: bool = False,
        codec: Codec = FP16,
    ) -> Request:
        """Accept a request; it waits until a step admits it.

        A request with a window holds no more blocks than that takes, however long it grows. Of the prefix cache it has
        what lies within its first `window.tokens` tokens, whose KV is the same without a window; no more of it is
        published either.

        Args:
            prompt: token ids, one-dimensional.
            namespace: whose KV it may share.
            max_tokens: most tokens to generate; None: up to the model's context, for a request that does not slide.
            priority: higher ones go first.
            client: who asks; clients with equal weights get equal shares.
            deadline: time of the clock at which it fails if it has not ended; None: never.
            max_queue_seconds: how long it may wait to be admitted before it fails; None: as long as it takes.
            window: what each of its tokens sees; None: all before it, or what the model's own window says.
            slide: it may go on past the context, its prompt included: what it still sees is then turned to earlier
                positions. It needs a window, its own or the model's.
            codec: how its KV is stored; requests share it only with others of the same codec.

        Raises:
            RequestRefused: it can never fit, or too many wait already, of all or of this client; the message says by
                how much.
            UsageError: it is to slide without a window, without `max_tokens` or where nothing can turn keys; or it
                wants a window of its own though the model has one; or a term is of a wrong type, or NaN; or the pool
                does not serve the codec.
        """
        require_terms(priority, client, deadline, max_queue_seconds)
        now = self._clock()
        request = self._intake.request(prompt, namespace, max_tokens, window, codec, slide=slide, client=client)
        request.priority = priority
        request.account = self._state.accounts.open(client)
        request.deadline = math.inf if deadline is None else deadline
        request.admit_by = math.inf if max_queue_seconds is None else now + max_queue_seconds
        self._deadlines.watch(request)
        self._state.queue.push(request, now)
        return request

    def fork(self, parent: Request, max_tokens: int | None = None) -> Request:
        """Start a sequence that shares everything a running one has computed so far.

        It counts as a sequence of its own: where `max_sequences` run already it waits its turn, and then shares what
        the prefix cache still has. So does the fork of a request that has been preempted as often as may be: what was
        promised to that one leaves no room for copies of its tail.

        Args:
            parent: whose tokens and blocks it starts from, and whose priority, client and deadline it has.
            max_tokens: most tokens behind the prompt, those it shares included; None: as many as the parent's.

        Raises:
            RequestRefused: it would wait for its turn, and too many wait already.
            UsageError: the parent is not running, or is part of a step in flight; or `max_tokens` is used up already,
                or exceeds the context.
        """
        child = self._intake.fork_of(parent, max_tokens)
        child.account = self._state.accounts.open(parent.account.name)
        self._deadlines.watch(child)
        self._lifecycle.begin_fork(child, parent)
        return child

    def branch(self, leader: Request) -> Request:
        """Ask for another answer to the prompt of a request that waits: its blocks are computed once and shared.

        It is forked off when all of the prompt but the last token has been computed, and then counts as a sequence of
        its own, as in `fork`. If the leader ends before, the next branch computes the prompt in its place.

        Args:
            leader: whose prompt, limit, priority, client and deadline it has. How long it may wait is counted for the
                leader alone.

        Raises:
            RequestRefused: too many wait already, branches included.
            UsageError: the leader does not wait for its first admission, or is a branch itself.
        """
        branch = self._intake.branch_of(leader)
        branch.account = self._state.accounts.open(leader.account.name)
        self._deadlines.watch(branch)
        return branch

    def schedule(self, drafts: Drafts | None = None) -> StepPlan:
        """Plan the next step and take its slots. Commit it or roll it back before the next call.

        A request that cannot be continued, or whose time is up, is finished with an error here. The plan may be empty.
        If anything is raised, the slots taken so far go back.

        Args:
            drafts: tokens proposed for requests. Those that decode compute as many of them, beside their newest token,
                as rows, time and blocks are left, and `commit` keeps what turns out right.

        Raises:
            UsageError: the previous step is still in flight.
            RockpageError: nothing can go on, and blocks are missing that no request holds.
        """
        if self._in_flight is not None:
            raise UsageError("the previous step was neither committed nor rolled back")
        self._state.prefix.expire_pins()
        had_work, now = not self.idle, self._clock()
        before = self.stats.preemptions, self.stats.finished
        for request, error in self._deadlines.passed(now):
            self.stats.expired += 1
            self._lifecycle.end(request, FinishReason.FAILED, error)
        self._state.queue.promote(now)
        try:
            plan = self._filler.fill(now, drafts or {}, paused=bool(self.pause_reason))
        except BaseException:
            self._lifecycle.take_back(self._filler.taken)
            raise
        if plan.rows:
            self._in_flight = plan
        elif had_work and before == (self.stats.preemptions, self.stats.finished):
            self._filler.require_hope()
        return plan

    def commit(
        self, plan: StepPlan, tokens: Sequence[int], stops: Sequence[bool], *, seconds: float | None = None
    ) -> None:
        """The step has been computed: publish its blocks and append what was sampled.

        Args:
            plan: the plan in flight.
            tokens: one sampled token per entry of `plan.logit_rows`. Behind a token that is not the one proposed there,
                or that ends its request, those of the same draft do not count.
            stops: for each of them, whether it ends its request.
            seconds: how long computing it took, to learn from; None: nobody measured.

        Raises:
            UsageError: the tokens or stops are not as many, or this plan is not the one in flight.
        """
        if len(tokens) != len(plan.logit_rows) or len(stops) != len(tokens):
            raise UsageError(f"{len(plan.logit_rows)} tokens expected, got {len(tokens)} and {len(stops)} stops")
        self._land(plan)
        if seconds is not None:
            self.cost.observe(plan.rows, self.cost.work.of_step(plan), seconds)
        self.stats.steps += 1
        self.stats.computed_tokens += plan.rows
        self._lifecycle.advance(plan, tokens, stops)

    def rollback(self, plan: StepPlan) -> None:
        """The step was not computed: give its slots back; the requests go on from where they were.

        Raises:
            UsageError: this plan is not the one in flight.
        """
        self._land(plan)
        self._lifecycle.take_back(plan.requests)

    def end(self, request: Request, reason: FinishReason, error: RockpageError | None = None) -> None:
        """End a request in whatever state it is; its blocks go back at once, or after the step in flight.

        Ending a finished request does nothing: the client and the engine may both notice the end.
        """
        self._lifecycle.end(request, reason, error)

    def pause_admission(self, reason: str) -> None:
        """Admit nobody while others run, who go on; where nobody runs, one request at a time is still admitted.

        Args:
            reason: for reports, for example that memory is short.
        """
        self.pause_reason = reason

    def resume_admission(self) -> None:
        """Undo `pause_admission`."""
        self.pause_reason = ""

    def shed_lowest(self) -> Request | None:
        """Between two steps, take the blocks of the lowest in rank, however often it gave way before; for pressure.

        Returns:
            The request, which waits at its place; None: fewer than two run, or a step is in flight.
        """
        if self._in_flight is not None or len(self._state.running) < 2:
            return None
        request = next(self._state.running.lowest_first())
        self._preemption.preempt(request, self._clock())
        return request

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise UsageError("this plan is not the one in flight")
        self._in_flight = None

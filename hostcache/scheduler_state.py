"""What the scheduler's rules work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .attention_work import AttentionWork
from .block_cache import BlockCache
from .codec import Codec
from .extents import ExtentPool
from .fairness import ClientAccounts
from .prefix import PrefixCache
from .prefix_caches import PrefixSource
from .request import Request
from .running_set import RunningSet
from .scheduler_config import SchedulerConfig
from .scheduler_stats import SchedulerStats
from .step_cost import StepCost
from .swap import SwapTicket
from .table import TurnAnyBlock
from .waiting_queue import WaitingQueue

__all__ = ["SchedulerState", "SwapRoom"]


class SwapRoom(Protocol):
    """Where preempted requests may leave blocks; `SwapSpace` is one, and says what each call does."""

    def put(self, blocks: Sequence[int], codec: Codec, /) -> SwapTicket | None:
        """Copy blocks out; None: no room."""

    def take(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        """Copy them back in, or raise SwapError: they are lost."""

    def drop(self, ticket: SwapTicket) -> None:
        """Nobody will take them."""

    def seconds_for(self, blocks: int, codec: Codec, /) -> float:
        """How long putting and taking so many will take."""


@dataclass(frozen=True)
class SchedulerState:
    """Everything that more than one of the rules reads or changes.

    Attributes:
        cache: the pool and its bytes.
        prefix: what is known of prompts.
        config: limits and rules.
        swap: where preempted requests may leave their KV.
        turn: turns the keys of a block; None: nobody can, and no request slides.
        stats: counters.
        cost: what steps cost.
        accounts: what clients have had.
        queue: who waits.
        running: who runs.
    """

    cache: BlockCache
    prefix: PrefixSource
    config: SchedulerConfig
    swap: SwapRoom | None
    turn: TurnAnyBlock | None
    stats: SchedulerStats
    cost: StepCost
    accounts: ClientAccounts
    queue: WaitingQueue
    running: RunningSet

    @classmethod
    def begin(
        cls,
        cache: BlockCache,
        prefix: PrefixSource,
        config: SchedulerConfig,
        swap: SwapRoom | None,
        turn: TurnAnyBlock | None,
        *,
        work: AttentionWork | None,
    ) -> SchedulerState:
        """Nobody waits and nobody runs."""
        accounts = ClientAccounts(config.client_weights)
        return cls(
            cache=cache,
            prefix=prefix,
            config=config,
            swap=swap,
            turn=turn,
            stats=SchedulerStats(),
            cost=StepCost(work),
            accounts=accounts,
            queue=WaitingQueue(accounts, config.ageing_seconds),
            running=RunningSet(prefix, config, cache.extents, cache.geometry.block_tokens),
        )

    @property
    def extents(self) -> ExtentPool:
        """The memory of all codecs' blocks."""
        return self.cache.extents

    def prefix_of(self, request: Request) -> PrefixCache:
        """The prefix cache over the request's pool."""
        return self.prefix.of(request.pool.codec)

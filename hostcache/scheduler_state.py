"""What the scheduler's rules work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .attention_work import AttentionWork
from .block_cache import BlockCache
from .blocks import BlockPool
from .fairness import ClientAccounts
from .prefix import PrefixCache
from .running_set import RunningSet
from .scheduler_config import SchedulerConfig
from .scheduler_stats import SchedulerStats
from .step_cost import StepCost
from .swap import SwapTicket
from .table import TurnBlock
from .waiting_queue import WaitingQueue

__all__ = ["SchedulerState", "SwapRoom"]


class SwapRoom(Protocol):
    """Where preempted requests may leave blocks; `SwapSpace` is one, and says what each call does."""

    def put(self, blocks: Sequence[int]) -> SwapTicket | None:
        """Copy blocks out; None: no room."""

    def take(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        """Copy them back in, or raise SwapError: they are lost."""

    def drop(self, ticket: SwapTicket) -> None:
        """Nobody will take them."""

    def seconds_for(self, blocks: int) -> float:
        """How long putting and taking so many will take."""


@dataclass(frozen=True)
class SchedulerState:
    """Everything that more than one of the rules reads or changes.

    Attributes:
        cache: the pool and its bytes.
        pool: the pool.
        prefix: the prefix cache over it.
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
    pool: BlockPool
    prefix: PrefixCache
    config: SchedulerConfig
    swap: SwapRoom | None
    turn: TurnBlock | None
    stats: SchedulerStats
    cost: StepCost
    accounts: ClientAccounts
    queue: WaitingQueue
    running: RunningSet

    @classmethod
    def begin(
        cls,
        cache: BlockCache,
        prefix: PrefixCache,
        config: SchedulerConfig,
        swap: SwapRoom | None,
        turn: TurnBlock | None,
        *,
        work: AttentionWork | None,
    ) -> SchedulerState:
        """Nobody waits and nobody runs."""
        accounts = ClientAccounts(config.client_weights)
        return cls(
            cache=cache,
            pool=cache.pool,
            prefix=prefix,
            config=config,
            swap=swap,
            turn=turn,
            stats=SchedulerStats(),
            cost=StepCost(work),
            accounts=accounts,
            queue=WaitingQueue(accounts, config.ageing_seconds),
            running=RunningSet(prefix, config, cache.pool.total, cache.pool.block_tokens),
        )

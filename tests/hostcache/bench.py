"""A scheduler that computes nothing, for the tests that look at what it plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hostcache import (
    KVGeometry,
    Namespace,
    PagedKVCache,
    PrefixCache,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    SwapSpace,
)
from hostcache.attention_work import AttentionWork

__all__ = ["HOME", "Bench", "Steps", "chunks"]

HOME = Namespace("model")


class Steps:
    """Steps of a scheduler that pretend to compute and sample token 7, and look at all books after each."""

    cache: PagedKVCache
    prefix: Any  # a PrefixCache, or PrefixCaches
    swap: SwapSpace | None
    scheduler: Scheduler

    def step(self, seconds: float | None = None) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan.rows:
            samples = len(plan.logit_rows)
            self.scheduler.commit(plan, [7] * samples, [False] * samples, seconds=seconds)
        self.cache.extents.check()
        self.prefix.check()
        if self.swap is not None:
            self.swap.check()
        return plan

    def run(self) -> None:
        for _ in range(1000):
            if self.scheduler.idle:
                return
            self.step()
        pytest.fail("1000 steps did not finish the work")


class Bench(Steps):
    """A scheduler over blocks of four tokens.

    Its clock stands still unless a test moves `now`.
    """

    def __init__(
        self, blocks: int = 16, swap_blocks: int = 0, work: AttentionWork | None = None, **limits: Any
    ) -> None:
        geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
        self.now = 0.0
        self.cache = PagedKVCache.create(geometry, blocks * geometry.block_bytes)
        self.prefix: PrefixCache = PrefixCache(self.cache.pool, clock=lambda: self.now)
        swap_bytes = swap_blocks * geometry.block_bytes
        self.swap = SwapSpace(swap_bytes, self.cache, clock=lambda: self.now) if swap_blocks else None
        config = SchedulerConfig(**{"context_length": 200, "max_rows": 32, "max_sequences": 8, **limits})
        self.turns: list[int] = []  # positions, of each block
        clock = lambda: self.now  # noqa: E731 - one clock for both
        self.scheduler = Scheduler(
            self.cache, self.prefix, config, clock=clock, swap=self.swap, turn=self.turn, work=work
        )
        self.pool = self.cache.pool

    def submit(self, length: int, max_tokens: int = 50, start: int = 0, **terms: Any) -> Request:
        return self.scheduler.submit(np.arange(start, start + length), HOME, max_tokens, **terms)

    def turn(self, source: int, destination: int, by: int) -> None:
        self.cache.copy_block(source, destination, self.cache.geometry.block_tokens)
        self.turns.append(by)


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(chunk.request.id, chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks]

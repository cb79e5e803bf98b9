"""Under more traffic than fits, the pool is used as far as whole blocks allow, and recovers when traffic falls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hostcache import KVGeometry, Request, SchedulerConfig
from tools.replay_cost import PUBLISHED, PUBLISHED_GEOMETRY
from tools.replay_measure import Measurement
from tools.replay_run import Replay
from tools.replay_setup import Setup, contiguous
from tools.replay_trace import TraceRequest
from tools.replay_workload import INDUSTRIAL, MIXED, WORKLOADS, Workload, capacity, generate

GEOMETRY = KVGeometry(**PUBLISHED_GEOMETRY)
BLOCKS = 292


def setup_for(workload: Workload, *, waiting: int = 1024) -> Setup:
    config = SchedulerConfig(
        context_length=workload.context_length, max_sequences=16, step_seconds=0.5, max_waiting=waiting
    )
    return Setup(GEOMETRY, BLOCKS, config, PUBLISHED)


def traffic(workload: Workload, setup: Setup, loads: list[float], seconds: float) -> Iterator[TraceRequest]:
    most = capacity(workload, setup.cost, setup.config, BLOCKS, GEOMETRY.block_tokens)
    return generate(workload, [most * load for load in loads], seconds, seed=1)


@pytest.mark.parametrize(
    ("workload", "blocks", "seconds"), [(INDUSTRIAL, 48, 100.0), (MIXED, BLOCKS, 500.0)], ids=WORKLOADS
)
def test_blocks_are_as_full_as_whole_blocks_allow(workload: Workload, blocks: int, seconds: float) -> None:
    """Within a point of sum(length) / sum(whole blocks) of the trace; contiguous sessions are far from it."""
    setup = replace(setup_for(workload), blocks=blocks)
    runs = [
        Replay(each, Measurement(blocks, GEOMETRY.block_tokens)).run(traffic(workload, setup, [1.5], seconds))
        for each in (setup, contiguous(setup))
    ]
    paged, side_by_side = runs
    assert paged.outcomes.requests == side_by_side.outcomes.requests > 70
    assert paged.stats.preemptions > 0  # the pool is full
    assert paged.utilisation == pytest.approx(paged.trace_utilisation, abs=0.01)
    assert side_by_side.utilisation < 0.6
    # What only the prefix cache keeps is told apart: it is no part of either.
    assert 0 < paged.cached_share <= 1 - paged.used_share
    assert side_by_side.cached_share == 0
    assert paged.leaked_blocks == side_by_side.leaked_blocks == 0


class Watched(Replay):
    """Notes each step in which the next request waits although there is room for it.

    Not looked at are steps that could not admit it whatever the room: those that preempted somebody, as what that
    brought is for whoever needed it, and those that hold it back until another one has computed what both begin with.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, Measurement(setup.blocks, GEOMETRY.block_tokens))
        self.waits = self.passed_over = self._held_back = 0
        self.idle_room: list[str] = []

    def _pass(self, until: float) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        stats, watermark = self.scheduler.stats, max(1, int(self._setup.blocks * self._setup.config.watermark))
        before, self._held_back = self._held_back, stats.preemptions + stats.dedup_waits
        if waiting and running and self._held_back > before:
            self.passed_over += 1
        elif waiting and running:
            self.waits += 1
            need = GEOMETRY.blocks_for(waiting[0].length) - max(shared_blocks(waiting[0], each) for each in running)
            if self._pool.available > need + watermark:
                self.idle_room.append(f"{self._pool.available} blocks are available, {need} needed")
        super()._pass(until)


def shared_blocks(request: Request, running: Request) -> int:
    """Whole blocks that a request can have from one that runs; its last token is computed in any case."""
    longest = min(request.length - 1, running.computed)
    differ = np.flatnonzero(request.tokens[:longest] != running.tokens[:longest])
    return int(differ[0] if len(differ) else longest) // GEOMETRY.block_tokens


@pytest.mark.parametrize(
    ("workload", "blocks", "seconds"), [(INDUSTRIAL, 48, 200.0), (MIXED, BLOCKS, 800.0)], ids=WORKLOADS
)
def test_room_is_not_left_while_a_request_waits_for_it(workload: Workload, blocks: int, seconds: float) -> None:
    """Free and evictable blocks are at most the next request's need and the watermark, where nothing else is short.

    Whole prompts are computed in one step, so none is promised anything; rows, time and places do for all.
    """
    setup = setup_for(workload)
    config = replace(
        setup.config,
        step_seconds=None,
        prefill_chunk=workload.context_length,
        max_rows=1 << 16,
        max_sequences=64,
        max_preemptions=10**6,
    )
    watched = Watched(replace(setup, config=config, blocks=blocks))
    watched.run(traffic(workload, setup, [1.5], seconds))
    assert watched.waits > 500
    assert watched.passed_over < watched.waits / 2
    assert watched.idle_room == []


def test_overload_is_refused_with_a_reason_and_passes() -> None:
    """At 1.5 times of capacity between two spells at half of it: what exceeds it and the queue is refused.

    Whoever was accepted is served as ever, and afterwards all is as before.
    """
    setup = setup_for(INDUSTRIAL, waiting=64)
    steady = replace(INDUSTRIAL, daily_swing=0.0)
    most = capacity(steady, PUBLISHED, setup.config, BLOCKS, GEOMETRY.block_tokens)
    measured = Measurement(BLOCKS, GEOMETRY.block_tokens, bounds=(200.0, 400.0))
    Replay(setup, measured).run(traffic(steady, setup, [0.5, 1.5, 0.5], 600.0))
    before, during, after = measured.phases
    assert before.finished + before.aborted == before.requests
    assert during.requests > 1.4 * most * 200
    assert during.refused == pytest.approx(during.requests - most * 200 - 64, rel=0.15)
    assert during.finished + during.aborted + during.refused == during.requests
    reasons = (
        "N requests wait already, and no more than N may",
        "N requests of client 'industrial-N' wait already; the N free places of N are for other clients",
    )
    assert measured.reasons.keys() == {f"{reason}: try again later" for reason in reasons}
    # Whoever was accepted waited for at most the 64 before it and its turn among the clients.
    assert during.first_token.percentile(50) < 2 * 64 / most
    assert measured.gap.percentile(95) <= 0.5  # the time that a step may take
    assert after.refused < 0.02 * after.requests
    assert after.first_token.percentile(50) < 2 * before.first_token.percentile(50)
    assert measured.drain_seconds < 60
    assert measured.leaked_blocks == 0

"""Under more traffic than fits, the pool is used as far as whole blocks allow, and recovers when traffic falls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hostcache import KVGeometry, SchedulerConfig
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


@pytest.mark.parametrize(("workload", "seconds"), [(INDUSTRIAL, 60.0), (MIXED, 500.0)], ids=WORKLOADS)
def test_blocks_are_as_full_as_whole_blocks_allow(workload: Workload, seconds: float) -> None:
    """Within a point of sum(length) / sum(whole blocks) of the trace; contiguous sessions are far from it."""
    setup = setup_for(workload)
    runs = [
        Replay(each, Measurement(BLOCKS, GEOMETRY.block_tokens)).run(traffic(workload, setup, [1.5], seconds))
        for each in (setup, contiguous(setup))
    ]
    paged, side_by_side = runs
    assert paged.outcomes.requests == side_by_side.outcomes.requests > 70
    assert paged.utilisation == pytest.approx(paged.trace_utilisation, abs=0.01)
    assert side_by_side.utilisation < 0.6
    assert paged.leaked_blocks == side_by_side.leaked_blocks == 0


class Watched(Replay):
    """Notes each step in which the next request waits although there is room for it.

    The room of a request that has just been preempted is for whoever needed it; the next step gives out the rest.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, Measurement(BLOCKS, GEOMETRY.block_tokens))
        self.waits = self._preemptions = 0
        self.idle_room: list[str] = []

    def _pass(self, until: float) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        preempted, self._preemptions = (
            self.scheduler.stats.preemptions - self._preemptions,
            self.scheduler.stats.preemptions,
        )
        if waiting and running and not preempted and len(running) < self._setup.config.max_sequences:
            self.waits += 1
            need = GEOMETRY.blocks_for(waiting[0].length)
            promised = sum(request.table.blocks_needed(request.remaining) for request in running)
            watermark = max(1, int(BLOCKS * self._setup.config.watermark))
            if self._pool.available > need + promised + watermark:
                self.idle_room.append(f"{self._pool.available} blocks, {need} needed, {promised} promised")
        super()._pass(until)


def test_room_is_not_left_while_a_request_waits_for_it() -> None:
    """Without limits on rows and time; nor shared prefixes, for which later requests would wait."""
    setup = setup_for(MIXED)
    config = replace(setup.config, step_seconds=None, max_rows=1 << 16, max_preemptions=10**6)
    watched = Watched(replace(setup, config=config))
    apart = (replace(asked, prefix="", prefix_tokens=0) for asked in traffic(MIXED, setup, [1.5], 800.0))
    watched.run(apart)
    assert watched.waits > 500
    assert watched.idle_room == []


def test_overload_is_refused_with_a_reason_and_passes() -> None:
    """Half of capacity, twice of it, half of it: the queue fills, what exceeds it is refused, and all is as before."""
    setup = setup_for(INDUSTRIAL, waiting=64)
    measured = Measurement(BLOCKS, GEOMETRY.block_tokens, bounds=(200.0, 400.0))
    steady = replace(INDUSTRIAL, daily_swing=0.0)
    Replay(setup, measured).run(traffic(steady, setup, [0.5, 2.0, 0.5], 600.0))
    before, during, after = measured.phases
    assert before.finished + before.aborted == before.requests
    assert during.refused / during.requests == pytest.approx(0.5, abs=0.1)
    assert during.finished + during.aborted + during.refused == during.requests
    assert list(measured.reasons) == ["N requests wait already, and no more than N may: try again later"]
    # Whoever was accepted waited for at most the 64 before it, at some 2.4 a second, and its turn among the clients.
    assert during.first_token.percentile(50) < 2 * 64 / 2.4
    assert after.refused < 0.02 * after.requests
    assert after.first_token.percentile(50) < 2 * before.first_token.percentile(50)
    assert measured.drain_seconds < 60
    assert measured.leaked_blocks == 0

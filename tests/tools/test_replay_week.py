"""A week of a busy plant: a million requests, books balanced at each of 3.8 million steps. Takes minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hostcache import KVGeometry, SchedulerConfig
from tests.footprint import Footprint
from tools.replay_cost import PUBLISHED, PUBLISHED_GEOMETRY
from tools.replay_measure import Measurement
from tools.replay_run import Replay
from tools.replay_setup import Setup
from tools.replay_trace import TraceRequest
from tools.replay_workload import INDUSTRIAL, capacity, generate

pytestmark = pytest.mark.long

DAY = 86400.0
MIB = 1 << 20
GEOMETRY = KVGeometry(**PUBLISHED_GEOMETRY)
SETUP = Setup(
    GEOMETRY,
    blocks=512 * MIB // GEOMETRY.block_bytes,
    config=SchedulerConfig(context_length=INDUSTRIAL.context_length, max_sequences=16, step_seconds=0.5),
    cost=PUBLISHED,
)
CAPACITY = capacity(INDUSTRIAL, PUBLISHED, SETUP.config, SETUP.blocks, GEOMETRY.block_tokens)


def replayed(loads: list[float], days: float) -> tuple[Measurement, list[int]]:
    """The measurement, and the bytes of the process at every 100,000th request."""
    sizes = []

    def watched() -> Iterator[TraceRequest]:
        for number, request in enumerate(generate(INDUSTRIAL, [CAPACITY * load for load in loads], days * DAY, seed=1)):
            if number % 100_000 == 99_999:
                sizes.append(Footprint.of_this_process().anonymous)
            yield request

    bounds = [days * DAY * number / len(loads) for number in range(1, len(loads))]
    measurement = Measurement(SETUP.blocks, GEOMETRY.block_tokens, bounds)
    return Replay(SETUP, measurement).run(watched()), sizes


def test_a_week_at_seven_tenths_of_capacity() -> None:
    measured, sizes = replayed([0.7], 7)
    outcomes = measured.outcomes
    assert outcomes.requests >= 1_000_000
    assert outcomes.finished >= 0.995 * outcomes.requests
    assert outcomes.requests == outcomes.finished + outcomes.aborted + outcomes.failed + outcomes.refused
    assert sum(measured.reasons.values()) == outcomes.failed + outcomes.refused
    assert measured.leaked_blocks == 0
    assert measured.utilisation == pytest.approx(measured.trace_utilisation, abs=0.01)
    assert max(sizes) - sizes[1] < MIB  # behind the first 200,000 requests nothing grows any more


def test_a_day_of_which_a_third_asks_for_half_as_much_again() -> None:
    measured, _ = replayed([0.7, 1.5, 0.7], 1)
    before, during, after = measured.phases
    assert before.finished >= 0.995 * before.requests
    assert during.refused >= 0.2 * during.requests  # a third is too much, and the queue holds a thousand
    assert during.finished + during.aborted + during.refused == during.requests
    # 24 clients that each hold eight places for a free one come to 1019 of 1024: the queue is never full for all.
    full = "N requests of client 'industrial-N' wait already; the N free places of N are for other clients"
    assert list(measured.reasons) == [f"{full}: try again later"]
    assert after.finished >= 0.99 * after.requests
    assert after.first_token.percentile(50) < 1.5 * before.first_token.percentile(50)
    assert measured.leaked_blocks == 0

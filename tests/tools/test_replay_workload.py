"""Made-up traffic has the statistics it names, and comes at the rate that is asked for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from hostcache import KVGeometry, SchedulerConfig
from tools.replay import NAMES
from tools.replay_cost import PUBLISHED, PUBLISHED_GEOMETRY, MachineCost
from tools.replay_measure import Measurement
from tools.replay_run import Replay
from tools.replay_setup import Setup
from tools.replay_workload import (
    INDUSTRIAL,
    MIXED,
    SHARES,
    WORKLOADS,
    Quantiles,
    RequestKind,
    Workload,
    capacity,
    generate,
)

STEADY = Quantiles((10,) * len(SHARES), most=99)
CONFIG = SchedulerConfig(context_length=512, max_sequences=16, step_seconds=0.5)
BLOCK_TOKENS = 16


def steady(*, output: int = 5, prefixes: int = 0, prefix_tokens: int = 0) -> Workload:
    """Prompts of 10 tokens and answers of `output`, one like the other."""
    kind = RequestKind(1.0, STEADY, Quantiles((output,) * len(SHARES), most=99), prefixed=bool(prefixes))
    return Workload("steady", (kind,), prefixes, prefix_tokens, 1, 512, 0.0, 1.0, 0.0)


def test_the_command_knows_the_workloads() -> None:
    assert tuple(WORKLOADS) == NAMES


def test_quantiles_are_met_and_run_straight_in_between() -> None:
    skewed = Quantiles((0, 5, 10, 25, 50, 75, 90, 95, 99, 1000), most=500)
    assert [skewed.draw(share) for share in SHARES[:-1]] == [0, 5, 10, 25, 50, 75, 90, 95, 99]
    assert skewed.draw(0.6) == 60
    assert skewed.draw(0.993) == round(99 + 901 * 0.3)
    assert skewed.draw(0.9999) == 500
    assert Quantiles((0, 5, 10, 25, 50, 75, 90, 95, 99, 100), most=500).mean == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_is_sound(workload: Workload) -> None:
    assert sum(kind.share for kind in workload.kinds) == pytest.approx(1.0)
    for kind in workload.kinds:
        for quantiles in (kind.prompt, kind.output):
            assert len(quantiles.values) == len(SHARES)
            assert list(quantiles.values) == sorted(quantiles.values)
        prefix = workload.prefix_tokens if kind.prefixed else 0
        assert prefix + kind.prompt.most + kind.output.most <= workload.context_length


def test_requests_come_in_order_at_the_mean_rate() -> None:
    requests = list(generate(INDUSTRIAL, [0.5], 2 * 86400, seed=3))  # two whole days: their swing evens out
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    assert len(requests) == pytest.approx(0.5 * 2 * 86400, rel=0.02)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1.09, abs=0.06)  # the swing adds a little
    by_half_day = [sum(half * 43200 <= arrival < (half + 1) * 43200 for arrival in arrivals) for half in range(4)]
    assert by_half_day[0] / by_half_day[1] == pytest.approx((1 + 0.4 / math.pi) / (1 - 0.4 / math.pi), rel=0.04)


def test_loads_take_turns() -> None:
    requests = list(generate(replace(INDUSTRIAL, daily_swing=0.0), [1.0, 4.0, 1.0], 3000.0, seed=1))
    counts = [sum(third * 1000 <= request.arrival < (third + 1) * 1000 for request in requests) for third in range(3)]
    assert counts == pytest.approx([1000, 4000, 1000], rel=0.12)


def test_commands_are_short_and_share_their_prompt() -> None:
    requests = list(generate(INDUSTRIAL, [1.0], 20_000.0, seed=2))
    assert {(request.prefix, request.prefix_tokens) for request in requests} == {("industrial-prompt-0", 256)}
    own = sorted(request.prompt_tokens - 256 for request in requests)
    assert (own[len(own) // 2], own[0], own[-1]) == (7, 2, 61)  # SLURP's median, least and most
    outputs = sorted(request.output_tokens for request in requests)
    assert outputs[len(outputs) // 2] == pytest.approx(13, abs=1)
    assert outputs[-1] == 128
    assert sum(request.priority for request in requests) / len(requests) == pytest.approx(0.03, abs=0.006)
    aborts = [request for request in requests if request.abort < math.inf]
    assert len(aborts) / len(requests) == pytest.approx(0.002, abs=0.0015)
    assert all(request.abort > request.arrival for request in aborts)
    assert len({request.client for request in requests}) == 24


def test_documents_stand_among_questions() -> None:
    requests = list(generate(MIXED, [1.0], 20_000.0, seed=2))
    documents = [request for request in requests if not request.prefix]
    assert len(documents) / len(requests) == pytest.approx(0.14, abs=0.01)
    assert all(1800 <= document.prompt_tokens <= 2200 for document in documents)
    assert len({request.prefix for request in requests}) == 1 + 4
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= MIXED.context_length


def test_a_seed_gives_the_same_requests_and_another_others() -> None:
    first, again, other = (list(generate(MIXED, [1.0], 500.0, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_capacity_is_what_paper_says() -> None:
    """10 rows of prompt and 4 of the answer; 5 steps, each shared by 4 sequences; 10 + 5 / 2 tokens read in each."""
    cost = MachineCost(step=1.0, row=0.1, token=0.01)
    config = SchedulerConfig(context_length=512, max_sequences=4)
    seconds = 14 * 0.1 + 5 * 1.0 / 4 + 5 * 12.5 * 0.01
    assert capacity(steady(), cost, config, 1000, BLOCK_TOKENS) == pytest.approx(1 / seconds)
    # A pool of 4 blocks holds 64 / (12.5 + 8) such sequences.
    seconds = 14 * 0.1 + 5 * 1.0 / (64 / 20.5) + 5 * 12.5 * 0.01
    assert capacity(steady(), cost, config, 4, BLOCK_TOKENS) == pytest.approx(1 / seconds)
    # Ten tokens in chunks of 2 take 5 steps instead of one.
    config = SchedulerConfig(context_length=512, max_sequences=4, prefill_chunk=2)
    seconds = 14 * 0.1 + 9 * 1.0 / 4 + 9 * 12.5 * 0.01
    assert capacity(steady(), cost, config, 1000, BLOCK_TOKENS) == pytest.approx(1 / seconds)
    # A shared prefix is read but not computed, and lies in the pool once.
    seconds = 14 * 0.1 + 9 * 1.0 / ((64 - 32) / 20.5) + 9 * (12.5 + 32) * 0.01
    shared = steady(prefixes=1, prefix_tokens=32)
    assert capacity(shared, cost, config, 4, BLOCK_TOKENS) == pytest.approx(1 / seconds)


def test_a_machine_that_is_asked_for_more_does_what_its_capacity_says() -> None:
    """The scheduler and the formula are two ways to the same figure; they part by what the formula leaves out."""
    geometry = KVGeometry(**PUBLISHED_GEOMETRY)
    setup = Setup(geometry, (512 << 20) // geometry.block_bytes, CONFIG, PUBLISHED)
    most = capacity(INDUSTRIAL, PUBLISHED, CONFIG, setup.blocks, BLOCK_TOKENS)
    measurement = Measurement(setup.blocks, BLOCK_TOKENS)
    Replay(setup, measurement).run(generate(INDUSTRIAL, [1.5 * most], 600.0, seed=1))
    done = measurement.outcomes.finished / measurement.seconds
    assert 0.9 < done / most < 1.03

"""What a step costs, as it is learnt, and what prompts may have of a step's time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache import SchedulerConfig
from hostcache.step_budget import HEADROOM, TILE_ROWS, StepBudget
from hostcache.step_cost import StepCost
from tests.hostcache.bench import HOME, Bench, chunks

STEP, ROW, TOKEN = 0.004, 0.5e-3, 1e-7
"""A machine's figures: seconds per step, row and attended token."""


def seconds(rows: int, attended: int) -> float:
    return STEP + ROW * rows + TOKEN * attended


def taught(rounds: int = 30) -> StepCost:
    cost, random = StepCost(), np.random.default_rng(1)
    for _ in range(rounds):
        rows = int(random.integers(1, 200))
        attended = rows * int(random.integers(1, 2000))
        cost.observe(rows, attended, seconds(rows, attended))
    return cost


def test_a_linear_cost_is_learnt() -> None:
    cost = taught()
    for rows, attended in ((1, 100), (64, 64 * 1500), (200, 200)):
        assert cost.seconds(rows, attended) == pytest.approx(seconds(rows, attended), rel=0.01)
    assert cost.chunk_seconds(1000, 64) == pytest.approx(64 * ROW + TOKEN * (64 * 1000 + 64 * 65 / 2), rel=0.02)


@given(st.floats(1e-4, 1), st.integers(0, 5000))
def test_rows_within_a_time_are_as_many_as_it_holds(limit: float, start: int) -> None:
    cost = taught()
    rows = cost.rows_within(limit, start, 10**6)
    assert cost.chunk_seconds(start, rows) <= limit * (1 + 1e-6)
    assert cost.chunk_seconds(start, rows + 1) > limit * (1 - 1e-6)


def test_while_all_steps_look_alike_rows_answer_for_all_of_it() -> None:
    """A further row may cost nothing or all: the dearer guess lets running sequences be."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(8, 800, 0.008)
    assert cost.seconds(8, 800) == pytest.approx(0.008, rel=0.01)
    assert cost.seconds(16, 1600) == pytest.approx(0.016, rel=0.02)


def test_a_machine_that_slows_down_is_noticed() -> None:
    cost = taught(200)
    random = np.random.default_rng(2)
    for _ in range(200):
        rows = int(random.integers(1, 200))
        cost.observe(rows, rows * 100, 2 * seconds(rows, rows * 100))
    assert cost.seconds(50, 5000) == pytest.approx(2 * seconds(50, 5000), rel=0.05)


@pytest.mark.parametrize(("rows", "took"), [(0, 1.0), (5, 0.0), (5, -1.0), (5, math.inf), (5, math.nan)])
def test_what_no_step_can_have_taken_is_not_learnt(rows: int, took: float) -> None:
    cost = StepCost()
    cost.observe(rows, 5, took)
    assert not cost.known
    assert (cost.seconds(5, 5), cost.rows_within(0.0, 0, 9)) == (0.0, 0)


def test_noise_never_makes_a_row_cost_less_than_nothing() -> None:
    cost, random = StepCost(), np.random.default_rng(3)
    for _ in range(200):
        cost.observe(int(random.integers(1, 30)), int(random.integers(1, 3000)), float(random.uniform(0.001, 0.1)))
        assert cost.chunk_seconds(100, 10) >= 0
        assert cost.seconds(1, 1) >= 0


CONFIG = SchedulerConfig(context_length=4096, prefill_chunk=1000, max_rows=1000, step_seconds=0.050)


def test_prompts_get_what_is_left_of_the_time_in_whole_tiles() -> None:
    budget = StepBudget(CONFIG, taught(), decodes=8, attended=8000)
    left = 0.050 * HEADROOM - seconds(8, 8000)
    granted = budget.grant(start=0, remaining=2000)
    assert granted % TILE_ROWS == 0
    assert left - ROW * (TILE_ROWS + 1) < ROW * granted <= left
    budget.spend(0, granted)
    assert budget.grant(start=0, remaining=2000) == 0


def test_the_last_rows_of_a_prompt_need_fill_no_tile() -> None:
    budget = StepBudget(CONFIG, taught(), decodes=8, attended=8000)
    assert budget.grant(start=0, remaining=21) == 21


def test_a_prompt_always_gets_a_tile_and_only_one_does() -> None:
    budget = StepBudget(CONFIG, taught(), decodes=200, attended=200 * 500)  # which alone take longer than a step may
    assert budget.grant(start=0, remaining=2000) == TILE_ROWS
    budget.spend(0, TILE_ROWS)
    assert budget.exhausted
    assert budget.grant(start=0, remaining=2000) == 0


def test_several_prompts_share_what_is_left() -> None:
    budget = StepBudget(CONFIG, taught(), decodes=8, attended=8000)
    granted = []
    while not budget.exhausted:
        count = budget.grant(start=0, remaining=20)
        if not count:
            break
        granted.append(count)
        budget.spend(0, count)
    assert granted == [20, 20, 20]  # 31.2 ms are left, a row takes half of one


def test_before_anything_is_known_a_prompt_gets_a_tile() -> None:
    budget = StepBudget(CONFIG, StepCost(), decodes=1, attended=10)
    assert budget.grant(start=0, remaining=2000) == TILE_ROWS


@pytest.mark.parametrize(("config", "decodes"), [(CONFIG, 0), (SchedulerConfig(4096, 1000, prefill_chunk=1000), 100)])
def test_where_nobody_waits_for_the_step_prompts_get_all_rows(config: SchedulerConfig, decodes: int) -> None:
    budget = StepBudget(config, taught(), decodes, attended=0)
    assert budget.grant(start=0, remaining=2000) == 1000 - decodes


@pytest.mark.parametrize("step_seconds", [0.010, 0.030, 0.060])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_running_sequences_wait_no_longer_than_the_budget_or_the_smallest_tile(
    step_seconds: float, noise: float
) -> None:
    """Documents of 2000 tokens arrive among eight sequences that decode, on a machine with the figures above."""
    bench = Bench(
        blocks=4000, context_length=3000, max_rows=256, max_sequences=16, prefill_chunk=256, step_seconds=step_seconds
    )
    random = np.random.default_rng(4)
    for _ in range(8):
        bench.scheduler.submit(random.integers(10, 1000, 100), HOME, 2500)
    gaps, smallest, documents = [], [], []
    for step in range(1500):
        if step % 300 == 20:
            documents.append(bench.scheduler.submit(random.integers(1000, 50000, 2000), HOME, 2))
        plan = bench.scheduler.schedule()
        took = seconds(plan.rows, plan.attended) * (1 + noise * float(random.uniform(-1, 1)))
        decoding = [request.length for request in plan.decodes]
        samples = len(plan.logit_rows)
        bench.scheduler.commit(plan, [7] * samples, [False] * samples, seconds=took)
        bench.now += took
        if decoding and plan.prefills:
            gaps.append(took)
            start = plan.prefills[0].start
            smallest.append(seconds(len(decoding) + 16, sum(decoding) + 16 * start + 136))
    assert len(gaps) > 100
    assert np.quantile(gaps, 0.95) <= max(step_seconds, 1.2 * np.quantile(smallest, 0.95))
    assert all(document.finished for document in documents)
    if step_seconds == 0.060:  # far more than the smallest tile takes: all is used but a part of a tile
        assert np.median(gaps) >= HEADROOM * step_seconds - TILE_ROWS * ROW


def test_without_a_budget_a_prompt_takes_all_rows_there_are() -> None:
    bench = Bench(blocks=100, max_rows=40, prefill_chunk=40)
    bench.submit(4)
    bench.step(seconds=1.0)
    bench.submit(100, start=100)
    assert chunks(bench.step(seconds=1.0)) == [(1, 4, 1, True), (2, 0, 39, False)]

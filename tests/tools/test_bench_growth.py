"""`rockpage bench growth`: every size is beside twice the half of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.step import StepPlan
from npu.engine import Engine
from npu.model_runner import ModelRunner
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tools import bench_growth_run
from tools.bench_e2e_run import random_prompts
from tools.bench_growth_run import step_timing

from .command_line import assert_refused, run_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("growth") / "tiny.gguf", TinyLlama(context_length=200))


@pytest.fixture(autouse=True)
def cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


def test_sizes_reach_the_models_context(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_growth_run, "SEQUENCES", (1, 2))
    monkeypatch.setattr(bench_growth_run, "CONTEXTS", (32, 64, 8192))
    monkeypatch.setattr(bench_growth_run, "ROUNDS", 1)
    answer = json.loads(run_here(capsys, "bench", "growth", str(model), "--times", "2", "--json").out)
    # Of 200 positions 5 are for warming up, 2 are measured, and 2 are to spare.
    assert [(row["case"], row["peer_s"] is None) for row in answer["rows"]] == [
        ("1 sequence of 191 tokens", True),
        ("2 sequences of 191 tokens", False),
        ("8 sequences of 32 tokens", True),
        ("8 sequences of 64 tokens", False),
        ("8 sequences of 191 tokens", False),
        ("32 sequences of 191 tokens", True),
        ("64 sequences of 191 tokens", False),
    ]
    seconds = {row["case"]: row["ours_s"] for row in answer["rows"]}
    twice, grown = answer["rows"][1], answer["rows"][4]
    assert twice["peer_s"] == 2 * seconds["1 sequence of 191 tokens"]
    assert grown["peer_s"] == pytest.approx(191 / 64 * seconds["8 sequences of 64 tokens"])


def test_what_is_measured_are_steps_in_which_all_decode(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[StepPlan] = []
    compute = ModelRunner.compute

    def watched(runner: ModelRunner, plan: StepPlan) -> NDArray[np.float32]:
        plans.append(plan)
        return compute(runner, plan)

    monkeypatch.setattr(ModelRunner, "compute", watched)
    with Engine.load(model, runtime="cpu", pool_bytes=4 << 20) as engine:
        step_timing(engine, 3, 50, random_prompts(1, 64)[0], times=4)
        assert engine.idle
    measured = plans[-4:]
    assert [plan.rows for plan in measured] == [3] * 4
    assert all(plan.context_lens.min() >= 50 for plan in measured)
    assert sum(plan.rows for plan in plans) < 100  # the prompt of 50 tokens was computed once, not three times


def test_numbers_are_positive(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "bench", "growth", str(model), "--times", "0")
    assert_refused(outcome, "--times must be 1 or more, got 0")

"""Whole steps and a real model through the vendor's simulator: `make test-vendor`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from npu.emulated import EmulatedAttention
from npu.engine import Engine
from npu.runtimes import open_runtime
from tests.npu.test_emulated_attention import HEADS, World

pytestmark = pytest.mark.vendor

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "llama_cpp_smollm2.json").read_text(encoding="utf-8"))


def test_the_emulated_npu_agrees_with_the_simulator_on_the_same_buffers() -> None:
    # Contexts of 20 tokens and more: results below 2, where a step of fp16 is 9.8e-4 at most.
    world = World([20, 60, 63, 64, 100, 500, 200, 1000], [1, 1, 1, 1, 1, 1, 100, 16])
    simulated = open_runtime("simulator", world.cache, HEADS)
    emulated = EmulatedAttention(world.cache, HEADS)
    by_simulator, by_emulation = world.attend(simulated), world.attend(emulated)
    assert float(np.abs(by_simulator).max()) < 2
    assert float(np.abs(by_simulator - by_emulation).max()) <= 1e-3
    assert simulated.cores.on_host == emulated.cores.on_host == 0  # type: ignore[attr-defined]  # both are staged
    simulated.close()
    emulated.close()


def test_a_real_model_through_the_simulator_follows_the_float32_pass(demo_model: Path) -> None:
    golden = GOLDENS["scored"][0]
    with Engine.load(demo_model, runtime="simulator", activations="fp32", pool_bytes=32 << 20) as engine:
        score = engine.score(golden["ids"])
        assert engine.runtime.cores.on_host == 0  # type: ignore[attr-defined]  # it is staged
    error = np.abs(score.logprobs - np.array(golden["logprob_of_next_fp32"])).mean()
    assert error <= 0.015
    assert abs(score.perplexity / golden["perplexity_fp32"] - 1) <= 0.003

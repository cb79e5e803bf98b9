"""Whole steps and a real model through the vendor's simulator: `make test-vendor`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hostcache import KVGeometry
from npu.emulated import EmulatedAttention
from npu.engine import Engine
from npu.runtimes import open_runtime
from npu.staged import StagedAttention
from tests.npu.test_emulated_attention import GEOMETRY, HEADS, World

pytestmark = pytest.mark.vendor

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "llama_cpp_smollm2.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("geometry", "heads"),
    [
        (GEOMETRY, HEADS),
        (KVGeometry(layers=2, kv_heads=3, head_dim=64), 9),  # SmolLM2-135M
        (KVGeometry(layers=2, kv_heads=2, head_dim=64), 14),  # Qwen2.5-0.5B
        (KVGeometry(layers=2, kv_heads=2, head_dim=128), 12),  # Qwen2.5-1.5B
    ],
)
def test_the_emulated_npu_agrees_with_the_simulator_on_the_same_buffers(geometry: KVGeometry, heads: int) -> None:
    # Contexts of 30 tokens and more: results below 2, where a step of fp16 is 9.8e-4 at most.
    world = World([30, 60, 62, 63, 100, 500, 4094, 200, 1000], [1, 1, 1, 1, 1, 1, 1, 100, 16], geometry, heads)
    with (
        closing(open_runtime("simulator", world.cache, heads)) as simulated,
        closing(EmulatedAttention(world.cache, heads)) as emulated,
    ):
        by_simulator, by_emulation = world.attend(simulated), world.attend(emulated)
        assert simulated.cores.on_host == emulated.cores.on_host == 0  # type: ignore[attr-defined]  # both are staged
    assert float(np.abs(by_simulator).max()) < 2
    assert float(np.abs(by_simulator - by_emulation).max()) <= 1e-3


def test_a_real_model_through_the_simulator_follows_the_float32_pass(demo_model: Path) -> None:
    golden = GOLDENS["scored"][0]
    with Engine.load(demo_model, runtime="simulator", activations="fp32", pool_bytes=32 << 20) as engine:
        score = engine.score(golden["ids"])
        assert isinstance(engine.runtime, StagedAttention)
        cores = engine.runtime.cores
        assert (cores.failures, cores.on_host) == (0, 0)
        assert cores.launches >= 30 * len(golden["ids"]) / 64  # thirty layers, and no tile has more tokens
    error = np.abs(score.logprobs - np.array(golden["logprob_of_next_fp32"])).mean()
    assert error <= 0.015
    assert abs(score.perplexity / golden["perplexity_fp32"] - 1) <= 0.003

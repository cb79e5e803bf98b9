"""Rotary frequencies against Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from npu.rope import Rope, RopeScaling, llama3_factors, yarn_attention


def judge(head_dim: int, **parameters: Any) -> tuple[np.ndarray[Any, Any], float]:
    """transformers' frequencies, in float32, and its factor of cos and sin."""
    import transformers  # noqa: PLC0415 - it imports torch: see tests/npu/oracle.py
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - as above

    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    frequencies, attention = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None)
    return frequencies.numpy(), attention


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_linear(head_dim: int) -> None:
    expected, attention = judge(head_dim, rope_type="linear", rope_theta=10000.0, factor=4.0)
    rope = Rope(10000.0, RopeScaling.LINEAR, 4.0)
    assert_allclose(rope.frequencies(head_dim), expected, rtol=5e-7)
    assert rope.attention == attention == 1.0


# The configurations of Llama 3.1 8B and Llama 3.2 1B, and one whose original context is short.
@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    [(128, 500000.0, 8.0, 8192), (64, 500000.0, 32.0, 8192), (80, 10000.0, 4.0, 64), (96, 10000.0, 8.0, 256)],
)
def test_llama3(head_dim: int, theta: float, factor: float, original: int) -> None:
    smoothing = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stretched = {"factor": factor, "original_max_position_embeddings": original}
    expected, _ = judge(head_dim, rope_type="llama3", rope_theta=theta, **smoothing, **stretched)
    factors = llama3_factors(theta, head_dim, factor=factor, low=1.0, high=4.0, original_context=original)
    assert factors[0] == 1  # turns original / 2 pi times, more than 4
    assert_allclose(factors[-1], factor, rtol=1e-15)  # turns less than once
    assert ((factors > 1.001) & (factors < factor - 0.001)).any()  # and some are in between
    assert_allclose(Rope(theta, factors=tuple(factors)).frequencies(head_dim), expected, rtol=1e-6)


# Qwen2.5's instructions, and others: base, original context, factor and where the ramp begins and ends.
@pytest.mark.parametrize(
    ("head_dim", "theta", "original", "factor", "fast", "slow"),
    [
        (128, 1000000.0, 32768, 4.0, 32.0, 1.0),
        (64, 10000.0, 4096, 16.0, 32.0, 1.0),
        (80, 10000.0, 64, 2.0, 16.0, 2.0),
        (96, 10000.0, 64, 8.0, 64.0, 40.0),  # no pair turns that often: the ramp has no width
    ],
)
def test_yarn(*, head_dim: int, theta: float, original: int, factor: float, fast: float, slow: float) -> None:
    ramp = {"beta_fast": fast, "beta_slow": slow}
    stretched = {"factor": factor, "original_max_position_embeddings": original}
    expected, attention = judge(head_dim, rope_type="yarn", rope_theta=theta, **ramp, **stretched)
    rope = Rope(
        theta, RopeScaling.YARN, factor, original_context=original, beta_fast=fast, beta_slow=slow, attention=1.0
    )
    assert_allclose(rope.frequencies(head_dim), expected, rtol=1e-6)
    assert_allclose(yarn_attention(factor), attention, rtol=1e-15)

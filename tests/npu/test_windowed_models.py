"""A model whose layers have windows, from its file to its answers, against float64 with the same mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu.engine import Engine
from npu.loading import LoadOptions
from npu.sampler import SamplingParams
from tests.npu.driving import drive
from tests.npu.reference import Sight, log_softmax, reference_logits
from tests.npu.tiny import TinyLlama, write_tiny_llama

WINDOW = 40
NEAR = 2e-3
"""Of log-probabilities: KV is fp16, and for the NPU the query and attention's result, too. Each of some hundred
products and sums loses 2^-11 of one operand; half as much is found."""

IDS = np.random.default_rng(9).integers(3, 250, 180).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyLlama(window=WINDOW, tied_head=False, matrix_type="Q8_0")
    return write_tiny_llama(tmp_path_factory.mktemp("windowed") / "tiny.gguf", tiny)


@pytest.fixture(scope="module")
def expected(model: Path) -> NDArray[np.float64]:
    return log_softmax(reference_logits(model, IDS, Sight(window=WINDOW)))


def test_a_token_more_or_less_would_show(model: Path, expected: NDArray[np.float64]) -> None:
    for other in (WINDOW - 1, WINDOW + 1):
        off = np.abs(log_softmax(reference_logits(model, IDS, Sight(window=other))) - expected)
        assert off[: WINDOW - 1].max() == 0  # tokens before that see everything
        assert off[WINDOW:].max() > 0.3


@pytest.mark.parametrize("runtime", ["cpu", "emulated"])
def test_a_text_is_as_likely_as_by_a_masked_attention(model: Path, expected: NDArray[np.float64], runtime: str) -> None:
    options: LoadOptions = {
        "runtime": runtime,
        "activations": "fp32",
        "pool_bytes": 64 * 4096,
        "cache_dir": model.parent,
    }
    with Engine.load(model, **options) as engine:
        found = engine.score(IDS).logprobs
    wanted = expected[np.arange(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=NEAR)


def test_an_answer_holds_no_more_blocks_than_its_window_needs(model: Path) -> None:
    """400 tokens are 25 blocks; a window of 40 and a chunk of 64 are at most nine at once."""
    options: LoadOptions = {"activations": "fp32", "pool_bytes": 12 * 4096, "cache_dir": model.parent}
    with Engine.load(model, **options) as engine:
        assert engine.cache.blocks == 12
        engine.add_request(
            IDS[:100], SamplingParams(max_tokens=300, ignore_eos=True, logprobs=0, temperature=1.0, seed=5)
        )
        outputs = [output for outputs in drive(engine).values() for output in outputs]
    answer = [token for output in outputs for token in output.token_ids]
    assert len(answer) == 300
    wanted = log_softmax(reference_logits(model, [*IDS[:100], *answer[:-1]], Sight(window=WINDOW))[99:])
    told = [entry.logprob for output in outputs for entry in output.logprobs]
    np.testing.assert_allclose(told, wanted[np.arange(300), answer], rtol=0, atol=NEAR)

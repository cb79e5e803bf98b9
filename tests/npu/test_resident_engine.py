"""Whole conversations with sequences that stay staged: the same tokens as without, whatever befalls them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.staged import StagedAttention
from tests.npu.tiny import TinyLlama, write_tiny_llama

LAYERS = 3
BLOCKS = 20  # of 3 * 2 * 2 heads * 16 tokens * 32 * 2 bytes; too few for all
FAILING_STEPS = (9, 23, 24, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    return write_tiny_llama(folder / "tiny.gguf", TinyLlama(layers=LAYERS, head_dim=32, heads=6, tied_head=False))


class FailsNowAndThen:
    """Lets some steps fail in their second layer, when the first has been staged and written."""

    def __init__(self, runtime: StagedAttention, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.attend, self.begin_step = runtime.attend, runtime.begin_step
        monkeypatch.setattr(runtime, "begin_step", self.count)
        monkeypatch.setattr(runtime, "attend", self.fail)

    def count(self, *arguments: object) -> None:
        self.steps += 1
        self.begin_step(*arguments)  # type: ignore[arg-type] # handed on

    def fail(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        if layer == 1 and self.steps in FAILING_STEPS:
            raise InterruptedError("on purpose")
        self.attend(layer, q, out)


def converse(model: Path, resident_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[int]], Engine]:
    """Twelve requests that begin alike, in a pool that cannot hold them, with forks and an abort; tokens by request."""
    random = np.random.default_rng(8)
    shared = random.integers(3, 260, 35).tolist()
    tokens: dict[int, list[int]] = {}
    engine = Engine.load(
        model,
        runtime="emulated",
        resident_bytes=resident_bytes,
        pool_bytes=BLOCKS * LAYERS * 2 * 2 * 16 * 32 * 2,
        cache_dir=model.parent,
        max_sequences=6,
    )
    with engine, monkeypatch.context() as patch:
        assert isinstance(engine.runtime, StagedAttention)
        steps = FailsNowAndThen(engine.runtime, patch)
        for number in range(12):
            length = int(random.integers(1, 60))
            prompt = [*shared[: 35 * (number % 3 > 0)], *random.integers(3, 260, length).tolist()]
            sampling = SamplingParams(
                temperature=1.0, seed=number, max_tokens=int(random.integers(5, 40)), ignore_eos=True
            )
            engine.add_request(prompt, sampling)
        failed = 0
        while not engine.idle:
            try:
                outputs = engine.step()
            except InterruptedError:
                failed += 1
                continue
            for output in outputs:
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if steps.steps in (12, 30):
                running = engine.scheduler.running
                engine.fork(running[0].id, SamplingParams(temperature=1.0, seed=99, max_tokens=60, ignore_eos=True))
                engine.abort(running[-1].id)
        assert failed == len(FAILING_STEPS)
        assert engine.scheduler.stats.preemptions > 0
    return tokens, engine


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        tokens, engine = converse(model, 0, monkeypatch)
    assert isinstance(engine.runtime, StagedAttention)
    assert engine.runtime.residency is None
    assert len(tokens) >= 12  # two forks more, less those aborted before their first token
    return tokens


@pytest.mark.parametrize("budget", [2 << 20, 200 << 10], ids=["all fit", "some fit"])
def test_the_same_tokens(
    model: Path, expected: dict[int, list[int]], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, engine = converse(model, budget, monkeypatch)
    assert tokens == expected
    assert isinstance(engine.runtime, StagedAttention)
    assert engine.runtime.residency is not None
    counts = engine.runtime.residency.counts
    assert counts.grown > counts.whole > 0

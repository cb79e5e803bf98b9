"""The same prompt gives the same answer whichever way it is computed.

With int8 activations every row is computed alone, bit for bit, by the dense parts and by `cpu` attention: so chunks,
batches, hits, forks and recomputation leave identical KV bytes and tokens, and the tests say so. With fp32 activations
ONNX Runtime takes another kernel for a single row than for several: the difference is bounded instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.request import Request
from npu.decoder_choice import load_decoder
from npu.engine import Engine
from npu.gguf import GGUFFile
from npu.sampler import SamplingParams
from tests.npu.reference import PlainSession, log_softmax
from tests.npu.tiny import TinyLlama, write_tiny_llama

ANSWER = 24
SAMPLING = SamplingParams(temperature=1.0, seed=7, max_tokens=200, ignore_eos=True)
"""Drawn by seed and position, so that the answer is varied and yet fixed."""

PROMPT = list(np.random.default_rng(5).integers(3, 260, 70))
CHUNKS = (1, 7, 16, 64, 256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same-answer")
    return write_tiny_llama(
        folder / "tiny.gguf", TinyLlama(layers=3, head_dim=32, heads=6, kv_heads=2, tied_head=False)
    )


def load(model: Path, **options: object) -> Engine:
    settings: dict[str, object] = {"pool_bytes": 4 << 20, "cache_dir": model.parent, **options}
    return Engine.load(model, **settings)  # type: ignore[arg-type] # options by name


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with load(model) as engine:
        yield engine


class Run:
    """One request driven to `ANSWER` tokens, with the KV bytes it left behind."""

    def __init__(self, engine: Engine, prompt: list[int], answer: int = ANSWER) -> None:
        self.engine = engine
        self.id = engine.add_request(prompt, SAMPLING)
        self.request = next(request for request in engine.scheduler.waiting if request.id == self.id)
        self.answer = answer

    def finish(self) -> tuple[list[int], NDArray[np.float16]]:
        return finish(self.engine, self.request, self.answer)


def finish(engine: Engine, request: Request, answer: int = ANSWER) -> tuple[list[int], NDArray[np.float16]]:
    """Step until the request has its tokens; then its tokens and KV `[layers, 2, tokens, heads, d]`; then end it."""
    while len(request.output) < answer:
        engine.step()
        engine.cache.pool.check()
    kept = request.prompt_length + answer - 1  # the last token has no KV yet
    kv = np.stack([engine.cache.read(layer, request.table.blocks, kept) for layer in range(3)])
    tokens = request.output[:answer].tolist()
    engine.abort(request.id)
    return tokens, kv


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[int], NDArray[np.float16]]:
    """The prompt alone on a fresh engine, in one chunk."""
    with load(model, prefill_chunk=256) as engine:
        return Run(engine, PROMPT).finish()


def same(actual: tuple[list[int], NDArray[np.float16]], expected: tuple[list[int], NDArray[np.float16]]) -> bool:
    return actual[0] == expected[0] and actual[1].tobytes() == expected[1].tobytes()


def test_a_contiguous_cache_gives_the_same(model: Path, expected: tuple[list[int], NDArray[np.float16]]) -> None:
    """The oracle stores K and V in float32 in one piece, and knows nothing of blocks."""
    text = [*PROMPT, *expected[0]]
    with GGUFFile.open(model) as gguf:
        session = PlainSession(load_decoder(gguf, cache_dir=model.parent))
    logits = [session.step(text[: len(PROMPT)])[-1], *(session.step([token])[0] for token in expected[0][:-1])]
    oracle_logprobs = log_softmax(np.stack(logits))[np.arange(ANSWER), expected[0]]
    with load(model) as engine:
        logprobs = engine.score(text).logprobs[len(PROMPT) - 1 :]
    assert np.abs(logprobs - oracle_logprobs).max() < 0.1  # fp16 KV, made larger by int8 activations
    assert len(set(expected[0])) > ANSWER // 2  # the answer is no endless repetition, which would prove little
    oracle = np.stack([session.k[:, : session.tokens], session.v[:, : session.tokens]], axis=1)
    assert expected[1].shape == oracle.shape
    # fp16 keeps 11 bits; later layers see rounded K and V, through int8 activations: about a percent of a unit.
    assert np.abs(expected[1].astype(np.float32) - oracle).max() < 0.05 * np.abs(oracle).max()
    first_layer = oracle[0].astype(np.float16)
    assert np.array_equal(expected[1][0, :, : len(PROMPT)], first_layer[:, : len(PROMPT)])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks(model: Path, expected: tuple[list[int], NDArray[np.float16]], chunk: int) -> None:
    with load(model, prefill_chunk=chunk) as engine:
        assert same(Run(engine, PROMPT).finish(), expected)


def test_threads(model: Path, expected: tuple[list[int], NDArray[np.float16]]) -> None:
    with load(model, threads=2) as engine:
        assert same(Run(engine, PROMPT).finish(), expected)


def test_a_batch(engine: Engine, expected: tuple[list[int], NDArray[np.float16]]) -> None:
    others = [Run(engine, PROMPT[start : start + 20]) for start in (3, 11, 40)]
    wanted = Run(engine, PROMPT)
    others += [Run(engine, [9, 8, 7])]
    assert same(wanted.finish(), expected)
    assert len(engine.scheduler.running) == len(others)


@pytest.mark.parametrize(
    ("known", "hit"),
    [(64, 64), (40, 40), (16, 16), (70, 69), (5, 5)],
    ids=["full blocks", "a part of a block", "one block", "the whole prompt", "a tail only"],
)
def test_a_prefix_hit(engine: Engine, expected: tuple[list[int], NDArray[np.float16]], known: int, hit: int) -> None:
    Run(engine, PROMPT[:known], answer=1).finish()
    run = Run(engine, PROMPT)
    assert same(run.finish(), expected)
    assert run.request.hit_tokens == hit
    assert run.request.computed_tokens == len(PROMPT) - hit + ANSWER - 1


def test_a_hit_on_a_longer_text(engine: Engine, expected: tuple[list[int], NDArray[np.float16]]) -> None:
    """Another sequence went on past the common part inside a block: that part is copied, not shared."""
    Run(engine, [*PROMPT[:55], 77, 78, 79], answer=8).finish()
    run = Run(engine, PROMPT)
    assert same(run.finish(), expected)
    assert run.request.hit_tokens == 55


def test_sharing_with_a_running_sequence(engine: Engine, expected: tuple[list[int], NDArray[np.float16]]) -> None:
    first = Run(engine, PROMPT)
    while not first.request.output.size:
        engine.step()
    second = Run(engine, PROMPT)
    while not second.request.output.size:
        engine.step()
    assert first.request.table.blocks[:4] == second.request.table.blocks[:4]
    assert first.request.table.blocks[4] != second.request.table.blocks[4]
    assert same(first.finish(), expected)
    assert same(second.finish(), expected)


@pytest.mark.parametrize("at", [1, 2, 10, 11, 20], ids=lambda at: f"behind {at} tokens")
def test_a_fork(engine: Engine, expected: tuple[list[int], NDArray[np.float16]], at: int) -> None:
    parent = Run(engine, PROMPT)
    while len(parent.request.output) < at:
        engine.step()
    child_id = engine.fork(parent.id)
    child = next(request for request in engine.scheduler.running if request.id == child_id)
    assert child.table.blocks == parent.request.table.blocks
    assert same(parent.finish(), expected)
    assert same(finish(engine, child), expected)


def test_recomputation(model: Path) -> None:
    """A pool too small for two: the second is preempted and computed anew, partly from its own cached blocks."""
    texts = PROMPT, PROMPT[::-1]
    with load(model) as engine:
        alone = [Run(engine, text, answer=40).finish() for text in texts]
    with load(model, pool_bytes=11 * 3 * 2 * 2 * 16 * 32 * 2) as engine:
        assert engine.cache.blocks == 11  # five each for the prompts; the first takes its seventh from the second
        first, second = (Run(engine, text, answer=40) for text in texts)
        assert same(first.finish(), alone[0])
        assert second.request.preemptions == 1
        assert same(second.finish(), alone[1])


def test_a_rolled_back_step(
    engine: Engine, expected: tuple[list[int], NDArray[np.float16]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention fails in the middle of some steps; what was written there is written again."""
    attend, calls = engine.runtime.attend, 0

    def failing(layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 5:
            raise OSError("injected")
        attend(layer, q, out)

    monkeypatch.setattr(engine.runtime, "attend", failing)
    run = Run(engine, PROMPT)
    while len(run.request.output) < ANSWER:
        try:
            engine.step()
        except OSError:
            engine.cache.pool.check()
    assert calls > 3 * (2 + ANSWER - 1)  # three layers, two chunks of prompt, and more than that because of failures
    assert same(run.finish(), expected)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_scores_do_not_depend_on_chunks(model: Path, chunk: int) -> None:
    with load(model, prefill_chunk=chunk) as engine, load(model) as other:
        assert engine.score(PROMPT).logprobs.tobytes() == other.score(PROMPT).logprobs.tobytes()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_float_activations_differ_by_rounding_only(model: Path, chunk: int) -> None:
    """One row takes another kernel than several: float32 rounding, then fp16 KV that may round the other way."""
    with load(model, activations="fp32", prefill_chunk=chunk) as engine, load(model, activations="fp32") as other:
        assert np.abs(engine.score(PROMPT).logprobs - other.score(PROMPT).logprobs).max() < 2e-3


@pytest.mark.parametrize("rounding", ["output", "op"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_emulated_npu_agrees(model: Path, chunk: int, rounding: str) -> None:
    """fp16 in and out of attention: 11 bits of values that the model then mixes over three layers."""
    options = {"activations": "fp32", "prefill_chunk": chunk}
    with (
        load(model, runtime="emulated", rounding=rounding, **options) as emulated,
        load(model, **options) as other,
    ):
        difference = np.abs(emulated.score(PROMPT).logprobs - other.score(PROMPT).logprobs).max()
    assert 0 < difference < 0.02

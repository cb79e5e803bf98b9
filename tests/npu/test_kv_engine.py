"""Conversations whose KV is int8 or int4: every way to an answer leaves the same bytes and tokens, as with fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.errors import UsageError
from hostcache.namespace import Namespace
from hostcache.request import Request
from hostcache.window import AttentionWindow
from npu.engine import Engine
from npu.loading import load_parts
from npu.model_runner import ModelRunner
from npu.sampler import SamplingParams
from npu.score import forced_logits
from tests.npu.tiny import TinyLlama, write_tiny_llama

LAYERS, ANSWER = 3, 20
SAMPLING = SamplingParams(temperature=1.0, seed=7, max_tokens=200, ignore_eos=True)
PROMPT = list(np.random.default_rng(5).integers(3, 260, 70))
SCALED = pytest.mark.parametrize("kv", ["int8", "int4"])

Outcome = tuple[list[int], bytes]
"""An answer, and the K and V that it left behind."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyLlama(layers=LAYERS, head_dim=32, heads=6, kv_heads=2, tied_head=False)
    return write_tiny_llama(tmp_path_factory.mktemp("kv") / "tiny.gguf", tiny)


def load(model: Path, **options: object) -> Engine:
    settings: dict[str, object] = {"pool_bytes": 4 << 20, "cache_dir": model.parent, "kv": "int4", **options}
    return Engine.load(model, **settings)  # type: ignore[arg-type] # options by name


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with load(model) as engine:
        yield engine


def add(engine: Engine, prompt: list[int], kv: str) -> Request:
    request_id = engine.add_request(prompt, SAMPLING, kv=kv)
    return next(request for request in engine.scheduler.waiting if request.id == request_id)


def finish(engine: Engine, request: Request, answer: int = ANSWER) -> Outcome:
    """Step until the request has its tokens, and end it."""
    while len(request.output) < answer:
        engine.step()
        for pool in engine.cache.pools.values():
            pool.check()
    kept = request.prompt_length + answer - 1  # the last token has no KV yet
    kv = [engine.cache.read(layer, request.table.blocks, kept, request.codec) for layer in range(LAYERS)]
    outcome = request.output[:answer].tolist(), np.array(kv).tobytes()
    engine.abort(request.id)
    return outcome


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Outcome]:
    """The prompt in each codec, alone on a fresh engine, in one chunk."""
    outcomes = {}
    for kv in CODECS:
        with load(model, prefill_chunk=256) as engine:
            outcomes[kv] = finish(engine, add(engine, PROMPT, kv))
    return outcomes


def test_codecs_do_differ(alone: dict[str, Outcome]) -> None:
    """All that follows would be empty if every request were stored in one codec."""
    assert len({kv for _, kv in alone.values()}) == 3
    floats = {name: np.frombuffer(kv, np.float16).astype(np.float32) for name, (_, kv) in alone.items()}
    # Values of the prompt's first token in the first layer: not yet moved by other errors.
    exact, int8, int4 = (floats[name].reshape(LAYERS, 2, -1, 2, 32)[0, 1, 0] for name in ("fp16", "int8", "int4"))
    largest = np.abs(exact).max()
    assert 0 < np.abs(int8 - exact).max() < 0.02 * largest
    assert np.abs(int8 - exact).max() < np.abs(int4 - exact).max() < 0.25 * largest


def test_errors_of_int4_keys_are_made_up_for_in_every_layer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = load_parts(model, kv="int4", pool_bytes=4 << 20, cache_dir=model.parent)
    with closing(parts):
        write, told = parts.cache.write, []

        def spy(layer: int, *rows: Any, feedback: NDArray[np.float32] | None = None) -> None:
            told.append((layer, feedback))
            write(layer, *rows, feedback=feedback)

        monkeypatch.setattr(parts.cache, "write", spy)
        runner = ModelRunner(parts.decoder, parts.cache, parts.runtime, parts.balance)
        ids = np.array(PROMPT[:9], np.int32)
        for codec in (INT4, INT8):
            own = Namespace(runner.numerics(codec))
            list(forced_logits(ids, own, parts.cache, parts.config, runner.compute, codec=codec))
        assert parts.balance is not None
        assert [layer for layer, _ in told] == 2 * list(range(LAYERS))
        for layer, feedback in told[:LAYERS]:
            assert feedback is not None
            np.testing.assert_array_equal(feedback, parts.balance.feedback[layer])
        assert [feedback for _, feedback in told[LAYERS:]] == [None] * LAYERS


@SCALED
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks(model: Path, alone: dict[str, Outcome], kv: str, chunk: int) -> None:
    with load(model, prefill_chunk=chunk) as engine:
        assert finish(engine, add(engine, PROMPT, kv)) == alone[kv]


@SCALED
@pytest.mark.parametrize("known", [64, 40, 16, 70, 5])
def test_a_prefix_hit_is_what_would_have_been_computed(
    engine: Engine, alone: dict[str, Outcome], kv: str, known: int
) -> None:
    finish(engine, add(engine, PROMPT[:known], kv), answer=1)
    request = add(engine, PROMPT, kv)
    assert finish(engine, request) == alone[kv]
    assert request.hit_tokens == min(known, len(PROMPT) - 1)


def test_no_codec_hits_what_another_has_computed(engine: Engine, alone: dict[str, Outcome]) -> None:
    for kv in ("fp16", "int4", "int8"):
        request = add(engine, PROMPT, kv)
        assert finish(engine, request) == alone[kv]
        assert request.hit_tokens == 0


@SCALED
def test_a_fork_goes_on_as_its_parent_does(engine: Engine, alone: dict[str, Outcome], kv: str) -> None:
    parent = add(engine, PROMPT, kv)
    while len(parent.output) < 5:
        engine.step()
    child_id = engine.fork(parent.id)
    engine.step()
    child = next(request for request in engine.scheduler.running if request.id == child_id)
    assert child.codec.name == kv
    assert finish(engine, parent) == alone[kv]
    assert finish(engine, child) == alone[kv]


@SCALED
@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_preempted_and_brought_back(model: Path, kv: str, swap_bytes: int) -> None:
    """A pool too small for two: the second gives way, and is computed anew or brought back from the swap space."""
    with load(model, kv=kv) as roomy:
        extent_bytes = roomy.cache.unit_bytes * roomy.cache.extents.units
        expected = finish(roomy, add(roomy, PROMPT, kv), answer=50)
    pool_bytes = 12 // CODECS[kv].blocks_per_extent * extent_bytes
    with load(model, kv=kv, swap_bytes=swap_bytes, pool_bytes=pool_bytes) as engine:
        assert engine.cache.pool_of(CODECS[kv]).total == 12  # six each, until both want a seventh
        first, second = (add(engine, prompt, kv) for prompt in (PROMPT[::-1], PROMPT))
        while len(first.output) < 50:
            engine.step()
        assert second.preemptions == 1
        assert engine.scheduler.stats.swapped_out == (swap_bytes > 0)
        engine.abort(first.id)
        assert finish(engine, second, answer=50) == expected


def test_sessions_of_all_codecs_in_one_batch_answer_as_if_alone(engine: Engine, alone: dict[str, Outcome]) -> None:
    requests = [add(engine, PROMPT, kv) for kv in ("int4", "fp16", "int8", "int4")]
    while any(len(request.output) < ANSWER for request in requests):
        engine.step()
    outcomes = [finish(engine, request) for request in requests]
    assert outcomes == [alone[kv] for kv in ("int4", "fp16", "int8", "int4")]


def scores(engine: Engine, kv: str) -> NDArray[np.float64]:
    return engine.score(PROMPT, kv=kv).logprobs


def test_scores_follow_the_codec(engine: Engine) -> None:
    exact = scores(engine, "fp16")
    int8, int4 = (np.abs(scores(engine, kv) - exact).mean() for kv in ("int8", "int4"))
    assert 0 < int8 < int4 < 0.2


def test_an_engine_serves_its_codec_and_richer_ones(model: Path) -> None:
    with load(model, kv="int8") as engine:
        assert engine.codec() is INT8
        assert engine.codec("fp16") is FP16
        assert scores(engine, "int8").tobytes() == engine.score(PROMPT).logprobs.tobytes()
        with pytest.raises(UsageError, match="serves fp16, int8 and no int4: open it for int4"):
            engine.add_request(PROMPT, kv="int4")
        with pytest.raises(UsageError, match="there is no KV codec 'int2'"):
            engine.add_request(PROMPT, kv="int2")
        assert engine.idle
    with pytest.raises(UsageError, match="there is no KV codec 'half'"):
        load(model, kv="half")


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_numerics_name_the_codec(engine: Engine, codec: Codec) -> None:
    others = {engine.namespace(kv=kv) for kv in CODECS if kv != codec.name}
    assert engine.namespace(kv=codec.name) not in others
    assert engine.namespace() == engine.namespace(kv="int4")


@SCALED
def test_an_answer_slides_past_the_context(model: Path, kv: str) -> None:
    """Keys are turned back and quantised again; the same however it is chunked."""
    outputs = []
    for chunk in (5, 64):
        with load(model, context_length=96, prefill_chunk=chunk) as engine:
            window = AttentionWindow(48, sinks=4)
            request_id = engine.add_request(PROMPT, SAMPLING, kv=kv, overflow="slide", window=window)
            request = next(request for request in engine.scheduler.waiting if request.id == request_id)
            while len(request.output) < 80:  # the context ends behind 26
                engine.step()
            outputs.append(request.output[:80].tolist())
            engine.abort(request.id)
            assert all(pool.used == 0 for pool in engine.cache.pools.values())
    assert outputs[0] == outputs[1]


@SCALED
def test_an_npu_is_given_fp16(model: Path, kv: str) -> None:
    """The strict emulated device attends what was gathered: scaled, rotated back and rounded to fp16. What that moves,
    later layers may round to another level, so it is bound by what the codec itself moves."""
    with load(model, activations="fp32") as engine:
        expected = scores(engine, kv)
    with load(model, activations="fp32", runtime="emulated", placement="device") as engine:
        found = scores(engine, kv)
        exact = scores(engine, "fp16")
    assert np.abs(found - expected).mean() < 0.5 * np.abs(exact - expected).mean()


def test_steps_may_be_shorter_than_those_that_constants_are_measured_in(model: Path, tmp_path: Path) -> None:
    """What a row becomes does not depend on its step, so the constants do not either."""
    with (
        load(model, cache_dir=tmp_path / "short", max_rows=8, max_sequences=8) as short,
        load(model, cache_dir=tmp_path) as usual,
    ):
        assert short.namespace() == usual.namespace()

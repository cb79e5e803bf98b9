"""Requests at the edges of what is allowed, and in the middle of their lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hostcache.errors import RequestRefused
from hostcache.request import FinishReason
from npu.detokenizer import Detokenizer
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.stream import RequestOutput
from npu.structured import Structure
from tests.npu.driving import drive, text_of
from tests.npu.tiny import TinyLlama, write_tiny_llama

CONTEXT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=1 << 20, context_length=CONTEXT, prefill_chunk=8, cache_dir=model.parent) as one:
        yield one


def answer(engine: Engine, prompt: str | list[int], params: SamplingParams) -> list[RequestOutput]:
    request = engine.add_request(prompt, params)
    return drive(engine)[request]


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "ids"])
def test_an_empty_prompt_is_refused(engine: Engine, prompt: str | list[int]) -> None:
    with pytest.raises(RequestRefused, match="a prompt is a non-empty list of token ids"):
        engine.add_request(prompt)
    assert engine.idle


def test_a_prompt_one_short_of_the_context_gets_one_token(engine: Engine) -> None:
    (output,) = answer(engine, [5] * (CONTEXT - 1), SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(output.token_ids) == 1
    assert output.finish_reason is FinishReason.CONTEXT
    with pytest.raises(RequestRefused, match=f"{CONTEXT} tokens and 1 to generate exceed the context of {CONTEXT}"):
        engine.add_request([5] * CONTEXT, SamplingParams(max_tokens=100))


def test_a_fork_ends_where_the_context_does_as_its_parent(engine: Engine) -> None:
    """Asked for as many tokens as the parent was, which got fewer."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    parent = engine.add_request([5] * (CONTEXT - 3), params)
    while not (first := [output for output in engine.step() if output.request_id == parent]):
        pass
    outputs = {parent: first}
    fork = engine.fork(parent, params)
    for request, later in drive(engine).items():
        outputs.setdefault(request, []).extend(later)
    ids = {request: [token for output in outputs[request] for token in output.token_ids] for request in outputs}
    assert len(ids[parent]) == 3
    assert ids[fork] == ids[parent][1:]
    assert outputs[fork][-1].finish_reason is FinishReason.CONTEXT


def test_an_answer_of_one_token_is_the_first_of_a_longer_one(engine: Engine) -> None:
    first, *_ = answer(engine, "rain", SamplingParams(max_tokens=5, ignore_eos=True))
    (only,) = answer(engine, "rain", SamplingParams(max_tokens=1, ignore_eos=True))
    assert only.token_ids == first.token_ids
    assert only.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_takes_effect_in_every_state_and_once(engine: Engine, steps: int) -> None:
    """Waiting, in the middle of a prompt of three chunks, and decoding."""
    expected = text_of(answer(engine, "the inn", SamplingParams(max_tokens=6, ignore_eos=True)))
    kept = engine.add_request("the inn", SamplingParams(max_tokens=6, ignore_eos=True))
    doomed = engine.add_request(list(range(10, 34)), SamplingParams(max_tokens=8, ignore_eos=True))
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort(doomed)
    engine.abort(doomed)
    later = drive(engine)
    assert doomed not in later
    assert text_of([output for output in outputs if output.request_id == kept] + later.get(kept, [])) == expected


def test_characters_and_stop_strings_may_span_tokens(engine: Engine) -> None:
    """Each byte is a token of its own: the answer is forced, and its text can be said beforehand."""
    params = SamplingParams(structure=Structure.regex("naïve → 日本語, done"), max_tokens=35)
    outputs = answer(engine, "rain", params)
    assert text_of(outputs) == "naïve → 日本語, done"
    pieces = [output.text for output in outputs]
    assert "\ufffd" not in "".join(pieces)
    assert pieces[2:4] == ["", "ï"]  # two bytes: held back until the second
    for stop, expected in (("→ 日", "naïve "), ("本", "naïve → 日"), ("done", "naïve → 日本語, "), ("naïve →", "")):
        stopped = answer(engine, "rain", SamplingParams(structure=params.structure, max_tokens=35, stop=(stop,)))
        assert text_of(stopped) == expected
        assert stopped[-1].finish_reason is FinishReason.STOP


def test_an_answer_cut_within_a_character_ends_in_a_replacement_character(engine: Engine) -> None:
    structure = Structure.regex("日本")
    outputs = answer(engine, "rain", SamplingParams(structure=structure, max_tokens=4))
    assert [output.text for output in outputs] == ["", "", "日", "\ufffd"]
    decoder = Detokenizer(engine.tokenizer)
    ids = [token for output in outputs for token in output.token_ids]
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text_of(outputs)


def test_log_probabilities_come_with_a_structure_and_are_not_its(engine: Engine) -> None:
    """The structure forces every byte; the model's own opinion of each is reported, and agrees with scoring."""
    prompt = engine.tokenizer.encode("rain").tolist()
    outputs = answer(engine, prompt, SamplingParams(structure=Structure.regex("xyz"), logprobs=2))
    ids = [token for output in outputs for token in output.token_ids]
    given = [entry.logprob for output in outputs for entry in output.logprobs]
    assert len(given) == len(ids)
    assert given == pytest.approx(engine.score(prompt + ids).logprobs[-len(ids) :].tolist(), abs=1e-5)
    assert max(given) < -0.1  # forced: nobody would have said it
    assert all(len(entry.top) == 2 for output in outputs for entry in output.logprobs)


def test_a_generator_dropped_half_way_gives_everything_back(engine: Engine) -> None:
    generator = engine.generate("rain", SamplingParams(max_tokens=20, ignore_eos=True))
    next(generator)
    assert not engine.idle
    del generator  # as a loop that is left by `break` does
    assert engine.idle
    assert engine.cache.pool.used == 0

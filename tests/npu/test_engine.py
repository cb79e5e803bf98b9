from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.codec import FP16
from hostcache.errors import RequestFailed, RequestRefused, UsageError
from hostcache.request import FinishReason
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.stream import RequestOutput
from tests.npu.driving import drive, text_of
from tests.npu.tiny import TinyLlama, write_tiny_llama

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent) as engine:
        yield engine


def test_generate_streams_what_step_brings(engine: Engine) -> None:
    request = engine.add_request("in the rain", GREEDY)
    outputs = drive(engine)[request]
    assert [len(output.token_ids) for output in outputs] == [1] * 8
    assert [output.finish_reason for output in outputs] == [None] * 7 + [FinishReason.LENGTH]
    assert "".join(engine.generate("in the rain", GREEDY)) == text_of(outputs)
    ids = [token for output in outputs for token in output.token_ids]
    assert engine.tokenizer.decode(ids) == text_of(outputs)


def test_text_and_its_ids_are_the_same_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("on the hill")
    assert "".join(engine.generate("on the hill", GREEDY)) == "".join(engine.generate(ids, GREEDY))


def test_a_generator_leaves_other_requests_their_outputs(engine: Engine) -> None:
    other = engine.add_request("then", GREEDY)
    assert len("".join(engine.generate("in the rain", SamplingParams(max_tokens=20, ignore_eos=True)))) > 0
    outputs = drive(engine).get(other, []) or [output for output in engine.step() if output.request_id == other]
    assert sum(len(output.token_ids) for output in outputs) == 8


def test_two_generators_interleave(engine: Engine) -> None:
    alone = ["".join(engine.generate(prompt, GREEDY)) for prompt in ("rain", "the inn")]
    first, second = (engine.generate(prompt, GREEDY) for prompt in ("rain", "the inn"))
    pieces: tuple[list[str], list[str]] = ([], [])
    for _ in range(20):
        for generator, text in zip((first, second), pieces, strict=True):
            text.append(next(generator, ""))
    assert ["".join(text) for text in pieces] == alone


def test_closing_a_generator_aborts_its_request(engine: Engine) -> None:
    generator = engine.generate("rain", SamplingParams(max_tokens=100, ignore_eos=True))
    next(generator)
    assert engine.cache.pool.used > 0
    generator.close()
    assert engine.idle
    assert engine.cache.pool.used == 0


def test_a_stop_string_ends_the_answer_before_it(engine: Engine) -> None:
    full = "".join(engine.generate("in the rain", GREEDY))
    stop = full[3:5]
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop=(stop,))
    request = engine.add_request("in the rain", params)
    outputs = drive(engine)[request]
    assert text_of(outputs) == full[: full.index(stop)]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(outputs) < 8


def test_what_only_begins_a_stop_string_comes_out_at_the_end(engine: Engine) -> None:
    full = "".join(engine.generate("in the rain", GREEDY))
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop=(full[-2:] + "\x00",))
    outputs = drive_one(engine, "in the rain", params)
    assert text_of(outputs) == full
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_an_end_token_ends_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token is made the end token: it is reported as an id and gives no text."""
    ids = [token for output in drive_one(engine, "rain") for token in output.token_ids]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({ids[2]}))
    if ids[2] in ids[:2]:
        pytest.fail("choose another prompt: the token comes earlier, too")
    outputs = drive_one(engine, "rain", SamplingParams(max_tokens=8))
    assert [token for output in outputs for token in output.token_ids] == ids[:3]
    assert text_of(outputs) == engine.tokenizer.decode(ids[:2])
    assert outputs[-1].finish_reason is FinishReason.STOP


def drive_one(engine: Engine, prompt: str, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    request = engine.add_request(prompt, params)
    return drive(engine)[request]


def test_broken_logits_fail_one_request_and_spare_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine._runner._decoder.forward

    def broken(*args: NDArray[np.int32]) -> NDArray[np.float32]:
        logits = forward(*args)  # type: ignore[arg-type] # passed on as they came
        if len(logits) == 2:
            logits[0] = np.nan
        return logits

    expected = text_of(drive_one(engine, "the inn"))
    monkeypatch.setattr(engine._runner._decoder, "forward", broken)
    bad, good = engine.add_request("rain", GREEDY), engine.add_request("the inn", GREEDY)
    outputs = drive(engine)
    assert outputs[bad][-1].finish_reason is FinishReason.FAILED
    assert isinstance(outputs[bad][-1].error, RequestFailed)
    assert text_of(outputs[good]) == expected


def test_a_failed_request_raises_from_its_generator(model: Path) -> None:
    geometry_bytes = 2 * 2 * 2 * 16 * 16 * 2  # one block of the tiny model
    with Engine.load(model, pool_bytes=2 * geometry_bytes, cache_dir=model.parent) as engine:
        assert engine.cache.blocks == 2
        with pytest.raises(RequestFailed, match="grown to 33 tokens and the pool of 2 blocks of 16"):
            list(engine.generate(list(range(10, 40)), SamplingParams(max_tokens=50, ignore_eos=True)))
        assert engine.idle
        assert "".join(engine.generate("rain", GREEDY))


def test_a_forks_text_goes_on_where_its_parents_stands(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    full = text_of(drive_one(engine, "in the rain", params))
    parent = engine.add_request("in the rain", params)
    before = "".join(output.text for _ in range(5) for output in engine.step())
    child, other = engine.fork(parent), engine.fork(parent, SamplingParams(temperature=1.0, seed=4, max_tokens=12))
    outputs = drive(engine)
    assert before + text_of(outputs[parent]) == full
    assert before + text_of(outputs[child]) == full
    assert text_of(outputs[other]) != text_of(outputs[child])
    with pytest.raises(UsageError, match="no request 99 is running"):
        engine.fork(99)


def test_a_fork_beyond_max_sequences_says_the_same_later(model: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    with Engine.load(model, pool_bytes=1 << 20, max_sequences=1, cache_dir=model.parent) as engine:
        parent = engine.add_request("in the rain", params)
        before = "".join(output.text for _ in range(25) for output in engine.step())
        children = [engine.fork(parent), engine.fork(parent, SamplingParams(max_tokens=30, ignore_eos=True))]
        order: list[int] = []
        texts = {parent: before, **dict.fromkeys(children, before)}
        while not engine.idle:
            for output in engine.step():
                texts[output.request_id] += output.text
                order.append(output.request_id)
        assert order == [parent] * 15 + [children[0]] * 15 + [children[1]] * 5
        assert texts[children[0]] == texts[parent]
        shared = len(engine.tokenizer.encode("in the rain")) + 25 - 1  # all but the one whose logits are wanted
        assert engine.scheduler.stats.hit_tokens == 2 * shared


def test_the_context_bounds_the_answer(model: Path) -> None:
    with Engine.load(model, pool_bytes=1 << 20, context_length=20, cache_dir=model.parent) as engine:
        outputs = drive_one(engine, "in the rain", SamplingParams(max_tokens=500, ignore_eos=True))
        assert outputs[-1].finish_reason is FinishReason.CONTEXT
        assert sum(len(output.token_ids) for output in outputs) == 20 - len(engine.tokenizer.encode("in the rain"))
        with pytest.raises(RequestRefused, match="exceed the context of 20"):
            engine.add_request([5] * 20, GREEDY)


def test_unknown_ids_are_refused_by_value(engine: Engine) -> None:
    for wrong in (-1, engine.tokenizer.vocab_size):
        with pytest.raises(UsageError, match=f"token id {wrong} is outside 0"):
            engine.add_request([1, wrong], GREEDY)
        with pytest.raises(UsageError, match=f"token id {wrong} is outside 0"):
            engine.score([1, wrong])
    assert engine.idle


def test_salts_and_versions_share_nothing(engine: Engine) -> None:
    prompt = list(range(10, 60))
    for salt, version in (("", ""), ("a", ""), ("", "1")):
        request = engine.add_request(prompt, GREEDY, salt=salt, prompt_version=version)
        engine.step()
        assert engine.scheduler.running[0].hit_tokens == 0
        engine.abort(request)
    engine.add_request(prompt, GREEDY, salt="a")
    engine.step()
    assert engine.scheduler.running[0].hit_tokens == 49
    drive(engine)


def test_whatever_changes_a_bit_of_kv_is_part_of_its_namespace(model: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"activations": "fp32"},
        {"runtime": "emulated"},
        {"runtime": "emulated", "rounding": "op"},
    ]
    names = set()
    for options in ways:
        with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, **options) as engine:
            engine.add_request("rain", GREEDY)
            names.add(engine.scheduler.waiting[0].namespace)
    assert len(names) == len(ways)


def test_scoring_takes_no_blocks_and_leaves_no_traces(engine: Engine) -> None:
    before = engine.prefix.of(FP16).resident
    score = engine.score(list(range(10, 60)))
    assert score.logprobs.shape == score.top1.shape == (49,)
    assert score.perplexity == pytest.approx(float(np.exp(-score.logprobs.mean())))
    assert engine.cache.pool.used == 0
    assert engine.prefix.of(FP16).resident == before


@pytest.mark.parametrize(
    ("ids", "match"), [([5], "2 to 512 tokens"), ([], "2 to 512 tokens"), ([5] * 513, "2 to 512 tokens")]
)
def test_what_cannot_be_scored_is_refused(engine: Engine, ids: list[int], match: str) -> None:
    with pytest.raises(RequestRefused, match=match):
        engine.score(np.array(ids, dtype=np.int64))


def test_a_text_beyond_the_pool_is_not_scored(model: Path) -> None:
    with (
        Engine.load(model, pool_bytes=1 << 14, cache_dir=model.parent) as engine,
        pytest.raises(RequestRefused, match="13 blocks, 4 are available"),
    ):
        engine.score([5] * 200)


def test_scoring_agrees_with_itself_as_a_probability(engine: Engine) -> None:
    """Over all choices of the last token, the probabilities add up to one."""
    prompt = [20, 30, 40]
    total = sum(np.exp(engine.score([*prompt, token]).logprobs[-1]) for token in range(engine.tokenizer.vocab_size))
    assert total == pytest.approx(1.0, abs=1e-9)


def test_bad_options_give_everything_back(model: Path) -> None:
    for options, match in (
        ({"runtime": "gpu"}, "no runtime is called 'gpu': use one of auto, cpu, emulated, simulator"),
        ({"context_length": 0}, "a context of 0 is not within 1..512"),
        ({"context_length": 513}, "a context of 513 is not within 1..512"),
        ({"pool_bytes": 100}, "a pool of 100 bytes does not hold one block"),
    ):
        with pytest.raises(UsageError, match=match):
            Engine.load(model, cache_dir=model.parent, **options)


def test_a_closed_engine_refuses_work(model: Path) -> None:
    engine = Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent)
    generator = engine.generate("rain", GREEDY)
    next(generator)
    engine.close()
    for work in (
        lambda: engine.add_request("rain", GREEDY),
        lambda: engine.score([5, 6]),
        engine.step,
        lambda: next(generator),
    ):
        with pytest.raises(UsageError, match=r"closed|was aborted"):
            work()


@pytest.mark.parametrize("end", ["abort", "step"])
def test_a_generator_whose_outputs_went_elsewhere_says_so(engine: Engine, end: str) -> None:
    generator = engine.generate("rain", GREEDY)
    next(generator)
    (request,) = engine._streams
    if end == "abort":
        engine.abort(request)
    else:
        while not engine.idle:
            engine.step()
    with pytest.raises(UsageError, match=f"request {request} was aborted, or step\\(\\) took its outputs"):
        list(generator)


def test_what_a_generators_steps_brought_for_others_is_handed_out(engine: Engine) -> None:
    other = engine.add_request("then", SamplingParams(max_tokens=3, ignore_eos=True))
    list(engine.generate("rain", SamplingParams(max_tokens=20, ignore_eos=True)))
    assert not engine.idle  # there is nothing to compute, and something to take
    outputs = drive(engine)[other]
    assert sum(len(output.token_ids) for output in outputs) == 3
    assert engine.idle


def test_an_abort_within_a_step_waits_for_its_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler or a generator that is collected in the middle of a step does it."""
    expected = text_of(drive_one(engine, "the inn"))
    attend = engine.runtime.attend
    doomed = engine.add_request("rain", GREEDY)
    kept = engine.add_request("the inn", GREEDY)

    def aborting(layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        engine.abort(doomed)
        with pytest.raises(UsageError, match="close came from within a step"):
            engine.close()
        attend(layer, q, out)

    monkeypatch.setattr(engine.runtime, "attend", aborting)
    outputs = drive(engine)
    assert doomed not in outputs
    assert text_of(outputs[kept]) == expected


def test_a_step_that_fails_loses_no_earlier_output(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    other = engine.add_request("then", GREEDY)
    generator = engine.generate("rain", GREEDY)
    next(generator)
    waiting = sum(len(output.token_ids) for output in engine._outbox[other])
    assert waiting >= 1
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "begin_step", lambda batch: 1 // 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                engine.step()
    generator.close()
    assert sum(len(output.token_ids) for output in drive(engine)[other]) == 8


@pytest.mark.parametrize("prompt", [[5.9, 6.9], [True, False], ["a"], [[1], [2, 3]], None, {}], ids=repr)
def test_what_is_no_list_of_ids_is_refused(engine: Engine, prompt: Any) -> None:
    for take in (engine.add_request, engine.score):
        with pytest.raises(RequestRefused, match="a prompt is text or a list of token ids"):
            take(prompt)
    assert engine.idle


def test_a_bad_salt_is_refused_and_spares_the_others(engine: Engine) -> None:
    for salt in ("\ud800", None, 5):
        with pytest.raises(UsageError, match="salt is"):
            engine.add_request("rain", GREEDY, salt=salt)  # type: ignore[arg-type] # that is the point
    assert drive_one(engine, "rain")


def test_a_forks_text_is_whole_whatever_stop_strings_hold_back(engine: Engine) -> None:
    """The parent holds back what might be its stop string; the fork has another, or none."""
    plain = SamplingParams(max_tokens=10, ignore_eos=True)
    full = text_of(drive_one(engine, "in the rain", plain))
    for cut in range(1, len(full) - 1):
        holding = SamplingParams(max_tokens=10, ignore_eos=True, stop=(full[cut - 1 : cut + 1] + "\x00",))
        parent = engine.add_request("in the rain", holding)
        given = "".join(output.text for _ in range(5) for output in engine.step())
        children = [engine.fork(parent, params) for params in (plain, holding)]
        outputs = drive(engine)
        assert [given + text_of(outputs[child]) for child in (parent, *children)] == [full] * 3
        parent = engine.add_request("in the rain", plain)
        given = "".join(output.text for _ in range(5) for output in engine.step())
        child = engine.fork(parent, holding)
        assert given + text_of(drive(engine)[child]) == full


class Named(os.PathLike[str]):
    """Names a path and is neither a text nor a Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.parametrize("form", [str, Named, Path])
def test_a_path_comes_in_any_form(model: Path, tmp_path: Path, form: Any) -> None:
    with Engine.load(form(model), pool_bytes=1 << 20, cache_dir=form(tmp_path / "cache")) as engine:
        assert len("".join(engine.generate("rain", GREEDY))) > 0
    assert len(list((tmp_path / "cache").glob("weights/*/weights.bin"))) == 1


def test_closing_twice_is_closing_once(model: Path) -> None:
    engine = Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent)
    engine.add_request("rain", GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert engine.cache.buffer.size == 0


def test_an_empty_step_is_fine(engine: Engine) -> None:
    assert engine.step() == []
    engine.abort(12345)

"""Structured answers and log-probabilities from a running engine, of a model with random weights: no meaning helps."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped] # has no annotations
import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import MissingExtra, RequestFailed, UsageError
from hostcache.request import FinishReason, Request
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.stream import RequestOutput
from npu.structured import Structure
from tests.npu.driving import drive, text_of
from tests.npu.tiny import TinyLlama, write_tiny_llama

END = 2  # of the tiny model

SCHEMAS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "count": {"type": "integer", "minimum": -7, "maximum": 1200},
            "kind": {"enum": ["bearing", "spindle", "belt", None, 7]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}]},
        "minItems": 2,
        "maxItems": 4,
    },
    {
        "$defs": {
            "leaf": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {
            "left": {"$ref": "#/$defs/leaf"},
            "right": {"$ref": "#/$defs/leaf"},
            "when": {"type": "string", "format": "date"},
        },
        "required": ["left"],
        "additionalProperties": False,
    },
    {"const": {"fixed": [1, "é漢", None]}},
)
"""Each bounds the length of what it accepts, so that every answer ends by itself."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("structured") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=8 << 20, cache_dir=model.parent) as engine:
        yield engine


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def answer(engine: Engine, params: SamplingParams) -> tuple[str, list[int], RequestOutput]:
    request = engine.add_request("in the rain", params)
    outputs = drive(engine)[request]
    return text_of(outputs), ids_of(outputs), outputs[-1]


# Schemas


def test_two_hundred_hot_answers_parse_and_validate(engine: Engine) -> None:
    asked = {}
    for number in range(200):
        schema = SCHEMAS[number % len(SCHEMAS)]
        params = SamplingParams(
            temperature=1.5, seed=number, max_tokens=200, structure=Structure.json_schema(schema), typical_p=0.95
        )
        asked[engine.add_request([3 + number, 20, 30], params)] = schema
    answers = set()
    for request, outputs in drive(engine).items():
        assert outputs[-1].finish_reason is FinishReason.STOP
        answers.add(text_of(outputs))
        jsonschema.validate(json.loads(text_of(outputs)), asked[request], jsonschema.Draft202012Validator)
    assert len(answers) > 100  # varied, but for the constant and coincidences among the short ones
    assert json.dumps(SCHEMAS[3]["const"], ensure_ascii=False) in answers


def test_an_answer_cut_by_max_tokens_is_a_beginning(engine: Engine) -> None:
    whole = SamplingParams(temperature=1.0, seed=1, max_tokens=200, structure=Structure.json_schema(SCHEMAS[0]))
    cut = SamplingParams(temperature=1.0, seed=1, max_tokens=9, structure=Structure.json_schema(SCHEMAS[0]))
    full_text, full_ids, _ = answer(engine, whole)
    text, ids, last = answer(engine, cut)
    assert last.finish_reason is FinishReason.LENGTH
    assert ids == full_ids[:9]
    assert full_text.startswith(text.removesuffix("�"))


# Where an answer ends

LETTERS = Structure.regex("[a-z]{3,9}")


def test_an_end_token_is_taken_where_the_structure_may_end_and_no_earlier(engine: Engine) -> None:
    """The bias makes it the most likely token at every step; three letters have to come first."""
    text, ids, last = answer(engine, SamplingParams(structure=LETTERS, logit_bias={END: 100.0}))
    assert re.fullmatch("[a-z]{3}", text)
    assert ids[-1] == END
    assert last.finish_reason is FinishReason.STOP


def test_a_complete_structure_ends_the_answer_without_an_end_token(engine: Engine) -> None:
    text, ids, last = answer(engine, SamplingParams(structure=LETTERS, logit_bias={END: -100.0}))
    assert re.fullmatch("[a-z]{9}", text)
    assert END not in ids
    assert last.finish_reason is FinishReason.STOP


def test_a_stop_string_may_end_it_earlier(engine: Engine) -> None:
    params = SamplingParams(structure=Structure.choice(["one two three"]), stop=(" t",))
    text, _, last = answer(engine, params)
    assert (text, last.finish_reason) == ("one", FinishReason.STOP)


def test_going_on_behind_the_end_contradicts_a_structure() -> None:
    with pytest.raises(UsageError, match="ignore_eos is True; it must be True or False, and False with a structure"):
        SamplingParams(structure=LETTERS, ignore_eos=True)


# Whichever way it is computed

HOT = SamplingParams(temperature=1.5, seed=5, max_tokens=60, structure=Structure.regex("([a-z]{2}, ){18}[a-z]{2}"))
TEXT = re.compile("([a-z]{2}, ){18}[a-z]{2}")


def submitted(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.add_request(prompt, params)
    return next(waiting for waiting in engine.scheduler.waiting if waiting.id == request)


def test_preemption_in_the_middle_changes_nothing(model: Path) -> None:
    """A pool too small for two: the second loses its blocks, its structure's state included, as far as it shows."""
    prompts = list(range(10, 60)), list(range(60, 10, -1))
    with Engine.load(model, pool_bytes=8 << 20, cache_dir=model.parent) as engine:
        alone = []
        for prompt in prompts:
            request = submitted(engine, prompt, HOT)
            alone.append(text_of(drive(engine)[request.id]))
    block = 2 * 2 * 2 * 16 * 16 * 2
    with Engine.load(model, pool_bytes=9 * block, cache_dir=model.parent) as engine:
        assert engine.cache.blocks == 9  # four each for the prompts, and seven for one that has ended
        first, second = (submitted(engine, prompt, HOT) for prompt in prompts)
        outputs = drive(engine)
        assert second.preemptions == 1
        assert second.prompt_length + 1 < second.length  # it had begun to answer
        assert [text_of(outputs[request.id]) for request in (first, second)] == alone
    assert all(TEXT.fullmatch(text) for text in alone)


def test_a_fork_in_the_middle_follows_the_structure_too(engine: Engine) -> None:
    parent = engine.add_request("in the rain", HOT)
    before = "".join(output.text for _ in range(20) for output in engine.step())
    assert 10 < len(before) < 30
    same = engine.fork(parent)
    reseeded = engine.fork(parent, SamplingParams(temperature=1.5, seed=6, max_tokens=60, structure=HOT.structure))
    outputs = drive(engine)
    texts = {request: before + text_of(outputs[request]) for request in (parent, same, reseeded)}
    assert texts[same] == texts[parent] != texts[reseeded]
    assert all(TEXT.fullmatch(text) for text in texts.values())


def test_a_fork_shares_a_seed_that_nobody_gave(engine: Engine) -> None:
    parent = engine.add_request("in the rain", SamplingParams(temperature=1.5, max_tokens=60, structure=HOT.structure))
    engine.step()
    child = engine.fork(parent)
    outputs = drive(engine)
    assert ids_of(outputs[child]) == ids_of(outputs[parent])
    assert len(ids_of(outputs[parent])) > 10


def test_a_fork_whose_answer_breaks_its_new_structure_fails_alone(engine: Engine) -> None:
    parent = engine.add_request("in the rain", HOT)
    for _ in range(6):
        engine.step()
    child = engine.fork(parent, SamplingParams(structure=Structure.regex("[0-9]+")))
    outputs = drive(engine)
    assert outputs[child][-1].finish_reason is FinishReason.FAILED
    assert isinstance(outputs[child][-1].error, RequestFailed)
    assert "the structure cannot be followed" in str(outputs[child][-1].error)
    assert outputs[parent][-1].finish_reason is FinishReason.STOP


def test_steps_that_are_rolled_back_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour's sampling fails behind ours: our token was chosen, and fed to the structure, for nothing."""
    expected = answer(engine, HOT)[0]
    request = engine.add_request("in the rain", HOT)
    neighbour = engine.add_request("the inn", SamplingParams(max_tokens=60, ignore_eos=True))
    stream = engine._streams[neighbour]
    sample, calls = stream.sample, 0

    def failing(logits: NDArray[np.float32], ahead: int) -> tuple[int, bool]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise OSError("injected")
        return sample(logits, ahead)

    monkeypatch.setattr(stream, "sample", failing)
    text, failures = "", 0
    while not engine.idle:
        try:
            text += "".join(output.text for output in engine.step() if output.request_id == request)
        except OSError:
            failures += 1
    assert failures > 10
    assert text == expected


# Refused at the door


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (SamplingParams(structure=Structure.json_schema('{"type": 5}')), "the JSON schema cannot be used"),
        (SamplingParams(logit_bias={272: 1.0}), "token id 272 is outside 0..271"),
    ],
)
def test_what_cannot_be_sampled_leaves_nothing_behind(engine: Engine, params: SamplingParams, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        engine.add_request("rain", params)
    assert engine.idle
    parent = engine.add_request("rain", SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    with pytest.raises(UsageError, match=match):
        engine.fork(parent, params)
    assert list(drive(engine)) == [parent]


def test_a_missing_library_refuses_structures_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match="rockpage\\[structured\\]"):
        engine.add_request("rain", SamplingParams(structure=LETTERS))
    assert engine.idle
    assert answer(engine, SamplingParams(max_tokens=3, ignore_eos=True))[1]


# Penalties count the answer alone


def test_the_frequency_penalty_does_not_count_the_prompt(engine: Engine) -> None:
    """Two tokens that a bias lifts above all others take turns, however often one of them is in the prompt."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, frequency_penalty=2.0, logit_bias={50: 90.0, 60: 90.0})
    request = engine.add_request([50] * 100, params)
    ids = ids_of(drive(engine)[request])
    assert {*ids} == {50, 60}
    # Their logits differ by less than 12, so their counts by less than 12 / 2 + 1.
    assert abs(ids.count(50) - ids.count(60)) < 7


# Log-probabilities


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, temperature=1.4, seed=2, logit_bias={40: 5.0}),
        SamplingParams(max_tokens=60, logprobs=20, structure=LETTERS, temperature=2.0, seed=1, top_k=5),
    ],
    ids=["greedy", "drawn", "structured"],
)
def test_log_probabilities_are_the_models_own(engine: Engine, params: SamplingParams) -> None:
    """Teacher-forcing the same text gives the same numbers, whatever bias, structure and temperature have chosen."""
    prompt = engine.tokenizer.encode("in the rain").tolist()
    request = engine.add_request(prompt, params)
    outputs = drive(engine)[request]
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.token for entry in entries] == ids_of(outputs)
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
    score = engine.score([*prompt, *ids_of(outputs)])
    assert [entry.logprob for entry in entries] == pytest.approx(score.logprobs[len(prompt) - 1 :], abs=1e-9)
    for entry, best in zip(entries, score.top1[len(prompt) - 1 :], strict=True):
        assert len(entry.top) == params.logprobs
        assert not entry.top or entry.top[0][0] == best
        assert all(one[1] >= other[1] for one, other in zip(entry.top, entry.top[1:], strict=False))


def test_none_are_computed_unless_asked_for(engine: Engine) -> None:
    request = engine.add_request("rain", SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.logprobs for output in drive(engine)[request]] == [(), (), ()]


def test_a_request_that_fails_reports_none_for_a_token_it_has_not_got(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = engine.add_request("rain", SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1))
    (first,) = engine.step()
    assert len(first.logprobs) == 1
    monkeypatch.setattr(engine._runner._decoder, "forward", lambda *_: np.full((1, 272), np.nan, np.float32))
    (last,) = engine.step()
    assert (last.request_id, last.finish_reason) == (request, FinishReason.FAILED)
    assert last.token_ids == ()
    assert last.logprobs == ()

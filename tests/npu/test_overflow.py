"""The end of the context: who stops there, who is refused, and that nobody ends for it silently."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcache.errors import RequestFailed, RequestRefused, UsageError
from hostcache.request import FinishReason
from hostcache.window import AttentionWindow
from npu.engine import Engine
from npu.overflow import ContextRules, Grant
from npu.queue_options import QueueOptions
from npu.sampler import SamplingParams
from npu.stream import RequestOutput
from npu.stream_intake import StreamIntake
from tests.npu.driving import drive
from tests.npu.tiny import TinyLlama, write_tiny_llama

CONTEXT = 40
PROMPT = [5 + index for index in range(30)]
ROOM = CONTEXT - len(PROMPT)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("overflow") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=1 << 20, context_length=CONTEXT, cache_dir=model.parent) as engine:
        yield engine


def end_of(outputs: list[RequestOutput]) -> tuple[int, FinishReason | None]:
    """Tokens of an answer, and why it ended."""
    return sum(len(output.token_ids) for output in outputs), outputs[-1].finish_reason


def test_options_are_typed_as_what_they_are_passed_to() -> None:
    """A type checker sees to one half: that no option is wrong. The other half is that none is missing."""
    options = [
        each for each in inspect.signature(StreamIntake.open).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    typed = {name: hint.__forward_arg__ for name, hint in QueueOptions.__annotations__.items()}
    assert typed == {option.name: option.annotation for option in options}


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [(ROOM - 1, FinishReason.LENGTH), (ROOM, FinishReason.LENGTH), (ROOM + 1, FinishReason.CONTEXT)],
)
def test_an_answer_that_the_context_cuts_says_so(engine: Engine, max_tokens: int, reason: FinishReason) -> None:
    request = engine.add_request(PROMPT, replace(LONG, max_tokens=max_tokens))
    assert end_of(drive(engine)[request]) == (min(max_tokens, ROOM), reason)


def test_an_end_token_in_the_last_place_is_the_end(engine: Engine) -> None:
    """What the context cut, nobody will miss."""
    request = engine.add_request(PROMPT, LONG)
    (*_, last) = drive(engine)[request]
    engine.tokenizer.eos_ids |= frozenset(last.token_ids)
    request = engine.add_request(PROMPT, replace(LONG, ignore_eos=False), salt="again")
    count, reason = end_of(drive(engine)[request])
    assert reason is FinishReason.STOP
    assert count <= ROOM


def test_a_pool_that_is_too_small_is_a_failure_still(model: Path) -> None:
    """The context has room: whoever wants more gives the pool more memory, not the answer a window."""
    with Engine.load(model, pool_bytes=32 << 10, cache_dir=model.parent) as engine:
        assert engine.cache.pool.total * 16 < 512  # the model's context
        request = engine.add_request(PROMPT, replace(LONG, max_tokens=482))
        last = drive(engine)[request][-1]
        assert last.finish_reason is FinishReason.FAILED
        assert isinstance(last.error, RequestFailed)


def test_branches_and_forks_end_as_their_leader(engine: Engine) -> None:
    ids = engine.add_branches(PROMPT, 3, replace(LONG, temperature=1.0, seed=7))
    outputs: dict[int, list[RequestOutput]] = {request: [] for request in ids}
    while not outputs[ids[0]]:
        for output in engine.step():
            outputs[output.request_id].append(output)
    same = engine.fork(ids[0])
    shorter = engine.fork(ids[0], replace(LONG, max_tokens=ROOM))
    for request, later in drive(engine).items():
        outputs.setdefault(request, []).extend(later)
    assert {end_of(outputs[request]) for request in ids} == {(ROOM, FinishReason.CONTEXT)}
    assert end_of(outputs[same]) == (ROOM - 1, FinishReason.CONTEXT)
    assert end_of(outputs[shorter]) == (ROOM - 1, FinishReason.LENGTH)


def test_guesses_end_where_the_context_does(model: Path) -> None:
    """A step that brings several tokens brings none beyond it."""
    prompt = [5, 9, 30] * 10
    with Engine.load(model, context_length=CONTEXT, pool_bytes=1 << 20, cache_dir=model.parent, speculate=8) as engine:
        request = engine.add_request(prompt, LONG)
        assert end_of(drive(engine)[request]) == (ROOM, FinishReason.CONTEXT)


def test_a_prompt_that_leaves_no_room_is_refused_with_the_way_past_the_context(engine: Engine) -> None:
    """To ask for fewer tokens would not help it."""
    refusal = "40 tokens and 1 to generate exceed the context of 40: shorten the prompt, or choose .* slide"
    with pytest.raises(RequestRefused, match=refusal) as caught:
        engine.add_request([5] * CONTEXT, replace(LONG, max_tokens=3))
    assert caught.value.values == {"prompt_tokens": 40, "max_tokens": 3, "context_length": 40}
    assert engine.idle


def test_refuse_takes_what_fits_whole_and_nothing_else(engine: Engine) -> None:
    request = engine.add_request(PROMPT, replace(LONG, max_tokens=ROOM), overflow="refuse")
    assert end_of(drive(engine)[request]) == (ROOM, FinishReason.LENGTH)
    with pytest.raises(RequestRefused, match="30 tokens and 11 to generate exceed the context of 40") as caught:
        engine.add_request(PROMPT, replace(LONG, max_tokens=ROOM + 1), overflow="refuse")
    assert caught.value.values == {"prompt_tokens": 30, "max_tokens": 11, "context_length": 40}
    with pytest.raises(RequestRefused, match="30 tokens and 128 to generate"):  # the default counts
        engine.add_branches(PROMPT, 2, overflow="refuse")
    assert engine.idle


def test_a_fork_is_refused_as_its_parent_would_be(engine: Engine) -> None:
    parent = engine.add_request(PROMPT, replace(LONG, max_tokens=ROOM), overflow="refuse")
    engine.step()
    with pytest.raises(RequestRefused, match="30 tokens and 11 to generate"):
        engine.fork(parent, replace(LONG, max_tokens=ROOM + 1))
    assert end_of(drive(engine)[parent]) == (ROOM - 1, FinishReason.LENGTH)  # behind the token of the first step


def test_branches_and_forks_of_forks_are_refused_as_the_first_would_be(engine: Engine) -> None:
    _, branch = engine.add_branches(PROMPT, 2, replace(LONG, max_tokens=ROOM), overflow="refuse")
    while not any(output.request_id == branch for output in engine.step()):
        pass
    for request in (branch, engine.fork(branch)):
        with pytest.raises(RequestRefused, match="30 tokens and 11 to generate"):
            engine.fork(request, replace(LONG, max_tokens=ROOM + 1))
    drive(engine)


def test_a_policy_that_does_not_exist_is_named_beside_those_that_do(engine: Engine) -> None:
    with pytest.raises(
        UsageError, match="no overflow policy is called 'drop': there are stop, refuse, slide"
    ) as caught:
        engine.add_request(PROMPT, overflow="drop")  # type: ignore[arg-type] # what is tested
    assert caught.value.values == {"overflow": "drop"}
    with pytest.raises(TypeError, match="overflows"):
        engine.add_request(PROMPT, overflows="stop")  # type: ignore[call-arg] # what is tested
    assert engine.idle


@pytest.mark.parametrize("odd", [["stop"], np.zeros((2, 2)), 5], ids=["list", "array", "number"])
def test_what_is_no_name_or_window_is_refused_as_such(engine: Engine, odd: Any) -> None:
    """A list cannot be looked up, and an array is neither equal nor unequal."""
    with pytest.raises(UsageError, match="no overflow policy is called"):
        engine.add_request(PROMPT, overflow=odd)
    with pytest.raises(UsageError, match=r"(?s)window is .*; it must be an AttentionWindow, or None"):
        engine.add_request(PROMPT, window=odd)
    assert engine.idle


WINDOW = AttentionWindow(20, sinks=2)


def test_a_prompt_that_fills_the_context_is_granted_nothing() -> None:
    rules = ContextRules(CONTEXT, 16)
    assert rules.grant("stop", CONTEXT - 1, 100, WINDOW) == Grant(1, WINDOW, "stop")
    with pytest.raises(RequestRefused, match=f"{CONTEXT} tokens and 1 to generate"):
        rules.grant("stop", CONTEXT, 100, None)
    with pytest.raises(RequestRefused, match=f"{CONTEXT + 5} tokens and 1 to generate"):
        rules.grant("stop", CONTEXT + 5, 100, WINDOW)


def test_what_fits_sees_everything_and_what_slides_as_much_as_the_context_allows() -> None:
    """Behind 4 sinks, which take a block, and an eighth that stays free, 64 tokens or at least a block."""
    rules = ContextRules(512, 16)
    assert rules.grant("slide", 500, 12, None) == Grant(12, None, "stop")
    assert rules.grant("slide", 500, 13, None) == Grant(13, AttentionWindow(512 - 16 - 64, sinks=4), "slide")
    assert ContextRules(64, 16).grant("slide", 90, 5, None) == Grant(5, AttentionWindow(32, sinks=4), "slide")
    with pytest.raises(RequestRefused, match="32 tokens is too short to slide in: give one of more than 32"):
        ContextRules(32, 16).grant("slide", 90, 5, None)
    assert ContextRules(33, 16).grant("slide", 90, 5, None).window == AttentionWindow(1, sinks=4)


def test_a_window_that_is_asked_for_is_given_under_every_policy() -> None:
    rules = ContextRules(512, 16)
    assert rules.grant("stop", 500, 100, WINDOW) == Grant(12, WINDOW, "stop")
    assert rules.grant("refuse", 500, 12, WINDOW) == Grant(12, WINDOW, "refuse")
    assert rules.grant("slide", 5, 5, WINDOW) == Grant(5, WINDOW, "slide")


def test_a_models_own_windows_leave_no_choice() -> None:
    rules = ContextRules(512, 16, windows=(128, 64))
    assert rules.grant("slide", 500, 100, None) == Grant(100, None, "slide")
    with pytest.raises(UsageError, match="windows of their own, of 128 tokens: leave window out"):
        rules.grant("stop", 5, 5, WINDOW)
    with pytest.raises(UsageError, match="layers that see everything: it cannot slide"):
        ContextRules(512, 16, windows=(128, 0)).grant("slide", 500, 100, None)


def test_a_fork_of_what_slides_gets_what_it_asks_for() -> None:
    rules = ContextRules(CONTEXT, 16)
    assert rules.tokens("slide", 30, 1000) == 1000
    assert rules.tokens("stop", 30, 1000) == 10

"""`rockpage run --overflow`: conversations that outgrow the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostcache.window import AttentionWindow
from npu.engine import Engine
from npu.queue_options import QueueOptions
from npu.sampler import SamplingParams
from tests.npu.tiny import TinyLlama, write_tiny_llama

from .command_line import Outcome, assert_refused, run_here

CONTEXT = 96
QUESTION = "in the rain over the hill"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("overflow") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


def run(capsys: pytest.CaptureFixture[str], model: Path, *options: str, prompt: str = QUESTION) -> Outcome:
    usual = ["--pool", "1MiB", "--context", str(CONTEXT), "--max-tokens", "20"]
    if "--beams" not in options:
        usual.append("--ignore-eos")
    return run_here(capsys, "run", str(model), "--prompt", prompt, *usual, *options)


def described(capsys: pytest.CaptureFixture[str], model: Path, *options: str, prompt: str = QUESTION) -> dict[str, Any]:
    outcome = run(capsys, model, "--json", *options, prompt=prompt)
    assert (outcome.status, outcome.err) == (0, "")
    parsed: dict[str, Any] = json.loads(outcome.out)
    return parsed


def said(model: Path, messages: list[dict[str, str]], options: QueueOptions) -> tuple[int, str]:
    """Tokens of a conversation, and what an engine of its own answers to it."""
    cache = model.parent / "rockpage"
    with Engine.load(model, pool_bytes=1 << 20, context_length=CONTEXT, cache_dir=cache, threads=2) as engine:
        prompt = engine.encode_chat(messages)
        return len(prompt), "".join(engine.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True), **options))


def test_an_answer_that_the_context_ends_says_so_and_how_to_go_on(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    outcome = run(capsys, model, "--max-tokens", "200")
    assert outcome.status == 0
    assert outcome.err == "the context of 96 tokens ended the answer; --overflow slide goes on past it\n"
    assert run(capsys, model).err == ""
    several = run(capsys, model, "--max-tokens", "200", "--answers", "2", "--temperature", "1")
    assert several.err == "the context of 96 tokens ended 2 answers; --overflow slide goes on past it\n"
    assert described(capsys, model, "--max-tokens", "200")["finish_reason"] == "context"


def test_a_search_that_the_context_ends_says_so(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Which searches find an end before the context's hangs on the model's last bits: one of these does not."""
    full = 0
    for prompt in (QUESTION, "the hill", "in the rain", "over"):
        found = described(capsys, model, "--beams", "2", "--max-tokens", "200", prompt=prompt)
        for answer in found["answers"]:
            if answer["finish_reason"] != "stop":
                assert answer["finish_reason"] == "context"
                assert found["prompt_tokens"] + len(answer["ids"]) == CONTEXT
                full += 1
    assert full


def test_what_slides_goes_on_to_its_own_end(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    answer = described(capsys, model, "--max-tokens", "200", "--overflow", "slide")
    assert (answer["finish_reason"], answer["output_tokens"]) == ("length", 200)
    # What follows the last token's predecessors sees 4 sinks and 63 of them: the usual window is 96 - 16 - 16 tokens.
    unseen = answer["prompt_tokens"] + 199 - 4 - 63
    assert answer["unseen_tokens"] == unseen
    outcome = run(capsys, model, "--max-tokens", "200", "--overflow", "slide")
    assert outcome.err == f"at its end the answer saw nothing of {unseen} earlier tokens, which its window had passed\n"
    assert "unseen_tokens" not in described(capsys, model, "--overflow", "slide")  # it fits


def test_what_is_to_be_refused_is(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert_refused(
        run(capsys, model, "--max-tokens", "200", "--overflow", "refuse"), "200 to generate exceed the context"
    )
    assert described(capsys, model, "--overflow", "refuse")["finish_reason"] == "length"


@pytest.mark.parametrize(("options", "window"), [((), None), (("--window", "48", "--sinks", "2"), (48, 2))])
def test_a_chat_that_slides_is_answered_as_whoever_knows_all_of_it_would(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, options: tuple[str, ...], window: Any
) -> None:
    """Six turns of about 60 tokens in a context of 96, each from the file of the one before."""
    queued: QueueOptions = {"overflow": "slide", "window": None if window is None else AttentionWindow(*window)}
    session = tmp_path / "talk.kv"
    messages: list[dict[str, str]] = []
    for _ in range(6):
        messages.append({"role": "user", "content": QUESTION})
        answer = described(capsys, model, "--chat", "--session", str(session), "--overflow", "slide", *options)
        assert (answer["prompt_tokens"], answer["text"]) == said(model, messages, queued)
        messages.append({"role": "assistant", "content": answer["text"]})
    assert answer["prompt_tokens"] > 3 * CONTEXT


def test_a_chat_that_stops_ends_an_answer_and_then_refuses_and_can_slide_on(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    talk = ("--chat", "--session", str(tmp_path / "talk.kv"))
    assert described(capsys, model, *talk, "--max-tokens", "2")["finish_reason"] == "length"
    longest = described(capsys, model, *talk, "--max-tokens", "200")
    assert longest["finish_reason"] == "context"
    assert longest["prompt_tokens"] + longest["output_tokens"] == CONTEXT
    kept = (tmp_path / "talk.kv").read_bytes()
    assert_refused(run(capsys, model, *talk), "exceed the context of 96")
    assert_refused(run(capsys, model, *talk, "--overflow", "refuse"), "20 to generate exceed the context of 96")
    assert (tmp_path / "talk.kv").read_bytes() == kept
    assert described(capsys, model, *talk, "--overflow", "slide")["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--overflow", "drop"), "'drop' (choose from"),
        (("--window", "0"), "got 0 behind 4"),
        (("--window", "many"), "invalid int value: 'many'"),
        (("--window", "8", "--sinks", "-1"), "got 8 behind -1"),
        (("--sinks", "4"), "--sinks are seen beside a window: give --window, too"),
        (("--beams", "2", "--window", "8"), "leave --overflow and --window out"),
        (("--beams", "2", "--overflow", "stop"), "leave --overflow and --window out"),
        (("--overflow", "slide", "--window", "90"), "exceed the context of 96: to slide, choose a smaller window"),
    ],
)
def test_bad_values_are_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, options: tuple[str, ...], message: str
) -> None:
    assert_refused(run(capsys, model, *options), message)

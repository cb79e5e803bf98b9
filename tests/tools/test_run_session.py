"""`rockpage run --session`: a conversation that goes on from one run to the next."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hostcache.state_file import StateReader
from npu.engine import Engine
from npu.sampler import SamplingParams
from tests.npu.tiny import TinyLlama, write_tiny_llama

from .command_line import Outcome, assert_refused, run_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("session") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    return tmp_path / "talk.kv"


def opened(model: Path) -> Engine:
    """An engine like the command's."""
    return Engine.load(model, pool_bytes=4 << 20, cache_dir=model.parent / "rockpage")


def run(capsys: pytest.CaptureFixture[str], model: Path, prompt: str, *options: str) -> Outcome:
    usual = ("--pool", "4MiB", "--max-tokens", "6", "--ignore-eos")
    return run_here(capsys, "run", str(model), "--prompt", prompt, *usual, *options)


def answer(capsys: pytest.CaptureFixture[str], model: Path, prompt: str, *options: str) -> dict[str, Any]:
    outcome = run(capsys, model, prompt, "--json", *options)
    assert (outcome.status, outcome.err) == (0, "")
    parsed: dict[str, Any] = json.loads(outcome.out)
    return parsed


def test_a_text_goes_on_where_it_stopped(capsys: pytest.CaptureFixture[str], model: Path, talk: Path) -> None:
    """Three runs give what one run gives that is asked for everything said so far, from KV that lay in the file."""
    first = answer(capsys, model, "in the rain over the hill", "--session", str(talk))
    assert first["session_tokens"] == 0
    second = answer(capsys, model, " and then", "--session", str(talk))
    said = first["prompt_tokens"] + 6
    assert second["session_tokens"] == said - 1  # the last token was never an input
    with StateReader(talk) as reader:
        tokens = reader.tokens.tolist()
    assert tokens[first["prompt_tokens"] : said] == first["ids"]
    assert tokens[-6:] == second["ids"]
    assert len(tokens) == second["prompt_tokens"] + 6
    third = answer(capsys, model, " back", "--session", str(talk))
    assert third["session_tokens"] == len(tokens) - 1
    assert os.listdir(talk.parent) == [talk.name]


def test_a_session_changes_no_answer(capsys: pytest.CaptureFixture[str], model: Path, talk: Path) -> None:
    answer(capsys, model, "in the rain over the hill", "--session", str(talk))
    resumed = answer(capsys, model, " and then", "--session", str(talk))
    with StateReader(talk) as reader:
        tokens = reader.tokens[:-6]
    with opened(model) as engine:
        text = "".join(engine.generate(tokens, SamplingParams(max_tokens=6, ignore_eos=True)))
    assert resumed["text"] == text


def test_a_chat_remembers_what_was_said(capsys: pytest.CaptureFixture[str], model: Path, talk: Path) -> None:
    first = answer(capsys, model, "rain?", "--system", "be kind", "--session", str(talk))
    second = answer(capsys, model, "hill?", "--session", str(talk))  # a chat goes on as one
    with StateReader(talk) as reader:
        messages = json.loads(reader.note)["messages"]
        tokens = reader.tokens.tolist()
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "be kind"),
        ("user", "rain?"),
        ("assistant", first["text"]),
        ("user", "hill?"),
        ("assistant", second["text"]),
    ]
    assert second["session_tokens"] > 0
    assert second["prompt_tokens"] > first["prompt_tokens"] + 6
    assert len(tokens) == second["prompt_tokens"] + 6


def test_without_a_session_nothing_is_written(capsys: pytest.CaptureFixture[str], model: Path, talk: Path) -> None:
    assert answer(capsys, model, "rain")["session_tokens"] == 0
    assert os.listdir(talk.parent) == []


def test_an_end_of_text_is_not_continued_behind(capsys: pytest.CaptureFixture[str], model: Path, talk: Path) -> None:
    with opened(model) as engine:
        end = min(engine.tokenizer.eos_ids)
    options = ("--logit-bias", f"{end}=100", "--session", str(talk))
    first = answer(capsys, model, "rain", *options)
    assert first["ids"] == [end] * 6
    with StateReader(talk) as reader:
        assert len(reader.tokens) == first["prompt_tokens"] + 5


def saved(capsys: pytest.CaptureFixture[str], model: Path, talk: Path, *options: str) -> bytes:
    answer(capsys, model, "rain", "--session", str(talk), *options)
    return talk.read_bytes()


OTHERS: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    ((), ("--chat",), "continues a text: leave --chat and --system out"),
    ((), ("--system", "be kind"), "continues a text"),
    (("--chat",), ("--system", "be kind"), "has begun already: --system is for a new session"),
    ((), ("--activations", "fp32"), "was saved with another model, or other options"),
    ((), ("--runtime", "emulated"), "was saved with another model, or other options"),
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: " ".join((*case[0], "then", *case[1])))
def test_a_session_of_another_kind_is_refused_and_kept(
    capsys: pytest.CaptureFixture[str], model: Path, talk: Path, case: tuple[tuple[str, ...], tuple[str, ...], str]
) -> None:
    before, now, words = case
    content = saved(capsys, model, talk, *before)
    assert_refused(run(capsys, model, "hill", "--session", str(talk), *now), words)
    assert talk.read_bytes() == content
    assert os.listdir(talk.parent) == [talk.name]


def test_a_damaged_session_is_set_aside_and_a_new_one_begins(
    capsys: pytest.CaptureFixture[str], model: Path, talk: Path
) -> None:
    content = saved(capsys, model, talk)
    talk.write_bytes(content[:-1])
    expected = answer(capsys, model, "hill")
    outcome = run(capsys, model, "hill", "--session", str(talk), "--json")
    assert outcome.status == 0
    assert outcome.err.endswith("it was set aside as talk.kv.bad; a new session begins\n")
    anew = json.loads(outcome.out)
    assert (anew["ids"], anew["session_tokens"]) == (expected["ids"], 0)
    assert answer(capsys, model, "rain", "--session", str(talk))["session_tokens"] > 0  # goes on from that
    assert (talk.parent / "talk.kv.bad").read_bytes() == content[:-1]


def test_a_damaged_block_is_one_line_and_a_full_disk_is_too(
    capsys: pytest.CaptureFixture[str], model: Path, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that come from the middle of the pool must let the engine close."""
    content = saved(capsys, model, talk)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        outcome = run(capsys, model, "hill", "--session", str(talk))
    assert outcome.status == 2
    why = "No space left on device; what was there is there still"
    assert outcome.err == f"rockpage: error: the session cannot be saved to {talk}: {why}\n"
    assert talk.read_bytes() == content
    talk.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    outcome = run(capsys, model, "hill", "--session", str(talk))
    assert outcome.status == 0
    assert "block 0 is damaged; it was set aside" in outcome.err


def test_what_is_no_session_is_left_alone(capsys: pytest.CaptureFixture[str], model: Path, talk: Path) -> None:
    talk.write_text("my notes")
    assert_refused(run(capsys, model, "hill", "--session", str(talk)), "does not begin as a state file does")
    assert talk.read_text() == "my notes"
    assert_refused(run(capsys, model, "hill", "--session", str(talk.parent)), "is no regular file")
    nowhere = str(talk.parent / "none" / "talk")
    assert_refused(run(capsys, model, "hill", "--session", nowhere), "there is no folder", "make it")


@pytest.mark.parametrize("note", [b"{}", b"[]", b"not JSON", b'{"messages": [{"role": "user"}]}', b'{"messages": []}'])
def test_a_file_with_another_programs_note_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, talk: Path, note: bytes
) -> None:
    with opened(model) as engine:
        engine.sessions.save(talk, [5, 6, 7], note=note)
    assert_refused(run(capsys, model, "hill", "--session", str(talk)), "was not saved by rockpage run")


def test_a_conversation_that_fills_the_context_is_refused_and_kept(
    capsys: pytest.CaptureFixture[str], model: Path, talk: Path
) -> None:
    content = saved(capsys, model, talk, "--context", "24")
    outcome = run(capsys, model, "over the hill and far away", "--session", str(talk), "--context", "24")
    assert_refused(outcome, "exceed the context of 24")
    assert talk.read_bytes() == content

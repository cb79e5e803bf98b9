"""`rockpage run --answers` and `--beams`: several answers, drawn or searched for."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcache import FinishReason
from npu.beam import BeamParams
from npu.engine import Engine
from npu.sampler import SamplingParams
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tools.answers import Answer, InOrder, answer

from .command_line import Outcome, assert_refused, run_here

PROMPT = "in the rain over the hill"
DRAWN = ("--temperature", "1.5", "--seed", "7", "--ignore-eos", "--max-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("answers") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


def run(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> Outcome:
    return run_here(capsys, "run", str(model), "--prompt", PROMPT, "--pool", "1MiB", *options)


def described(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> dict[str, Any]:
    outcome = run(capsys, model, "--json", *options)
    assert (outcome.status, outcome.err) == (0, "")
    parsed: dict[str, Any] = json.loads(outcome.out)
    return parsed


def opened(model: Path, pool_bytes: int = 1 << 20, swap_bytes: int = 0) -> Engine:
    return Engine.load(
        model, pool_bytes=pool_bytes, cache_dir=model.parent / "rockpage", swap_bytes=swap_bytes, watch_memory=False
    )


def test_each_answer_is_the_one_of_its_seed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    together = described(capsys, model, "--answers", "3", *DRAWN)
    alone = [described(capsys, model, *DRAWN, "--seed", str(seed)) for seed in (7, 8, 9)]
    assert [one["ids"] for one in together["answers"]] == [one["ids"] for one in alone]
    assert [one["text"] for one in together["answers"]] == [one["text"] for one in alone]
    assert [one["finish_reason"] for one in together["answers"]] == ["length"] * 3
    assert len({one["text"] for one in together["answers"]}) == 3
    assert together["output_tokens"] == 24
    assert "text" not in together


def test_answers_are_shown_one_behind_the_other(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    first, second = (one["text"] for one in described(capsys, model, "--answers", "2", *DRAWN)["answers"])
    assert run(capsys, model, "--answers", "2", *DRAWN).out == f"[1] {first}\n\n[2] {second}\n"


class Moments(io.StringIO):
    """What was there at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_the_first_answer_is_shown_while_it_grows(model: Path) -> None:
    shown = Moments()
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=8, ignore_eos=True)
    with opened(model) as engine:
        answered = answer(engine, engine.tokenizer.encode(PROMPT), params, count=2, show=shown)
        assert engine.cache.pool.used == 0
    first = answered.answers[0].text
    growing = [text for text in shown.seen if "[2]" not in text]
    assert len(growing) >= 7  # a step each, but for the last
    assert all(f"[1] {first}".startswith(text) for text in growing)
    assert growing == sorted(growing, key=len)


def test_the_second_answer_is_shown_while_it_and_the_third_grow() -> None:
    first, second, third = answers = [Answer("one"), Answer("tw"), Answer("three")]
    shown = io.StringIO()
    in_order = InOrder(shown, answers)
    in_order.update()
    assert shown.getvalue() == "[1] one"
    first.finish_reason = third.finish_reason = FinishReason.STOP
    in_order.update()
    assert shown.getvalue() == "[1] one\n\n[2] tw"
    second.text += "o"
    in_order.update()
    assert shown.getvalue() == "[1] one\n\n[2] two"
    second.finish_reason = FinishReason.STOP
    in_order.update()
    assert shown.getvalue() == "[1] one\n\n[2] two\n\n[3] three"


def test_answers_that_give_way_to_the_swap_space_are_the_same(model: Path) -> None:
    """A block has 4 KiB; four answers of 100 tokens come to 26 blocks beside the prompt's, and the pool has 12."""
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=100, ignore_eos=True)
    answers = []
    for pool_blocks, swap_blocks in ((100, 0), (12, 40)):
        with opened(model, pool_blocks << 12, swap_blocks << 12) as engine:
            prompt = engine.tokenizer.encode(PROMPT)
            answers.append([one.tokens for one in answer(engine, prompt, params, count=4).answers])
            assert (engine.scheduler.stats.swapped_out > 0) == (swap_blocks > 0)
    assert answers[0] == answers[1]


def test_beams_find_what_the_engine_finds(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = described(capsys, model, "--beams", "3", "--max-tokens", "5")
    with opened(model) as engine:
        expected = engine.beam_search(PROMPT, BeamParams(3, max_tokens=5))
        greedy = engine.score(np.append(engine.tokenizer.encode(PROMPT), expected[0].tokens))
    assert [tuple(one["ids"]) for one in found["answers"]] == [one.tokens for one in expected]
    assert [one["logprob"] for one in found["answers"]] == pytest.approx([one.logprob for one in expected], abs=1e-9)
    count = len(expected[0].tokens)
    assert found["answers"][0]["logprob"] == pytest.approx(float(greedy.logprobs[-count:].sum()), abs=0.05)
    plain = run(capsys, model, "--beams", "3", "--max-tokens", "5")
    assert (plain.status, plain.out) == (0, found["answers"][0]["text"] + "\n")


def test_beams_get_what_the_context_leaves(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    prompt_tokens = described(capsys, model, "--max-tokens", "1")["prompt_tokens"]
    found = described(capsys, model, "--beams", "2", "--context", str(prompt_tokens + 1), "--max-tokens", "500")
    assert [len(one["ids"]) for one in found["answers"]] == [1, 1]


def test_guesses_change_no_answer_and_are_counted(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """A tiny random model soon repeats itself, so that some guesses are right."""
    options = ("--max-tokens", "60", "--ignore-eos")
    plain, guessed = (described(capsys, model, *options, *more) for more in ((), ("--speculate", "4")))
    assert guessed["ids"] == plain["ids"]
    assert guessed["guessed_tokens"] >= guessed["accepted_tokens"] > 0
    assert "guessed_tokens" not in plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--answers", "0"), "--answers is 0; it must be at least 1"),
        (("--answers", "2"), "2 answers would all be the same: give a --temperature above 0, or --beams 2"),
        (("--answers", "2", "--temperature", "1", "--beams", "2"), "leave one out"),
        (("--beams", "2", "--temperature", "1"), "--temperature has no effect on --beams"),
        (("--beams", "2", "--stop", "x"), "--stop has no effect on --beams"),
        (("--beams", "2", "--ignore-eos"), "--ignore-eos has no effect on --beams"),
        (("--beams", "0"), "width must be at least 1, got 0"),
        (("--beams", "9999"), "every beam needs a row"),
        (("--beams", "2", "--session", "talk"), "leave out --answers and --beams, or --session"),
        (
            ("--answers", "2", "--temperature", "1", "--session", "talk"),
            "leave out --answers and --beams, or --session",
        ),
        (("--swap", "lots"), "--swap: "),
        (("--swap", "1KiB"), "a swap space of 1024 bytes does not hold one block of 4096 bytes"),
        (("--swap", "900TiB"), "swap"),
        (("--swap", "1MiB", "--swap-folder", "/nowhere"), "for swapping in /nowhere"),
        (("--swap-folder", "/nowhere"), "nothing is swapped to /nowhere"),
        (("--speculate", "-1"), "prompt lookup proposes at least one token"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, options: tuple[str, ...], words: str
) -> None:
    assert_refused(run(capsys, model, *options), words)

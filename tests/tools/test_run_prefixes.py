"""`rockpage run --keep-prefixes`: what prompts begin with is computed once, over restarts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hostcache.state_file import StateReader
from tests.npu.tiny import TinyLlama, write_tiny_llama

from .command_line import Outcome, assert_refused, run_here

SYSTEM = "be kind, and speak of the rain over the hill, of the inn, and of all who come in the night"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("prefixes") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


def run(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> Outcome:
    usual = ("--pool", "1MiB", "--max-tokens", "6", "--ignore-eos")
    return run_here(capsys, "run", str(model), *usual, *options)


def answer(capsys: pytest.CaptureFixture[str], model: Path, prompt: str, *options: str) -> dict[str, Any]:
    outcome = run(capsys, model, "--json", "--prompt", prompt, *options)
    assert (outcome.status, outcome.err) == (0, "")
    parsed: dict[str, Any] = json.loads(outcome.out)
    return parsed


def test_a_system_message_is_computed_once_and_kept_once(
    capsys: pytest.CaptureFixture[str], model: Path, folder: Path
) -> None:
    """What is kept ends before the question, so that other questions write no other file."""
    options = ("--system", SYSTEM, "--keep-prefixes", str(folder))
    first = answer(capsys, model, "rain?", *options)
    assert first["cached_tokens"] == 0
    (kept,) = folder.iterdir()
    with StateReader(kept) as reader:
        tokens = len(reader.tokens)
    assert tokens % 16 == 0
    assert len(SYSTEM.split()) <= tokens < first["prompt_tokens"]
    written = kept.stat().st_ino
    second = answer(capsys, model, "and the hill", *options)
    assert second["cached_tokens"] == tokens
    assert second["text"] == answer(capsys, model, "and the hill", "--system", SYSTEM)["text"]
    assert [path.stat().st_ino for path in folder.iterdir()] == [written]  # not even written again


def test_a_text_is_kept_whole(capsys: pytest.CaptureFixture[str], model: Path, folder: Path) -> None:
    text = "in the rain over the hill " * 6
    first = answer(capsys, model, text, "--keep-prefixes", str(folder))
    whole = first["prompt_tokens"] // 16 * 16
    assert whole >= 32
    assert answer(capsys, model, text + "to the inn", "--keep-prefixes", str(folder))["cached_tokens"] == whole


def test_another_models_prefixes_are_passed_over(capsys: pytest.CaptureFixture[str], model: Path, folder: Path) -> None:
    text = "in the rain over the hill " * 6
    answer(capsys, model, text, "--keep-prefixes", str(folder))
    exact = answer(capsys, model, text, "--keep-prefixes", str(folder), "--activations", "fp32")
    assert exact["cached_tokens"] == 0
    assert len(os.listdir(folder)) == 2


def test_a_folder_that_cannot_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """Before the model is loaded; `/proc` takes no file from anybody, root included."""
    (tmp_path / "file").write_text("mine")
    for folder, reason in ((tmp_path / "file", "File exists"), (Path("/proc"), "No such file"), ("\0", "null byte")):
        outcome = run(capsys, model, "--prompt", "rain", "--keep-prefixes", str(folder))
        assert outcome.status == 2
        assert outcome.err.startswith("rockpage: error: prefixes cannot be kept in ")
        assert reason in outcome.err
        assert outcome.err.endswith("; name a folder of your own\n")
    assert (tmp_path / "file").read_text() == "mine"
    assert_refused(run(capsys, model, "--prompt", "rain", "--keep-prefixes", ""), "prefixes cannot be kept in")

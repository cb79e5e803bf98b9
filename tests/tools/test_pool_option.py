from __future__ import annotations

import json
from pathlib import Path

import pytest

from hostcache import MemoryBudget
from npu import model_memory
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tools.main import main

MIB = 1 << 20
WORDS = ["--prompt", "in the rain", "--max-tokens", "2", "--ignore-eos"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama()))


def left(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    budget = MemoryBudget("/service", limit=512 * MIB, available=available)
    monkeypatch.setattr(model_memory, "scarcest_budget", lambda: budget)


def test_a_pool_smaller_than_usual_is_explained(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left(monkeypatch, 160 * MIB)  # a thirty-second of 512 MiB is low, and twice that stays free
    assert main(["run", model, *WORDS]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("\n")
    assert shown.err.startswith("rockpage: a pool of ")
    assert ", not 192.0 MiB: cgroup /service has " in shown.err
    assert shown.err.endswith(" MiB, and 32.0 MiB stay free\n")


def test_what_is_as_usual_or_as_asked_needs_no_words(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left(monkeypatch, 160 * MIB)
    assert main(["run", model, *WORDS, "--pool", "1MiB"]) == 0
    left(monkeypatch, 1024 * MIB)
    assert main(["run", model, *WORDS]) == 0
    assert capsys.readouterr().err == ""


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left(monkeypatch, 160 * MIB)
    assert main(["run", model, *WORDS, "--pool", "300MiB"]) == 2
    assert "does not fit into the memory of cgroup /service: " in capsys.readouterr().err


def test_kv_that_gave_up_fp16_is_explained(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """48 KiB hold 192 tokens in fp16: one session of 192, and not two of 150."""
    small = ["run", model, *WORDS, "--pool", "48KiB", "--context"]
    assert main([*small, "200"]) == 0
    assert capsys.readouterr().err == (
        "rockpage: KV in int8, for in fp16 the pool holds 192 tokens, too few for a session of 200 tokens; "
        "--kv names another\n"
    )
    assert main([*small, "150", "--answers", "2", "--temperature", "1"]) == 0
    assert "for 2 sessions of 150 tokens" in capsys.readouterr().err
    for kv, options in (("fp16", ["192"]), ("fp16", ["200", "--kv", "fp16"]), ("int4", ["200", "--kv", "int4"])):
        assert main([*small, *options, "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["kv"] == kv
        assert shown.err == ""

"""`rockpage calibrate` and `--explain-placement`: what is measured, where it is kept, and what is said of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from npu import cost_measure
from npu.cost_model import PUBLISHED
from npu.staged import StagedAttention
from tests.npu.tiny import write_tiny_llama
from tests.tools.command_line import assert_refused, run_here


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its cache lies beside it, and measuring takes little time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_measure, "_SECONDS", 0.01)
    return str(write_tiny_llama(tmp_path / "model.gguf"))


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "rockpage" / "calibration").glob("*"))


def test_what_was_measured_is_kept_and_used(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", model, "--prompt", "a b", "--max-tokens", "2", "--runtime", "emulated", "--explain-placement"]
    before = run_here(capsys, *run, "--placement", "cost")
    assert before.status == 0
    assert f"costs: {PUBLISHED.source}" in before.err.splitlines()
    outcome = run_here(capsys, "calibrate", model, "--runtime", "emulated")
    assert (outcome.status, outcome.err) == (0, "")
    [path] = kept(tmp_path)
    assert outcome.out.splitlines()[-1] == f"kept in              {path}"
    figures = [line[:20].strip() for line in outcome.out.splitlines()[:-1]]
    assert figures == [
        "a launch",
        "gathering",
        "the NPU's reading",
        "its arithmetic",
        "the CPU's reading",
        "its arithmetic",
    ]
    after = run_here(capsys, *run, "--placement", "cost")
    assert after.out == before.out
    [costs] = [line for line in after.err.splitlines() if line.startswith("costs")]
    assert costs.startswith("costs: measured on this machine on 20")


def test_json_has_the_figures_that_the_file_has(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "calibrate", model, "--runtime", "emulated", "--threads", "2", "--json")
    answer = json.loads(outcome.out)
    [path] = kept(tmp_path)
    assert answer.pop("file") == str(path)
    written = json.loads(path.read_bytes())
    assert answer == written["model"]
    # The tiny model has 4 heads of 16, 2 of them KV heads.
    assert {name: written["key"][name] for name in ("threads", "kv_heads", "heads", "head_dim")} == {
        "threads": 2,
        "kv_heads": 2,
        "heads": 4,
        "head_dim": 16,
    }


def test_a_board_is_asked_for_graphs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "calibrate", model), "rockpage export attention MODEL --out DIR")
    assert kept(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert_refused(run_here(capsys, "calibrate", model, "--runtime", "emulated"), str(tmp_path / "cache"))


def test_timings_that_contradict_themselves_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_measure, "_median_seconds", lambda run, layers: 1e-3)
    outcome = run_here(capsys, "calibrate", model, "--runtime", "emulated")
    assert_refused(outcome, "gathering does not take longer for more work", "calibrate again")
    assert kept(tmp_path) == []


def test_the_cpu_needs_one_line_and_the_answer_is_not_mixed_with_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, "run", model, "--prompt", "a b", "--max-tokens", "2", "--explain-placement", "--json")
    assert json.loads(outcome.out)["output_tokens"] == 2
    assert outcome.err == "runtime cpu: all attention ran on the CPU, straight through the block table\n"
    silent = run_here(capsys, "run", model, "--prompt", "a b", "--max-tokens", "2")
    assert silent.err == ""


def test_a_context_beyond_the_buckets_is_said_to_run_on_the_cpu(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 150 characters and more is a token; a bucket of 64 holds 62, and the first chunk has 64."""
    monkeypatch.setattr("npu.runtimes.StagedAttention", partial(StagedAttention, buckets=(64,)))
    arguments = ["run", model, "--prompt", "xyz" * 50, "--max-tokens", "2", "--runtime", "emulated", "--ignore-eos"]
    outcome = run_here(capsys, *arguments, "--explain-placement")
    assert outcome.status == 0
    assert outcome.err.splitlines()[1:] == [
        "     4 x beyond: CPU (longer than 62 tokens)",
        "jobs, one a layer: 0 done, 0 failed, 0 left to the CPU for that",
    ]


def test_what_stays_staged_is_counted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", model, "--prompt", "a b", "--max-tokens", "5", "--ignore-eos", "--explain-placement"]
    outcome = run_here(capsys, *arguments, "--runtime", "emulated", "--resident", "1MiB")
    # Four steps decode a token, each in two layers.
    assert outcome.err.splitlines()[-1] == "staged copies: 6 grew by what was new, 2 were gathered whole"
    refused = run_here(capsys, *arguments, "--resident", "1MiB")
    assert_refused(refused, "the cpu runtime stages nothing")

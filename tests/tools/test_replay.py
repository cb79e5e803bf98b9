"""`rockpage replay` from the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.replay_trace import read_trace

from .command_line import assert_refused, run_here

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "docs/traces"
PAPER = (
    '{"arrival": 0, "prompt_tokens": 5, "output_tokens": 3}\n{"arrival": 0.5, "prompt_tokens": 3, "output_tokens": 2}\n'
)
"""Two requests: `test_replay_run.py` works them out."""

ON_PAPER = ["--cost", "step=1,row=0.1,token=0.01", "--geometry", "layers=1,kv_heads=1,head_dim=64", "--pool", "32KiB"]
"""Eight blocks of 4 KiB."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(PAPER)
    return str(path)


def test_json_has_what_paper_says(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "replay", trace, *ON_PAPER, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    counts = {
        "requests": 2,
        "finished": 2,
        "aborted": 0,
        "failed": 0,
        "refused": 0,
        "leaked_blocks": 0,
        "preemptions": 0,
    }
    assert {name: found[name] for name in counts} == counts
    assert found["steps"] == 3
    assert found["simulated_s"] == pytest.approx(4.35)
    tokens, blocks = 5 * 1.55 + 9 * 1.49 + 11 * 1.31, 1 * 1.55 + 2 * 1.49 + 2 * 1.31  # of 16 tokens
    assert found["utilisation"] == pytest.approx(tokens / (16 * blocks))
    assert found["waste_fraction"] == pytest.approx(1 - tokens / (16 * blocks))
    assert found["trace_utilisation"] == pytest.approx(13 / 32)
    assert found["used_fraction"] == pytest.approx(blocks / (8 * 4.35))
    assert (found["ttft_p50_s"], found["ttft_p95_s"]) == pytest.approx((1.55, 2.54), rel=0.01)
    assert (found["itl_p50_s"], found["itl_p95_s"], found["itl_max_s"]) == pytest.approx((1.31, 1.49, 1.49), rel=0.01)
    assert found["queue_p99_s"] == pytest.approx(1.05)
    assert found["phases"][0]["finished"] == 2
    assert (found["reasons"], found["compared"]) == ({}, {})
    assert (found["kv"], found["pool_blocks"]) == ("fp16", 8)


@pytest.mark.parametrize(("kv", "blocks"), [("int8", 14), ("int4", 28)])
def test_a_leaner_pool_has_more_blocks(trace: str, capsys: pytest.CaptureFixture[str], kv: str, blocks: int) -> None:
    """Of 32 KiB: extents of int8 have two blocks of 2112 bytes, a scale of 2 for 64 elements; of int4, four of 1152,
    a scale for 32. Seven of 4224 or of 4608 fit."""
    found = json.loads(run_here(capsys, "replay", trace, *ON_PAPER, "--kv", kv, "--json").out)
    assert (found["kv"], found["pool_blocks"], found["finished"]) == (kv, blocks, 2)
    assert found["simulated_s"] == pytest.approx(4.35)


def test_stdin_is_a_trace_too(trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = run_here(capsys, "replay", trace, *ON_PAPER)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(PAPER.encode()), fileno=lambda: 0))
    assert run_here(capsys, "replay", "-", *ON_PAPER) == from_file


def test_text_puts_the_runs_side_by_side(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unchunked differs in nothing here: both prompts are shorter than a chunk."""
    lines = run_here(capsys, "replay", trace, *ON_PAPER, "--context", "64", "--compare").out.splitlines()
    assert lines[0] == "2 requests in 4.35 s, 3 steps"
    table = {line[:34].strip(): line[34:].split() for line in lines[2:]}
    assert table[""] == ["paged", "contiguous", "unchunked"]
    assert table["finished"] == ["2", "2", "2"]
    assert table["time to first token, p95"] == ["2.54", "s"] * 3
    # 35.57 tokens times seconds, in 1, 2 and 2 blocks of 16 or as many contexts of 64.
    assert table["tokens over room in their blocks"][::2] == ["31.1", "7.8", "31.1"]
    assert max(map(len, lines)) < 80


def test_a_load_after_another_shows_as_phases(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_here(capsys, "replay", "--trace", "industrial", "--days", "0.002", "--load", "0.3,0.9").out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("phase"))
    first, second = (line.split() for line in lines[head + 1 : head + 3])
    assert (first[0], second[0]) == ("1", "2")
    assert int(first[1]) + int(second[1]) == int(lines[0].split()[0])
    assert int(second[1]) > 2 * int(first[1])
    assert first[1] == first[2]  # all of them finished
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize(("name", "days"), [("industrial", "0.0014"), ("mixed", "0.02")])
def test_the_shipped_traces_are_what_the_generator_makes(
    name: str, days: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.jsonl"
    outcome = run_here(capsys, "replay", "--trace", name, "--days", days, "--save", str(made), "--json")
    assert made.read_text() == (TRACES / f"{name}.jsonl").read_text()
    with (TRACES / f"{name}.jsonl").open("rb") as stream:
        assert len(list(read_trace(stream, name))) == json.loads(outcome.out)["requests"] >= 130
    context = {"industrial": "512", "mixed": "2560"}[name]
    from_file = run_here(capsys, "replay", str(made), "--context", context, "--json")
    assert json.loads(from_file.out) == json.loads(outcome.out)


def test_another_seed_is_another_trace(capsys: pytest.CaptureFixture[str]) -> None:
    made = ["replay", "--trace", "industrial", "--days", "0.0005", "--json"]
    first, again, other = (run_here(capsys, *made, "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_a_terminal_shows_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    run_here(capsys, "replay", "--trace", "mixed", "--days", "0.02")
    assert "replaying [..............................] 0.00 days of 0.02 days" in terminal.getvalue()


def test_a_chart_is_a_picture(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = []
    for more in ([], ["--compare", "--context", "64"]):
        path = tmp_path / "chart.png"
        assert run_here(capsys, "replay", trace, *ON_PAPER, "--chart", str(path), *more).status == 0
        pictures.append(path.read_bytes())
    assert all(picture.startswith(b"\x89PNG\r\n") for picture in pictures)
    assert pictures[0] != pictures[1]


def test_a_chart_without_matplotlib_is_refused_before_the_replay(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run_here(capsys, "replay", trace, "--chart", str(tmp_path / "chart.png"))
    assert_refused(outcome, "a chart needs matplotlib: pip install 'rockpage[chart]'")


BAD: dict[str, tuple[str, ...]] = {
    "": ("replay takes either a FILE or --trace NAME",),
    "trace.jsonl --trace mixed": ("replay takes either a FILE or --trace NAME",),
    "trace.jsonl --days 2": ("--days goes with --trace",),
    "trace.jsonl --load 2": ("--load goes with --trace",),
    "trace.jsonl --seed 2": ("--seed goes with --trace",),
    "trace.jsonl --save x": ("--save goes with --trace",),
    "- --compare": ("stdin can be read once",),
    "no-such.jsonl": ("no-such.jsonl: No such file or directory",),
    ".": (".: Is a directory",),
    "bad.jsonl": ("bad.jsonl, line 2: it is not JSON",),
    "--trace office": ("--trace", "'office'", "industrial"),
    "--trace mixed --days 0": ("--days", "'0' is not a number above 0 and up to 3660"),
    "--trace mixed --days nan": ("--days", "'nan' is not a number"),
    "--trace mixed --load 0.7,-1": ("--load", "'-1' is not a number above 0 and up to 1000"),
    "--trace mixed --load 1,": ("--load", "'' is not a number"),
    "--trace mixed --seed x": ("--seed", "'x'"),
    "trace.jsonl --cost step=1": ("--cost", "must give step, row and token, in seconds, each once"),
    "trace.jsonl --cost step=1,row=x,token=0": ("--cost", "must give seconds, such as step=0.08"),
    "trace.jsonl --cost step=0,row=0,token=1": ("a step that costs nothing moves no clock",),
    "trace.jsonl --cost step=-1,row=0,token=1": ("the cost step is -1.0; it must be seconds, 0 or more",),
    "trace.jsonl --cost step=inf,row=0,token=1": ("the cost step is inf",),
    "trace.jsonl --pool 1KiB": ("a pool of 1024 bytes does not hold one block of 1835008 bytes",),
    "trace.jsonl --kv int3": ("--kv", "'int3'"),
    "trace.jsonl --max-sequences 0": ("--max-sequences", "'0' is not a positive integer"),
    "trace.jsonl --step-ms 1.5": ("--step-ms", "'1.5' is not a positive integer"),
    "trace.jsonl --context 4096 --pool 2MiB --compare": ("a contiguous session of 4096 tokens takes 256 blocks",),
    "--trace mixed --days 99 --chart no-such/x.png": ("no chart can be written to no-such/x.png: name a file",),
    "--trace mixed --days 99 --chart .": ("no chart can be written to .: name a file",),
    "trace.jsonl --unknown": ("unrecognized arguments: --unknown",),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.items(), ids=BAD)
def test_what_cannot_be_used_is_refused(
    arguments: str,
    words: tuple[str, ...],
    trace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(trace).parent
    monkeypatch.chdir(folder)
    (folder / "bad.jsonl").write_text(PAPER.splitlines()[0] + "\n{nonsense}\n")
    assert_refused(run_here(capsys, "replay", *arguments.split()), *words)


def test_a_closed_stdin_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(run_here(capsys, "replay", "-"), "stdin is closed: give the trace as a file")

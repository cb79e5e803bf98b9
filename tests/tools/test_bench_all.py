"""`rockpage bench --all`: every kind is measured by its defaults, and what cannot be measured is named."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from hostcache.errors import MissingExtra
from tools import bench
from tools.bench_kind import Kind, Measured
from tools.bench_rows import Point, Row, Timing
from tools.command import Parser

from .command_line import assert_refused, run_here

ROW = Row("work", "peer", Timing(2, 2), Timing(1, 1), 3.0, point=Point("context", 128, "fp16"))


def add_options(parser: Parser) -> None:
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--peer", type=Path)


def measure(args: Namespace) -> Measured:
    return Measured([ROW], [f"{args.times} times, beside {args.peer}"])


def measure_nothing(_: Namespace) -> Measured:
    raise MissingExtra("torch is not installed: pip install 'rockpage[bench]'", extra="bench")


KINDS = (Kind("first", "one thing", add_options, measure), Kind("second", "another", add_options, measure_nothing))


@pytest.fixture(autouse=True)
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "KINDS", KINDS)


def test_every_kind_is_measured_and_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "bench.md"
    outcome = run_here(capsys, "bench", "--all", "--report", str(out), "--peer", "checkout")
    assert outcome.status == 0
    assert "5 times, beside checkout" in outcome.out
    text = out.read_text()
    assert "| first | work | peer | 2 | <= 3 |  | met |" in text
    assert "- 5 times, beside checkout" in text
    assert "## second\n\n- not measured: torch is not installed: pip install 'rockpage[bench]'" in text


def test_a_target_that_one_kind_misses_is_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Row("work", "peer", Timing(4, 4), Timing(1, 1), 3.0)
    monkeypatch.setattr(bench, "KINDS", (*KINDS, Kind("third", "", add_options, lambda _: Measured([slow]))))
    outcome = run_here(capsys, "bench", "--all", "--json")
    assert outcome.status == 1
    answer = json.loads(outcome.out)
    assert [row["ratio"] for row in answer["kinds"]["third"]] == [4.0]
    assert answer["kinds"]["second"] == []
    assert answer["notes"]["first"] == ["5 times, beside None"]


def test_a_kind_or_all_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "bench"), "name one of first, second, or write --all")
    assert_refused(run_here(capsys, "bench", "--all", "first"), "name one of first, second, or write --all")


@pytest.mark.parametrize("option", ["--report", "--peer", "--model"])
def test_what_all_take_is_not_lost_on_one(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert_refused(run_here(capsys, "bench", option, "x", "first"), f"{option} belongs behind first, or to --all")


def test_what_grows_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chart = tmp_path / "growth.png"
    monkeypatch.setattr(bench, "KINDS", (Kind("first", "one thing", add_options, measure, grows=True),))
    assert run_here(capsys, "bench", "first", "--chart", str(chart)).status == 0
    assert chart.read_bytes().startswith(b"\x89PNG")

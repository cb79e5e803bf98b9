"""`rockpage bench`: both sides do the work, the ratio is theirs, and a peer that is missing is named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import bench_cache, bench_schedule
from tools.bench_peer import NO_PEER, NO_VLLM, NanoVllm
from tools.bench_rows import WARM_UP, Case, Row, Timing, Work, compare
from tools.bench_schedule import own_step, peer_step

from .command_line import assert_refused, run_here
from .fake_peer import check_out

QUICK = ("--rounds", "2", "--times", "3")


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    yield check_out(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
        del sys.modules[name]


def timed(*seconds: float, made: list[int] | None = None) -> Any:
    """Makes work that takes so long in each round, by place: behind the warm-up, which takes an hour."""

    def make(times: int) -> Work:
        if made is not None:
            made.append(times)
        return iter([3600.0] * WARM_UP + [next(remaining) for _ in range(times - WARM_UP)]).__next__

    remaining = iter(seconds)
    return make


def test_a_time_is_compared_with_those_in_its_place() -> None:
    """Of 1, 9 | 3, 5 | 2, 7 the least in each place are 1 and 5, the medians 2 and 7."""
    made: list[int] = []
    case = Case("work", timed(1, 9, 3, 5, 2, 7, made=made), timed(*[10.0, 30.0] * 3), target=0.2)
    row = compare(case, "peer", rounds=3, times=2)
    assert made == [WARM_UP + 2] * 3  # each round begins anew
    assert row == Row("work", "peer", Timing(3.0, 4.5), Timing(20.0, 20.0), 0.2)
    assert row.ratio == 0.15
    assert not row.misses_target


def test_without_a_peer_there_is_no_ratio() -> None:
    row = compare(Case("work", timed(1.0, 1.0), None, target=0.2), "peer", rounds=1, times=2)
    assert (row.theirs, row.ratio, row.misses_target) == (None, None, False)


def test_every_sequence_gets_a_token_in_every_step() -> None:
    step = own_step(5, 4, 64, 40)
    seconds = [step() for _ in range(41)]
    assert all(second > 0 for second in seconds)
    with pytest.raises(ValueError, match="0 tokens expected, got 5"):  # all have ended: the plan is empty
        step()


def test_a_peer_plans_the_same_steps(checkout: Path) -> None:
    step = peer_step(NanoVllm.load(checkout), 3, 4, 64, 10)
    assert all(step() > 0 for _ in range(11))
    with pytest.raises(AssertionError):  # all have had their tokens
        step()


@pytest.mark.parametrize("kind", ["cache", "schedule"])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_every_case_is_measured_beside_the_peer(
    capsys: pytest.CaptureFixture[str], checkout: Path, kind: str, block_tokens: int
) -> None:
    size = ("--block-tokens", str(block_tokens), *(("--context", "64") if kind == "schedule" else ()))
    outcome = run_here(capsys, "bench", kind, "--peer", str(checkout), *size, *QUICK, "--json")
    answer = json.loads(outcome.out)
    assert answer["note"] == NO_VLLM
    cases = {"cache": bench_cache.cases(None, block_tokens), "schedule": bench_schedule.cases(None, block_tokens, 64)}
    expected = [(case.name, case.target) for case in cases[kind]]
    assert [(row["case"], row["target"]) for row in answer["rows"]] == expected
    for row in answer["rows"]:
        assert (row["peer"], row["better"]) == ("nano-vllm", "lower")
        assert 0 < row["ours_s"] <= row["ours_median_s"]
        assert 0 < row["peer_s"] <= row["peer_median_s"]
        assert row["ratio"] == row["ours_s"] / row["peer_s"]
    missed = [row["case"] for row in answer["rows"] if row["target"] is not None and row["ratio"] > row["target"]]
    assert outcome.status == bool(missed)


def test_the_targets_are_those_of_a_step_of_many_a_lookup_and_an_append() -> None:
    cases = [*bench_cache.cases(None, 16), *bench_schedule.cases(None, 16, 512)]
    assert {case.name: case.target for case in cases if case.target is not None} == {
        "look up 512 tokens": 0.05,
        "look up 512 tokens, take, give back": 0.05,
        "append a token, step of 128": 0.3,
        "append a token, one table": 0.3,
        "a step of 128, 512 tokens each": 0.3,
    }


@pytest.mark.parametrize("kind", ["cache", "schedule"])
def test_a_peer_that_is_not_given_is_named(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert NO_PEER.startswith("peer not given: pass --peer DIR")
    outcome = run_here(capsys, "bench", kind, *QUICK)
    assert outcome.status == 0
    _, *lines, note, vllm = outcome.out.splitlines()
    assert (note, vllm) == (NO_PEER, NO_VLLM)
    for line in lines:
        assert re.fullmatch(r"\S.*\S +[\d.]+ [mun]s +\([\d.]+ [mun]s\) +nano-vllm +missing( +<= 0\.\d+)?", line)
    rows = json.loads(run_here(capsys, "bench", kind, *QUICK, "--json").out)
    assert rows["note"] == f"{NO_PEER}; {NO_VLLM}"
    assert [(row["peer_s"], row["peer_median_s"], row["ratio"]) for row in rows["rows"]] == [(None,) * 3] * len(lines)


def test_a_folder_that_is_no_checkout_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    outcome = run_here(capsys, "bench", "cache", "--peer", str(tmp_path))
    assert_refused(outcome, f"--peer {tmp_path} is no checkout of nano-vllm", "it has no nanovllm.engine")


def test_a_hash_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkout / "nanovllm" / "engine" / "block_manager.py"
    manager.write_text("import xxhash\n" + manager.read_text())
    monkeypatch.setitem(sys.modules, "xxhash", None)
    outcome = run_here(capsys, "bench", "cache", "--peer", str(checkout))
    assert_refused(outcome, "the peer needs the package xxhash", "pip install xxhash")


@pytest.mark.parametrize("option", ["--block-tokens", "--rounds", "--times", "--context"])
def test_numbers_are_positive(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert_refused(run_here(capsys, "bench", "schedule", option, "0"), f"{option} must be 1 or more, got 0")


def test_latency_is_measured_by_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "bench", "latency", "--clock", "cpu", "--threads", "2")
    assert_refused(outcome, "--clock cpu adds up all threads' time: it takes --threads 1, not 2")


@pytest.mark.parametrize("block_tokens", [24, 1024])
def test_a_prefix_that_is_not_found_is_no_lookup(capsys: pytest.CaptureFixture[str], block_tokens: int) -> None:
    outcome = run_here(capsys, "bench", "cache", "--block-tokens", str(block_tokens), *QUICK)
    found = 512 // block_tokens * block_tokens
    assert_refused(outcome, f"{found} of 512 tokens were found", "the block size must divide 512")


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_lookup_takes_nothing_that_it_does_not_give_back(checkout: Path, side: str) -> None:
    """What was taken would be missed after a few thousand lookups, each of which takes a block of 4096."""
    peer = NanoVllm.load(checkout)
    (case,) = (case for case in bench_cache.cases(peer, 64) if case.name.endswith("take, give back"))
    make = getattr(case, side)
    work = make(500)
    for _ in range(500):
        work()


def test_publishing_finds_no_block_that_is_known_already(checkout: Path) -> None:
    """What is known already would be adopted, which is less work."""
    home = bench_cache.Published(16)
    numbers = []
    for _ in range(2):
        home.cache.invalidate()
        home.publish()
        hit = home.cache.match(bench_cache.HOME, home.prompt)
        numbers.append(hit.node.number)
        assert len(hit.blocks) == 32
    assert numbers[0] != numbers[1]

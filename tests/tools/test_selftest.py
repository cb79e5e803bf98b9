"""`rockpage selftest`: its text, its JSON, its exit status; what it proves is in `npu/test_selftest.py`."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest

from npu.emulated_device import EmulatedDevice, Faults
from npu.process_facts import ProcessFacts
from tests.npu.beds import BEDS
from tests.npu.doctor_cases import PROCESS
from tests.npu.test_selftest import EMULATED_NAMES
from tests.npu.tiny import write_tiny_llama
from tests.tools.command_line import assert_refused, run_here


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a PC; the weights' cache lies beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = BEDS["pc"].write(tmp_path / "machine")
    monkeypatch.setattr("npu.selftest.Machine", lambda: machine)
    monkeypatch.setattr(ProcessFacts, "here", lambda: PROCESS)
    return str(write_tiny_llama(tmp_path / "tiny.gguf"))


def test_the_emulated_npu_passes_and_the_report_is_kept(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    outcome = run_here(capsys, "selftest", model, "--out", str(report), "--threads", "1")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[-1] == "proved on the emulated NPU"
    assert max(map(len, lines)) <= 100
    kept = json.loads(report.read_text())
    assert (kept["verdict"], kept["exit_status"], kept["emulated"]) == ("proved", 0, True)
    heads = [line.removeprefix("proved   ").removeprefix("not run  ").partition(":")[0] for line in lines]
    assert (
        [head for head in heads if head in EMULATED_NAMES] == [step["name"] for step in kept["steps"]] == EMULATED_NAMES
    )
    # A PC has no heaps, and the emulated NPU needs no graphs; all else is tried on it, injected faults included.
    assert [step["name"] for step in kept["steps"] if step["status"] != "proved"] == ["heaps", "graphs"]


def test_json_is_all_that_is_printed_with_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(run_here(capsys, "selftest", model, "--json").out)
    assert list(answer) == ["verdict", "exit_status", "emulated", "chip", "versions", "steps"]
    for step in answer["steps"]:
        assert list(step) == ["name", "status", "found", "details", "figures"]
    assert set(answer["versions"]) >= {"python", "kernel", "driver", "librknnrt", "rockpage", "rknn-toolkit-lite2"}
    assert answer["chip"] == {"model": None, "soc": None, "cores": None}


def test_no_name_is_in_a_report(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_here(capsys, "selftest", model, "--json").out
    assert str(tmp_path) not in text
    assert f'"{os.uname().nodename}"' not in text
    assert "bearing" not in text  # of the prompt


def test_a_device_that_fails_is_status_1(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = partial(EmulatedDevice, faults=Faults(dead_cores=(1,)))
    monkeypatch.setattr("npu.selftest_ways.EmulatedDevice", broken)
    outcome = run_here(capsys, "selftest", model)
    lines = outcome.out.splitlines()
    assert (outcome.status, outcome.err) == (1, "")
    assert lines[-1] == "failed on the emulated NPU"
    said = re.search(r"^failed   launches: (\d+) of (\d+) launch shapes on 3 cores failed", outcome.out, re.MULTILINE)
    assert said
    assert said[1] == said[2]  # each shape has a launch on each core
    assert sum("FAILED  core 1: run" in line for line in lines) == int(said[1])


def test_what_cannot_be_begun_is_one_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "report.json"
    assert_refused(
        run_here(capsys, "selftest", model, "--board", "--out", str(kept)), "no NPU to test", "without --board"
    )
    assert not kept.exists()
    assert_refused(run_here(capsys, "selftest", model, "--graphs", str(tmp_path)), "add --board")
    assert_refused(run_here(capsys, "selftest", model, "--out", str(tmp_path / "no" / "such")), "is no folder")
    assert_refused(run_here(capsys, "selftest", "no-such.gguf"), "no-such.gguf")

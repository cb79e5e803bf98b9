"""`rockpage doctor`: its JSON, its text and its exit status, on machines made of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from npu.process_facts import ProcessFacts
from tests.npu.beds import BEDS
from tests.npu.doctor_cases import HEALTHY, PROCESS
from tests.npu.fake_machine import Bed
from tests.tools.command_line import Outcome, assert_refused, run_apart, run_here

REFERENCE = ("--geometry", "layers=24,kv_heads=2,head_dim=128", "--weights")


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Runs the command on a bed."""

    def run(bed: Bed, *arguments: str) -> Outcome:
        machine = bed.write(tmp_path)
        monkeypatch.setattr("npu.doctor.Machine", lambda: machine)
        monkeypatch.setattr(ProcessFacts, "here", lambda: PROCESS)
        return run_here(capsys, "doctor", *arguments)

    return run


def test_json_has_every_check_with_five_fields(doctor: object) -> None:
    assert callable(doctor)
    outcome = doctor(HEALTHY, "--json")
    answer = json.loads(outcome.out)
    assert outcome.status == answer["exit_status"] == 0
    assert answer["verdict"] == "healthy"
    assert answer["board"] == {
        "model": "Radxa ROCK 5B",
        "soc": "RK3588",
        "container": None,
        "npu": {
            "name": "fdab0000.npu",
            "driver": "rknpu",
            "version": "0.9.8",
            "cores": 3,
            "nodes": [
                "/dev/dri/by-path/platform-fdab0000.npu-render",
                "/dev/dri/by-path/platform-fdab0000.npu-card",
            ],
        },
    }
    assert len(answer["checks"]) == 28
    for check in answer["checks"]:
        assert list(check) == ["name", "status", "found", "why", "fix"]


def test_text_puts_the_worst_first_and_says_what_to_do(doctor: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(doctor)
    monkeypatch.setenv("COLUMNS", "80")
    outcome = doctor(BEDS["closed"])
    lines = outcome.out.splitlines()
    assert outcome.status == 2
    assert lines[-1] == "unusable"
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("fail     npu_node: not open to ada: /dev/dri/renderD129")
    heads = [line.split()[0] for line in lines[:-2] if not line.startswith(" ")]
    assert heads == sorted(heads, key=["fail", "warn", "unknown", "info", "ok"].index)
    fixes = [line for line in lines if line.startswith("         fix: ")]
    assert len(fixes) >= heads.count("fail")


def test_a_pc_is_degraded(doctor: object) -> None:
    assert callable(doctor)
    outcome = doctor(BEDS["pc"], "--json")
    answer = json.loads(outcome.out)
    assert (outcome.status, answer["verdict"], answer["board"]["npu"], answer["board"]["soc"]) == (
        1,
        "degraded",
        None,
        None,
    )


@pytest.mark.parametrize(("weights", "status"), [("1GiB", 0), ("2900MiB", 2)])
def test_what_is_to_run_is_held_against_the_memory_there_is(doctor: object, weights: str, status: int) -> None:
    """2929.7 MiB are available; pool, staging and libraries take some 400 MiB beside the weights."""
    assert callable(doctor)
    outcome = doctor(HEALTHY, "--json", *REFERENCE, weights)
    memory = next(check for check in json.loads(outcome.out)["checks"] if check["name"] == "memory")
    assert outcome.status == status
    assert memory["status"] == ("fail" if status else "ok")
    assert memory["found"].startswith("2929.7 MiB available of 3906.2 MiB, ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such.gguf"], ["no-such.gguf"]),
        (["--geometry", "layers=1,kv_heads=1,head_dim=1"], ["--geometry together with --weights"]),
        (["--graphs", "no-such-folder"], ["no-such-folder"]),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    assert_refused(run_here(capsys, "doctor", *arguments), *words)


def test_this_machine_is_looked_at_without_a_model() -> None:
    """In a process of its own, with a home that cannot be written: nothing is fetched."""
    outcome = run_apart("doctor", "--json", environment={"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull})
    answer = json.loads(outcome.out)
    assert outcome.err == ""
    assert outcome.status == answer["exit_status"]
    assert answer["checks"][0]["name"] == "board"

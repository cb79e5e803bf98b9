"""The doctor as a whole: verdicts, which checks apply where, and that it changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npu.doctor import ANYWHERE, FOR_ITS_NPU, ON_A_BOARD, Diagnosis, diagnose, examine
from npu.doctor_check import AS_ROOT, Check
from tests.npu.beds import BEDS
from tests.npu.doctor_cases import HEALTHY, case

ROOT = Path(__file__).parents[2]
ALL = len(ANYWHERE) + len(ON_A_BOARD) + len(FOR_ITS_NPU)


def statuses(diagnosis: Diagnosis) -> dict[str, str]:
    return {check.name: check.status for check in diagnosis.checks}


def test_a_healthy_board_is_healthy(tmp_path: Path) -> None:
    diagnosis = examine(case(tmp_path))
    wrong = {name: status for name, status in statuses(diagnosis).items() if status not in ("ok", "info")}
    assert wrong == {}
    assert (diagnosis.verdict, diagnosis.exit_status) == ("healthy", 0)
    assert len(diagnosis.checks) == len(statuses(diagnosis)) == ALL


def test_each_check_is_named_after_its_function(tmp_path: Path) -> None:
    """So that a name in a report leads to the code."""
    diagnosis = examine(case(tmp_path))
    assert [check.name for check in diagnosis.checks] == [f.__name__ for f in ANYWHERE + ON_A_BOARD + FOR_ITS_NPU]


def test_every_answer_says_what_was_found_and_why_it_matters(tmp_path: Path) -> None:
    for index, bed in enumerate(BEDS.values()):
        folder = tmp_path / str(index)
        folder.mkdir()
        for check in examine(case(folder, bed)).checks:
            assert check.found
            assert check.why
            assert check.fix or check.status != "fail"
            assert (check.found + check.why + check.fix).isprintable()


@pytest.mark.parametrize(
    ("bed", "count", "verdict"),
    [
        ("pc", len(ANYWHERE), "degraded"),
        ("nothing", len(ANYWHERE), "degraded"),
        ("rk3576", len(ANYWHERE) + len(ON_A_BOARD), "degraded"),
        ("rocket", ALL, "unusable"),
        ("disabled", ALL, "unusable"),
        ("unbound", ALL, "unusable"),
        ("closed", ALL, "unusable"),
    ],
)
def test_only_what_applies_is_checked(tmp_path: Path, bed: str, count: int, verdict: str) -> None:
    """Without an NPU that it has graphs for, rockpage runs: that is less than it could do, and nothing to mend."""
    diagnosis = examine(case(tmp_path, BEDS[bed]))
    assert len(diagnosis.checks) == count
    assert diagnosis.verdict == verdict
    assert diagnosis.exit_status == {"degraded": 1, "unusable": 2}[verdict]


@pytest.mark.parametrize(
    ("statuses", "verdict", "exit_status"),
    [
        (["ok", "info", "unknown"], "healthy", 0),
        (["ok", "warn", "info"], "degraded", 1),
        (["warn", "fail", "ok"], "unusable", 2),
        ([], "healthy", 0),
    ],
)
def test_the_worst_answer_decides(tmp_path: Path, statuses: list[str], verdict: str, exit_status: int) -> None:
    checks = tuple(Check("x", status, "found", "why") for status in statuses)  # type: ignore[arg-type] # from a table
    diagnosis = Diagnosis(case(tmp_path).board, checks)
    assert (diagnosis.verdict, diagnosis.exit_status) == (verdict, exit_status)


def test_this_machine_can_be_asked() -> None:
    diagnosis = diagnose()
    assert {check.name for check in diagnosis.checks} >= {f.__name__ for f in ANYWHERE}


def test_the_toolkit_s_version_is_that_which_rockpage_compiles_by(tmp_path: Path) -> None:
    machine = HEALTHY.write(tmp_path)
    check = next(check for check in diagnose(machine=machine).checks if check.name == "runtime_versions")
    assert "graphs 2.5.0" in check.found


@pytest.mark.parametrize("bed", ["healthy", "pc"])
def test_nothing_is_written_and_nothing_woken(tmp_path: Path, bed: str) -> None:
    """Files that must not be opened are there: the process that would open one ends with an error."""
    machine = (
        (HEALTHY if bed == "healthy" else BEDS[bed])
        .with_files(sys__kernel__debug__rknpu__freq=b"1000000000\n", sys__kernel__debug__rknpu__volt=b"800000\n")
        .write(tmp_path)
    )
    script = (
        "import sys, pathlib\n"
        "import npu.doctor as doctor\n"
        "from npu.machine import Machine\n"
        "from tests.npu.read_only import forbid_changes\n"
        "forbid_changes()\n"
        f"doctor.diagnose(machine=Machine(pathlib.Path({str(machine.root)!r})))\n"
        "print(len(doctor.diagnose().checks))\n"  # this machine too, through udev where there is one
        "try: open('changed', 'w')\n"
        "except PermissionError: print('watched')\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[1] == "watched"
    assert not (ROOT / "changed").exists()


def test_what_only_root_may_read_is_unknown_and_no_fault(tmp_path: Path) -> None:
    no_version = {"/sys/module/rknpu/version": None}
    diagnosis = examine(case(tmp_path, files=no_version, closed=("/sys/kernel/debug", "/dev/kmsg")))
    unknown = {check.name: check.fix for check in diagnosis.checks if check.status == "unknown"}
    assert unknown == dict.fromkeys(("driver_version", "sram", "npu_load", "kernel_log"), AS_ROOT)
    assert diagnosis.verdict == "healthy"

"""Discovery through the real udev library, on beds that umockdev serves: `make test-udev`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from npu.discovery import discover
from tests.npu.beds import BEDS

pytestmark = pytest.mark.umockdev

ROOT = Path(__file__).parents[2]


def probe(folder: Path, bed: str, *wishes: str) -> subprocess.CompletedProcess[str]:
    """Run the probe in a bed; the caller checks its status."""
    description = folder / "bed.umockdev"
    description.write_text(BEDS[bed].umockdev())
    command = ["umockdev-run", "-d", str(description), "--"]
    return subprocess.run(
        [*command, sys.executable, "-B", "-m", "tests.board.udev_probe", bed, *wishes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def through_udev(folder: Path, bed: str, *wishes: str) -> dict[str, Any]:
    """The board that discovery found, as JSON has it."""
    done = probe(folder, bed, *wishes)
    assert done.returncode == 0, done.stderr
    board: dict[str, Any] = json.loads(done.stdout)
    assert board["source"] == "udev"
    return board


def comparable(board: dict[str, Any]) -> dict[str, Any]:
    """Without what says where it was read from, where the test itself runs, and modes, which umockdev does not keep."""
    nodes = [*((board["npu"] or {}).get("nodes", [])), *(heap["node"] for heap in board["heaps"])]
    for node in (*nodes, board["rknpu"]):
        for name in ("mode", "owner", "group"):
            node.pop(name)
    return {name: value for name, value in board.items() if name not in ("source", "container")}


@pytest.mark.parametrize("bed", BEDS)
def test_udev_and_sysfs_tell_the_same(tmp_path: Path, bed: str) -> None:
    """What the fake trees tell is held against values thought out by hand, in tests/npu/test_discovery.py."""
    (tmp_path / "tree").mkdir()
    tree = json.loads(json.dumps(asdict(discover(BEDS[bed].write(tmp_path / "tree")))))
    assert comparable(through_udev(tmp_path, bed)) == comparable(tree)


def test_the_npu_is_found_among_decoys(tmp_path: Path) -> None:
    board = through_udev(tmp_path, "vendor")
    assert board["npu"]["name"] == "fdab0000.npu"
    assert board["npu"]["driver"] == "rknpu"
    assert board["npu"]["cores"] == 3
    assert [(node["path"], node["number"], node["usable"]) for node in board["npu"]["nodes"]] == [
        ("/dev/dri/renderD129", [226, 129], True),
        ("/dev/dri/card1", [226, 1], True),
    ]
    assert board["npu"]["nodes"][0]["links"] == ["/dev/dri/by-path/platform-fdab0000.npu-render"]


def test_a_user_without_rights_is_told_so(tmp_path: Path) -> None:
    board = through_udev(tmp_path, "closed")
    assert [(node["kind"], node["usable"]) for node in board["npu"]["nodes"]] == [("device", False)] * 2
    assert [heap["node"]["usable"] for heap in board["heaps"]] == [False] * 3


@pytest.mark.parametrize("access", [1, 2, 12, 25])
def test_an_npu_that_is_unplugged_meanwhile_is_no_error(tmp_path: Path, access: int) -> None:
    """It leaves dangling links; what udev had listed before has no properties any more."""
    board = through_udev(tmp_path, "vendor", str(access))
    assert board["npu"] is None or board["npu"]["name"] == "fdab0000.npu"
    assert board["soc"]["name"] == "RK3588"
    assert board["ddr_clock"]["highest"] == 2_112_000_000


def test_the_doctor_sees_what_udev_sees(tmp_path: Path) -> None:
    done = probe(tmp_path, "closed", "doctor")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"], done.stderr) == (2, "unusable", "")
    checks = {check["name"]: check for check in answer["checks"]}
    assert checks["udev"]["status"] == "ok"
    assert checks["npu_driver"]["status"] == "ok"
    assert checks["npu_node"]["status"] == "fail"
    assert "/dev/dri/renderD129" in checks["npu_node"]["found"]
    assert checks["ddr_clock"]["found"] == "dmc 528 MHz, governor dmc_ondemand"

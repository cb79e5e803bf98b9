"""What the doctor says about the way to the NPU: drivers, nodes, groups, containers, and `/dev/rknpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from npu.device_node import DeviceNode
from npu.discovery import discover
from npu.doctor import examine
from npu.doctor_check import Check
from npu.process_facts import ProcessFacts
from tests.npu.beds import BEDS
from tests.npu.doctor_cases import HEALTHY, PROCESS, answer, case
from tests.npu.fake_machine import Bed, FakeNode


def test_rocket_is_named(tmp_path: Path) -> None:
    check = answer("npu_driver", tmp_path, BEDS["rocket"])
    assert check.status == "fail"
    assert check.found == "mainline's driver rocket runs fdab0000.npu, 3 cores"
    assert "vendor kernel" in check.fix


def test_a_device_tree_that_switches_the_npu_off_is_named(tmp_path: Path) -> None:
    check = answer("npu_driver", tmp_path, BEDS["disabled"])
    assert check.found == "the device tree switches off npu@fdab0000, npu@fdac0000, npu@fdad0000"
    assert "overlay" in check.fix


def test_an_npu_without_a_driver_is_named(tmp_path: Path) -> None:
    check = answer("npu_driver", tmp_path, BEDS["unbound"])
    assert (check.status, check.found) == ("fail", "no driver has taken fdab0000.npu (rockchip,rk3588-rknpu)")


def closed(mode: int) -> Bed:
    """The NPU's nodes with other permissions, none of them for this user."""
    nodes = {
        d.path: replace(d.node, mode=mode, usable=False) for d in HEALTHY.devices if d.node and "npu/drm" in d.path
    }
    return replace(HEALTHY, devices=tuple(replace(d, node=nodes.get(d.path, d.node)) for d in HEALTHY.devices))


def test_closed_nodes_are_named_with_a_rule_that_opens_them(tmp_path: Path) -> None:
    check = answer("npu_node", tmp_path, closed(0o600))
    assert check.status == "fail"
    assert check.found.startswith("not open to ada: /dev/dri/renderD129 (0600 ")
    assert 'SUBSYSTEM=="drm", DRIVERS=="RKNPU"' in check.fix


def membership(folder: Path, process: ProcessFacts, *, docker: bool = False) -> Check:
    """What is said of a render node of the group `render`, and a card node of the group `video`."""
    asked = case(folder, process=process, files={"/.dockerenv": b""} if docker else {})
    assert asked.board.npu is not None
    nodes = (
        DeviceNode("/dev/dri/renderD129", "device", (226, 129), 0o660, "root", "render"),
        DeviceNode("/dev/dri/card1", "device", (226, 1), 0o660, "root", "video"),
    )
    board = replace(asked.board, npu=replace(asked.board.npu, nodes=nodes))
    return next(check for check in examine(replace(asked, board=board)).checks if check.name == "npu_node")


def test_the_groups_that_would_let_a_user_in_are_named(tmp_path: Path) -> None:
    check = membership(tmp_path, replace(PROCESS, user="Ada L", groups=frozenset()))
    assert check.status == "fail"
    assert "/dev/dri/renderD129 (0660 root:render), /dev/dri/card1 (0660 root:video)" in check.found
    assert check.fix == "usermod -aG render,video 'Ada L' as root, and log in again"


def test_whoever_was_let_in_after_logging_in_must_log_in_again(tmp_path: Path) -> None:
    process = replace(PROCESS, groups=frozenset({"ada"}), future_groups=frozenset({"render", "video", "audio"}))
    assert membership(tmp_path, process).fix == "log in again: ada is in render, video from then on"


def test_a_container_is_given_the_groups(tmp_path: Path) -> None:
    assert membership(tmp_path, PROCESS, docker=True).fix == "docker run --group-add render --group-add video"


def test_a_container_s_missing_nodes_are_to_be_handed_in(tmp_path: Path) -> None:
    asked = case(tmp_path, files={"/.dockerenv": b""})
    for node in ("renderD129", "card1"):
        (tmp_path / "dev/dri" / node).unlink()
    checks = {c.name: c for c in examine(replace(asked, board=discover(asked.machine))).checks}
    assert checks["npu_node"].status == "fail"
    assert "/dev/dri/renderD129 (missing)" in checks["npu_node"].found
    assert "docker run --device /dev/dri" in checks["npu_node"].fix
    assert checks["container"].status == "fail"


def test_the_wheel_wants_a_node_of_that_number_in_docker(tmp_path: Path) -> None:
    """On a board without a display the NPU's is renderD128."""
    headless = replace(HEALTHY, devices=BEDS["headless"].devices, links=BEDS["headless"].links)
    check = answer("container", tmp_path, headless, files={"/.dockerenv": b""})
    assert check.status == "fail"
    assert check.fix.startswith("touch /dev/dri/renderD129")


def test_the_render_node_alone_will_do(tmp_path: Path) -> None:
    card = next(d for d in HEALTHY.devices if d.path.endswith("card1"))
    assert card.node is not None
    devices = tuple(replace(d, node=replace(card.node, usable=False)) if d is card else d for d in HEALTHY.devices)
    check = answer("npu_node", tmp_path, replace(HEALTHY, devices=devices))
    assert (check.status, "card1" in check.found, "renderD129" in check.found) == ("info", True, False)


@pytest.mark.parametrize(
    ("links", "stale", "status", "words"),
    [
        (
            {"/dev/rknpu": "/dev/dri/renderD129"},
            (),
            "fail",
            "/dev/rknpu (link to /dev/dri/renderD129) is not the driver's",
        ),
        ({}, (FakeNode("/dev/rknpu", (10, 122)),), "fail", "is left over: no driver has made it"),
        ({}, (), "ok", "/dev/rknpu is not there"),
    ],
)
def test_what_stands_at_dev_rknpu(
    tmp_path: Path, links: dict[str, str], stale: tuple[FakeNode, ...], status: str, words: str
) -> None:
    bed = replace(HEALTHY, links={**HEALTHY.links, **links}, stale=stale)
    check = answer("rknpu_path", tmp_path, bed)
    assert (check.status, words in check.found) == (status, True), check
    assert check.fix.startswith("rm /dev/rknpu") == (status == "fail")


def test_the_driver_s_misc_form_owns_dev_rknpu(tmp_path: Path) -> None:
    bed = replace(HEALTHY, devices=BEDS["misc"].devices, links={})
    assert answer("rknpu_path", tmp_path, bed).status == "ok"

"""Listing devices: through udev where it can be had, from sysfs where not. The real udev: tests/board/test_udev.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from npu import udev_devices
from npu.kernel_devices import KernelDevice, SysfsLister, open_lister
from npu.machine import Machine
from npu.udev_devices import UdevLister, open_udev
from tests.npu.beds import BEDS


def test_no_udev_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udev_devices, "LIBRARY", "libudev-that-is-not-there.so.1")
    assert open_udev() is None
    assert open_lister(Machine()).source == "sysfs"


def test_this_machine_is_asked_through_udev(monkeypatch: pytest.MonkeyPatch) -> None:
    lister = UdevLister(SimpleNamespace())
    monkeypatch.setattr(udev_devices, "open_udev", lambda: lister)
    assert open_lister(Machine()) is lister


def test_another_machine_s_files_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udev_devices, "open_udev", lambda: pytest.fail("udev knows this machine only"))
    assert open_lister(Machine(tmp_path)).source == "sysfs"


def test_udev_s_devices_come_in_the_order_of_their_paths() -> None:
    def list_devices(subsystem: str) -> list[SimpleNamespace]:
        assert subsystem == "drm"
        paths = ("/sys/devices/platform/b/drm/card1", "/sys/devices/platform/a/drm/card0")
        return [SimpleNamespace(sys_path=path, properties={"DEVNAME": "/dev/dri/card"}) for path in paths]

    found = UdevLister(SimpleNamespace(list_devices=list_devices)).devices("drm")
    assert [device.name for device in found] == ["card0", "card1"]
    assert found[0].node == "/dev/dri/card"


def test_sysfs_lists_a_bus_and_a_class(tmp_path: Path) -> None:
    lister = SysfsLister(BEDS["vendor"].write(tmp_path))
    npu = next(device for device in lister.devices("platform") if device.driver == "RKNPU")
    assert npu.path == "/sys/devices/platform/fdab0000.npu"
    assert npu.compatible == ("rockchip,rk3588-rknpu",)
    assert npu.node is None
    cards = lister.devices("drm")
    assert [card.node for card in cards] == [
        "/dev/dri/card0",
        "/dev/dri/renderD128",
        "/dev/dri/card1",
        "/dev/dri/renderD129",
    ]
    assert [card.below(npu) for card in cards] == [False, False, True, True]
    assert lister.devices("no-such-class") == []


@pytest.mark.parametrize(
    ("count", "names"),
    [("2", ("a,b", "c,d")), ("1", ("a,b",)), ("9", ("a,b", "c,d")), ("", ()), ("many", ())],
)
def test_compatible_names_are_counted(count: str, names: tuple[str, ...]) -> None:
    properties = {"OF_COMPATIBLE_N": count, "OF_COMPATIBLE_0": "a,b", "OF_COMPATIBLE_1": "c,d"}
    assert KernelDevice("/sys/devices/x", properties).compatible == names

"""Devices as the kernel lists them: through udev, or from sysfs where there is no udev."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from .machine import Machine

__all__ = ["DeviceLister", "KernelDevice", "SysfsLister", "open_lister"]

BUSES = frozenset({"platform"})
"""Subsystems of ours that are a bus; the others are classes."""


@dataclass(frozen=True)
class KernelDevice:
    """A device of the kernel's.

    Attributes:
        path: its folder, below `/sys/devices`.
        properties: of its uevent, and udev's own where there is a udev.
    """

    path: str
    properties: Mapping[str, str]

    @property
    def name(self) -> str:
        """Last part of its path, such as `fdab0000.npu`."""
        return posixpath.basename(self.path)

    @property
    def driver(self) -> str | None:
        """Name of the driver that is bound to it."""
        return self.properties.get("DRIVER")

    @property
    def compatible(self) -> tuple[str, ...]:
        """What its node in the device tree says it is, the closest first."""
        count = self.properties.get("OF_COMPATIBLE_N", "0")
        names = (
            self.properties.get(f"OF_COMPATIBLE_{index}") for index in range(int(count) if count.isdecimal() else 0)
        )
        return tuple(filter(None, names))

    @property
    def node(self) -> str | None:
        """Its path in `/dev`; None if it has none."""
        name = self.properties.get("DEVNAME")
        return None if name is None else posixpath.join("/dev", name)  # udev says the whole path, the kernel does not

    def below(self, other: KernelDevice) -> bool:
        """Whether it is part of another device."""
        return self.path.startswith(f"{other.path}/")


class DeviceLister(Protocol):
    """Lists devices.

    Attributes:
        source: where it knows them from.
    """

    @property
    def source(self) -> Literal["udev", "sysfs"]:
        """See the class."""

    def devices(self, subsystem: str) -> list[KernelDevice]:
        """The devices of a subsystem that are there at the moment, in the order of their paths."""


class SysfsLister:
    """Reads sysfs itself: in a container there is no udev, and for a machine that is not this one neither.

    Args:
        machine: whose sysfs.
    """

    source: Literal["sysfs"] = "sysfs"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def devices(self, subsystem: str) -> list[KernelDevice]:
        """See `DeviceLister`."""
        folder = f"/sys/bus/{subsystem}/devices" if subsystem in BUSES else f"/sys/class/{subsystem}"
        paths = (self._machine.resolved(f"{folder}/{name}") for name in self._machine.names(folder))
        return [KernelDevice(path, self._uevent(path)) for path in sorted(filter(None, paths))]

    def _uevent(self, path: str) -> dict[str, str]:
        lines = (self._machine.text(f"{path}/uevent") or "").splitlines()
        return {name: value for name, separator, value in (line.partition("=") for line in lines) if separator}


def open_lister(machine: Machine) -> DeviceLister:
    """This machine's udev, if it can be had; sysfs otherwise."""
    if machine.is_this_one:
        from .udev_devices import open_udev  # noqa: PLC0415 - its pyudev is an extra, and not for other machines' files

        udev = open_udev()
        if udev is not None:
            return udev
    return SysfsLister(machine)

"""A machine made of data: a tree of files, or a description that umockdev serves to the real udev library."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from npu.machine import Machine

__all__ = ["Bed", "FakeDevice", "FakeNode", "TreeMachine"]


@dataclass(frozen=True)
class FakeNode:
    """A character device in `/dev`."""

    path: str
    number: tuple[int, int]
    mode: int = 0o660
    usable: bool = True


@dataclass(frozen=True)
class FakeDevice:
    """A device of the kernel's. `attributes` are files in its folder; `properties` make up its uevent."""

    path: str
    subsystem: str
    properties: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, bytes] = field(default_factory=dict)
    node: FakeNode | None = None

    def uevent(self) -> dict[str, str]:
        """All properties, with those of the node as the kernel gives them."""
        if self.node is None:
            return dict(self.properties)
        major, minor = self.node.number
        name = self.node.path.removeprefix("/dev/")
        return {**self.properties, "MAJOR": str(major), "MINOR": str(minor), "DEVNAME": name}


@dataclass(frozen=True)
class Bed:
    """A machine. `files` and `links` lie outside of devices' folders; `stale` are nodes that no device has."""

    devices: tuple[FakeDevice, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    stale: tuple[FakeNode, ...] = ()

    def without(self, *paths: str) -> Bed:
        """The same machine without devices whose path holds one of these words."""
        return replace(self, devices=tuple(d for d in self.devices if not any(path in d.path for path in paths)))

    def with_files(self, **files: bytes) -> Bed:
        """The same machine with other files; a name's `__` stands for `/`."""
        return replace(
            self, files={**self.files, **{f"/{name.replace('__', '/')}": text for name, text in files.items()}}
        )

    def nodes(self) -> list[FakeNode]:
        """Every node there is."""
        return [device.node for device in self.devices if device.node] + list(self.stale)

    def write(self, root: Path) -> TreeMachine:
        """Make the tree of files below `root`."""
        for device in self.devices:
            folder = root / f"sys{device.path}"
            for name, content in device.attributes.items():
                write(folder / name, content)
            write(folder / "uevent", "".join(f"{k}={v}\n" for k, v in device.uevent().items()).encode())
            kind = "bus/platform/devices" if device.subsystem == "platform" else f"class/{device.subsystem}"
            link(root / "sys" / kind / folder.name, folder)
        for node in self.nodes():
            write(root / node.path.lstrip("/"), b"")
        for name, content in self.files.items():
            write(root / name.lstrip("/"), content)
        for name, target in self.links.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        return TreeMachine(root, {node.path: node for node in self.nodes()})

    def umockdev(self) -> str:
        """The devices as umockdev-run loads them; files, links and stale nodes are left to `overlay`."""
        return "\n".join(_record(device) for device in self.devices)

    def overlay(self, root: Path) -> None:
        """Add to the folder of a running testbed what its description cannot say."""
        for name, content in self.files.items():
            write(root / name.lstrip("/"), content)
        for name, target in self.links.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)


class TreeMachine(Machine):
    """Reads a bed's tree, in which files stand for the devices that it takes root to make.

    Attributes:
        nodes: those files.
        closed: beginnings of names that this user may not read.
    """

    def __init__(self, root: Path, nodes: Mapping[str, FakeNode]) -> None:
        super().__init__(root)
        self.nodes = nodes
        self.closed: tuple[str, ...] = ()

    def read(self, name: str) -> bytes:
        self._ask(name)
        return super().read(name)

    def kernel_log(self) -> list[str]:
        self._ask("/dev/kmsg")
        return super().kernel_log()

    def _ask(self, name: str) -> None:
        if name.startswith(self.closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    def lstat(self, name: str) -> os.stat_result:
        found = super().lstat(name)
        node = self.nodes.get(name)
        if node is None or not stat.S_ISREG(found.st_mode):
            return found
        fields = list(found[:10])
        fields[0] = stat.S_IFCHR | node.mode
        return os.stat_result(fields, {"st_rdev": os.makedev(*node.number)})

    def may_use(self, name: str) -> bool:
        return name in self.nodes and self.nodes[name].usable and self.exists(name)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def _record(device: FakeDevice) -> str:
    lines = [f"P: {device.path}"]
    if device.node is not None:
        lines += [f"N: {device.node.path.removeprefix('/dev/')}", "A: dev={}:{}\\n".format(*device.node.number)]
    properties = {**device.uevent(), "SUBSYSTEM": device.subsystem}
    if device.node is not None:
        properties["DEVNAME"] = device.node.path  # umockdev takes the whole path, as udev gives it
    lines += [f"E: {name}={value}" for name, value in properties.items()]
    if "DRIVER" in properties:  # udev knows a driver by this link
        lines += [f"L: driver=../../bus/platform/drivers/{properties['DRIVER']}"]
    lines += [f"H: {name}={content.hex().upper()}" for name, content in device.attributes.items()]
    return "\n".join(lines) + "\n"

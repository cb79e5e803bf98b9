"""A device's node in `/dev`: what it is, whose it is, and whether this user may open it."""

from __future__ import annotations

import os
import posixpath
import stat
from dataclasses import dataclass
from typing import Literal

from .account_names import group_name, user_name
from .machine import Machine

__all__ = ["DeviceNode", "NodeKind"]

NodeKind = Literal["device", "link", "file", "missing"]
"""`device` is a character device; `file` is anything else that is neither that nor a symbolic link."""


@dataclass(frozen=True)
class DeviceNode:
    """One path in `/dev`, as found.

    Attributes:
        path: such as `/dev/dri/renderD129`.
        kind: of file; a symbolic link is not followed.
        number: major and minor; None unless it is a device.
        mode: permission bits.
        owner: name of the user it belongs to, or the number where that has no name.
        group: name of its group, likewise.
        usable: it is a device, and this user may read and write it.
        links: stable names that udev gave it, such as `/dev/dri/by-path/platform-fdab0000.npu-render`.
        target: where it leads; None unless it is a link.
    """

    path: str
    kind: NodeKind
    number: tuple[int, int] | None = None
    mode: int = 0
    owner: str = ""
    group: str = ""
    usable: bool = False
    links: tuple[str, ...] = ()
    target: str | None = None

    @classmethod
    def at(cls, machine: Machine, path: str) -> DeviceNode:
        """Look at a path; nothing is opened, which could wake a device."""
        try:
            found = machine.lstat(path)
        except OSError:
            return cls(path, "missing")
        if stat.S_ISLNK(found.st_mode):
            return cls(path, "link", target=machine.target(path))
        if not stat.S_ISCHR(found.st_mode):
            return cls(path, "file")
        return cls(
            path,
            "device",
            number=(os.major(found.st_rdev), os.minor(found.st_rdev)),
            mode=stat.S_IMODE(found.st_mode),
            owner=user_name(found.st_uid),
            group=group_name(found.st_gid),
            usable=machine.may_use(path),
            links=_by_path(machine, path),
        )

    @property
    def stable_path(self) -> str:
        """The name that stays the same over restarts, where udev gave one; numbers of nodes do not."""
        return self.links[0] if self.links else self.path

    def __str__(self) -> str:
        """As a person would say it: path, permissions, owner."""
        if self.kind == "device":
            return f"{self.path} ({self.mode:04o} {self.owner}:{self.group})"
        return f"{self.path} ({self.kind}{f' to {self.target}' if self.target else ''})"


def _by_path(machine: Machine, path: str) -> tuple[str, ...]:
    """Links beside a node that name the hardware behind it: read from the folder, so no udev database is needed."""
    folder = posixpath.join(posixpath.dirname(path), "by-path")
    links = (posixpath.join(folder, name) for name in machine.names(folder))
    return tuple(
        link for link in links if posixpath.normpath(posixpath.join(folder, machine.target(link) or "")) == path
    )

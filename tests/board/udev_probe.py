"""Looks at one bed through the real udev library, and says what it found; umockdev-run runs it, see test_udev.py.

Arguments: the bed's name; then, at will, a number, before which access to a file the NPU's folder is taken away, and
`doctor`, which runs the command. A bed with closed nodes is looked at by a user who has no rights.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np  # noqa: F401 - imported while this user may still read it, like all that follows
import pyudev  # type: ignore[import-untyped] # noqa: F401 - it has no types

import npu.attention_manifest
import npu.doctor  # noqa: F401
from npu.discovery import discover
from npu.machine import Machine
from tests.npu.beds import BEDS
from tests.npu.fake_machine import FakeNode
from tests.npu.read_only import forbid_changes
from tools.main import main as rockpage

NOBODY = 65534


def main() -> int:
    name, *wishes = sys.argv[1:]
    bed, testbed = BEDS[name], Path(os.environ["UMOCKDEV_DIR"])
    bed.overlay(testbed)
    close([node for node in bed.nodes() if not node.usable], testbed)
    if wishes == ["doctor"]:
        forbid_changes()
        return rockpage(["doctor", "--json"])
    machine = Machine()
    if wishes:
        machine = Unplugging(testbed / "sys/devices/platform/fdab0000.npu", int(wishes[0]))
    else:
        forbid_changes()
    print(json.dumps(asdict(discover(machine))))  # noqa: T201 - that is what it is for
    return 0


class Unplugging(Machine):
    """This machine, of which a folder goes away before the n-th access to a file."""

    def __init__(self, folder: Path, after: int) -> None:
        super().__init__()
        self.folder = folder
        self.left = after

    def path(self, name: str) -> Path:
        self.left -= 1
        if self.left == 0:
            shutil.rmtree(self.folder)
        return super().path(name)


def close(nodes: list[FakeNode], testbed: Path) -> None:
    """Take the nodes' permissions away, and root's rights to pass them by."""
    testbed.chmod(0o755)  # as /dev is; umockdev makes it the user's own
    for node in nodes:
        (testbed / node.path.lstrip("/")).chmod(0o1000)  # by the sticky bit umockdev knows it for a device
    if nodes and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


if __name__ == "__main__":
    sys.exit(main())

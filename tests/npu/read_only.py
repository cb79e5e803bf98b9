"""Ends a process's rights to change anything: whatever is called from then on fails where it tries."""

from __future__ import annotations

import os
import sys

__all__ = ["forbid_changes"]

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

CHANGES = frozenset(
    {
        *(f"os.{name}" for name in ("chmod", "chown", "link", "mkdir", "remove", "removexattr", "rename", "rmdir")),
        *(f"os.{name}" for name in ("setxattr", "symlink", "truncate", "utime", "system", "exec", "posix_spawn")),
        "fcntl.ioctl",
        "socket.connect",
    }
)
"""Audit events of Python's. An ioctl can wake a device as well as any write."""

WAKING = ("/rknpu/freq", "/rknpu/volt", "/load")
"""Files that must not even be read: the first powers the NPU on; devfreq's `load` holds nothing."""

HARMLESS_LOADS = ("/sys/kernel/debug/rknpu/load", "/proc/rknpu/load")


def forbid_changes() -> None:
    """From here to the end of the process."""
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        name = os.fsdecode(path) if isinstance(path, str | bytes) else str(path)
        if isinstance(flags, int) and flags & WRITING and name != os.devnull:  # subprocesses are given /dev/null
            raise PermissionError(f"{name} was opened for writing, flags {flags:#o}")
        if name.endswith(WAKING) and not name.endswith(HARMLESS_LOADS):
            raise PermissionError(f"{name} was read")
    elif event in CHANGES:
        raise PermissionError(f"{event}{arguments}")
    elif (
        event == "subprocess.Popen" and os.path.basename(str(arguments[0])) != "ldconfig"
    ):  # ctypes asks it for libudev
        raise PermissionError(f"{arguments[0]!r} was started")

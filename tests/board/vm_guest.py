"""The first program inside the VM: makes it a machine that Python can live on, runs pytest and says how that ended."""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import ctypes
import os
import subprocess
import sys

__all__ = ["ENDED", "UP"]

UP = "rockpage-vm: up"
ENDED = "rockpage-vm: pytest ended with status "

SCRATCH = "/dev/shm"  # the only folder that can be written: /dev is the machine's own, all else is the host's
CGROUPS = "/sys/fs/cgroup"
LINUX_REBOOT_CMD_RESTART = 0x01234567

_libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, where: str) -> None:
    """Mount a file system of the kernel's own."""
    if _libc.mount(kind.encode(), where.encode(), kind.encode(), 0, None):
        raise OSError(ctypes.get_errno(), f"mount of {kind}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Never returns: the kernel panics when its first program ends."""
    mount("proc", "/proc")
    mount("sysfs", "/sys")
    os.mkdir(SCRATCH)
    mount("tmpfs", SCRATCH)
    mount("cgroup2", CGROUPS)
    with open(f"{CGROUPS}/cgroup.subtree_control", "w") as control:
        control.write("+memory")
    print(UP, flush=True)
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{SCRATCH}/hypothesis",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    status = subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], env=environment, check=False).returncode
    print(f"{ENDED}{status}", flush=True)
    _libc.reboot(LINUX_REBOOT_CMD_RESTART)


if __name__ == "__main__":
    main()

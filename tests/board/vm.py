"""`make test-vm`: the tests marked `vm`, in a small virtual machine with DMA heaps, udmabuf, PSI and cgroup v2.

The machine's root is this one's, read-only, so it runs this very Python on this very checkout. It is emulated (TCG):
slower than KVM, but the same everywhere, and it asks for no rights.
"""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.board.host import JobError, require_packages
from tests.board.vm_guest import ENDED, UP
from tests.board.vm_kernel import PACKAGES, kernel_image

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
MEMORY_MIB = 640
CMA_MIB = 192
SECONDS = 900  # about two minutes are usual

KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet root=host rootfstype=9p ro "
    "rootflags=trans=virtio,version=9p2000.L,msize=262144,cache=loose "
    f"cma={CMA_MIB}M panic=-1 reboot=t"
)
"""A panic restarts the machine, by a triple fault, for it has no other way; and QEMU ends instead of restarting."""

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[a-z=>])")

COMPLAINT = re.compile(r"\b(BUG|WARNING|Oops|Kernel panic)\b")
"""In the kernel's log: it found itself damaged, whatever the tests say."""

PYTEST = ["-v", "-m", "vm", "-p", "no:cacheprovider", "--color=no", "-rP", "tests/board"]


def main() -> int:
    """Run the tests and print what the machine prints.

    Returns:
        pytest's status; 3 if it was not run to its end.
    """
    try:
        require_packages(PACKAGES)
        kernel = kernel_image()
        with tempfile.TemporaryDirectory(prefix="rockpage-vm-") as folder:
            init = write_init(Path(folder), PYTEST)
            return outcome(console(qemu(kernel, init), SECONDS))
    except JobError as error:
        print(f"test-vm: {error}", file=sys.stderr)
        return 3


def write_init(folder: Path, pytest: Sequence[str]) -> Path:
    """The machine's first program: `vm_guest.py`, run by this Python."""
    init = folder / "init"
    command = shlex.join([sys.executable, "-B", "-m", "tests.board.vm_guest", *pytest])
    init.write_text(f"#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {command}\n")
    init.chmod(0o755)
    return init


def qemu(kernel: Path, init: Path) -> list[str]:
    """The command that boots the machine, its console on standard output."""
    machine = ["-M", "microvm,acpi=off", "-accel", "tcg", "-cpu", "max", "-m", str(MEMORY_MIB), "-no-reboot"]
    console = ["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"]
    boot = ["-kernel", str(kernel), "-append", f"{KERNEL_ARGUMENTS} init={init}"]
    root = ["-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"]
    return [
        "qemu-system-x86_64",
        *machine,
        *console,
        *boot,
        *root,
        "-device",
        "virtio-9p-device,fsdev=root,mount_tag=host",
    ]


def console(command: Sequence[str], seconds: float) -> Iterator[str]:
    """Lines of a machine's console as they come, without escape sequences.

    Raises:
        JobError: the machine cannot be started, or runs longer than `seconds`; it is ended.
    """
    try:
        machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise JobError(f"{command[0]} cannot be started: {error}") from error
    late = threading.Event()

    def end() -> None:
        late.set()
        machine.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        assert machine.stdout is not None  # a pipe, as asked for
        for line in machine.stdout:
            yield shown(line.decode(errors="replace"))
    finally:
        timer.cancel()
        machine.kill()
        machine.communicate()
    if late.is_set():
        raise JobError(f"the machine was ended after {seconds:g} seconds: the last line above is where it hung")


def shown(line: str) -> str:
    """What a terminal ends up showing of a line."""
    return ESCAPES.sub("", line).rstrip().rpartition("\r")[2]


def outcome(lines: Iterable[str]) -> int:
    """Print the lines between the guest's first and its last, and return the status that it says there.

    Raises:
        JobError: the guest never came up, or ended before it said how, or its kernel complained.
    """
    before: list[str] = []
    complaints: list[str] = []
    up = False
    status = None
    for line in lines:
        if ENDED in line:
            status = int(line.partition(ENDED)[2])
        elif up:
            print(line, flush=True)
            complaints += [line] if COMPLAINT.search(line) else []
        elif UP in line:
            up = True
        else:
            before.append(line)
    if complaints:
        raise JobError(f"pytest ended with status {status}, but the kernel complained: {complaints[0]}")
    if status is not None:
        return status
    if up:
        raise JobError("the machine ended before pytest did: the kernel's last words are above")
    raise JobError("the machine did not come up; it said:\n" + "\n".join(before[-30:]))


if __name__ == "__main__":
    sys.exit(main())

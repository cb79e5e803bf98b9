"""The files by which a machine describes itself: read, never written, and gone at any moment."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Machine", "decimal"]

LONGEST_RECORD = 8192
"""Bytes of a record of the kernel's log (CONSOLE_EXT_LOG_MAX, kernel/printk/printk.c); a read returns one."""


_MOST_DIGITS = 20  # of 64 bits


def decimal(text: str) -> int | None:
    """What a kernel prints for an integer of 64 bits; None for any other text."""
    digits = text.removeprefix("-")
    return int(text) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else None


class Machine:
    """Reads `/proc`, `/sys` and `/dev` below a root.

    Devices come and go while one reads: whatever has vanished, or is closed to this user, reads as nothing. Only `read`
    says why.

    Args:
        root: where the machine's files begin; another than `/` serves tests and images of boards.

    Attributes:
        root: as given.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @property
    def is_this_one(self) -> bool:
        """Whether the files are those of the machine this program runs on."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """Where the file that the machine itself calls `name` (absolute) lies."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            OSError: it is not there, or closed to this user.
        """
        return self.path(name).read_bytes()

    def text(self, name: str) -> str | None:
        """The file's text without white space around it; None if there is nothing to read."""
        try:
            return self.read(name).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The file's text as a decimal integer of 64 bits; None if it is none."""
        return decimal(self.text(name) or "")

    def strings(self, name: str) -> tuple[str, ...]:
        """A device tree's property: strings that each end in a NUL."""
        return tuple(filter(None, (self.text(name) or "").split("\0")))

    def kernel_log(self) -> list[str]:
        """The kernel's messages, as far back as it keeps them; reading takes nothing away from other readers.

        Raises:
            OSError: they are closed to this user, or not there.
        """
        descriptor = os.open(self.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        records = []
        try:
            while True:
                try:
                    record = os.read(descriptor, LONGEST_RECORD)
                except BlockingIOError:  # that was the last one
                    break
                except BrokenPipeError:  # it was overwritten meanwhile; the next one is there
                    continue
                if not record:  # a plain file, in place of the device, ends so
                    break
                records.append(record)
        finally:
            os.close(descriptor)
        return b"".join(records).decode(errors="replace").splitlines()

    def names(self, folder: str) -> list[str]:
        """What lies in a folder, sorted; nothing if it is not there."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        """Whether there is something by this name that can be followed to its end."""
        return os.path.exists(self.path(name))

    def lstat(self, name: str) -> os.stat_result:
        """What kind of file it is and whose; a symbolic link is not followed.

        Raises:
            OSError: it is not there.
        """
        return os.lstat(self.path(name))

    def may_use(self, name: str) -> bool:
        """Whether this user may read and write it: asked of the kernel, since access lists count too."""
        return os.access(self.path(name), os.R_OK | os.W_OK)

    def target(self, name: str) -> str | None:
        """What a symbolic link says; None for anything else."""
        try:
            return os.readlink(self.path(name))
        except OSError:
            return None

    def resolved(self, name: str) -> str | None:
        """The machine's own name of what `name` leads to; None if that is nothing, or lies outside of the root."""
        real = Path(os.path.realpath(self.path(name)))
        root = Path(os.path.realpath(self.root))
        if not real.is_relative_to(root) or not os.path.exists(real):
            return None
        return "/" + str(real.relative_to(root))

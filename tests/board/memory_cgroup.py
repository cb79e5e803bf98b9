"""A memory cgroup of one's own: processes that a limit really ends, on any machine whose root may make one."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostcache.memory_budget import memory_cgroups

__all__ = ["MemoryCgroup", "NoMemoryCgroup", "memory_cgroup"]


_LIMITS = ("memory.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes")  # memsw: with swap, after memory's
_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


class NoMemoryCgroup(Exception):
    """This machine, or this user, cannot make one; the message says why."""


@dataclass(frozen=True)
class MemoryCgroup:
    """An open cgroup, of version 1 or 2.

    Attributes:
        folder: where the kernel shows it.
    """

    folder: Path

    def run(self, command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command within the limit from its first page on; its output is text."""
        # The shell moves itself, and becomes the command then.
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]
        return subprocess.run(inside, cwd=cwd, capture_output=True, text=True, check=False)

    @property
    def peak_bytes(self) -> int:
        """The most that was ever charged, pages of files included."""
        return self._number(*_PEAKS)

    @property
    def squeezes(self) -> int:
        """How often the limit was met and something had to be dropped."""
        if (self.folder / "memory.events").exists():
            return self._table("memory.events")["max"]
        # Where both limits are the same, only the one that is met first counts.
        return sum(int(file.read_text()) for file in self.folder.glob("memory*.failcnt") if "kmem" not in file.name)

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel has ended for want of memory."""
        return self._table("memory.oom_control", "memory.events")["oom_kill"]

    def _number(self, *names: str) -> int:
        return int(self._read(names))

    def _table(self, *names: str) -> dict[str, int]:
        return {name: int(value) for name, value in (line.split() for line in self._read(names).splitlines())}

    def _read(self, names: Sequence[str]) -> str:
        """The first of the files that there is: the versions have names of their own."""
        for name in names:
            if (self.folder / name).exists():
                return (self.folder / name).read_text()
        raise FileNotFoundError(f"{self.folder} has none of {names}")


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A fresh cgroup with a limit and no swap, gone when the context ends; its processes have ended by then.

    Raises:
        NoMemoryCgroup: none can be made.
    """
    folder = _make()
    try:
        for name, value in (*((name, limit_bytes) for name in _LIMITS), ("memory.swap.max", 0)):
            if (folder / name).exists():  # without swap in the kernel there is no file that limits it
                (folder / name).write_text(str(value))
        yield MemoryCgroup(folder)
    finally:
        folder.rmdir()


def _make() -> Path:
    """A cgroup below the process's own, or, where that lets nothing below it have a limit, beside it or further up."""
    reason = "the memory controller is not mounted"
    for _, parent in memory_cgroups():
        try:
            folder = Path(tempfile.mkdtemp(prefix="rockpage-", dir=parent))
        except OSError as error:
            reason = f"{error.filename} cannot be made ({error.strerror})"
            continue
        if any((folder / name).exists() for name in _LIMITS) and any((folder / name).exists() for name in _PEAKS):
            return folder
        folder.rmdir()
        reason = f"below {parent} memory is not limited and measured (cgroup.subtree_control; Linux 5.19)"
    raise NoMemoryCgroup(f"no memory cgroup: {reason}")

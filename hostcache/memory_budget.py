"""How much memory there is for this process: the machine's, or less where a cgroup it is in has a limit.

A container, or a service with `MemoryMax=`, is killed at its own limit however much the machine has left. What is read:

| of          | limit                       | used                                                     |
|-------------|-----------------------------|----------------------------------------------------------|
| the machine | `MemTotal`                  | all but `MemAvailable`                                   |
| cgroup v2   | `memory.max`, `memory.high` | `memory.current` less pages of files and of inodes       |
| cgroup v1   | `memory.limit_in_bytes`     | `memory.usage_in_bytes` less pages of files              |

Pages of files, and of the inodes and names it has read, count as free: the kernel drops them before it kills anybody
(Linux, admin-guide/cgroup-v2.rst). Version 1 does not say how many the latter are; there they count as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MemoryBudget", "meminfo_bytes", "memory_budgets", "memory_cgroups", "scarcest_budget"]

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USAGE = ("memory.current", "memory.usage_in_bytes")
_DROPPABLE = ("active_file", "inactive_file", "slab_reclaimable")
_MOST_DIGITS = 20  # of 64 bits
_UNLIMITED = 1 << 62  # version 1 writes 2^63 less a page where no limit is set


@dataclass(frozen=True)
class MemoryBudget:
    """What somebody lets this process and its neighbours have.

    Attributes:
        cgroup: path of the cgroup below its mount; None for the machine, whose memory the kernel lives in, too.
        limit: bytes in all.
        available: bytes that could be had now, without swapping.
    """

    cgroup: str | None
    limit: int
    available: int

    @property
    def owner(self) -> str:
        """Names it in messages: `this machine`, or `cgroup /...`."""
        return "this machine" if self.cgroup is None else f"cgroup {self.cgroup}"


def memory_budgets(root: Path = Path("/")) -> list[MemoryBudget]:
    """Every budget this process lives by, the machine's first; empty where the kernel says nothing.

    Args:
        root: where `proc` and the cgroups' mounts are looked for.
    """
    return [*_machine(root), *_cgroups(root)]


def scarcest_budget(root: Path = Path("/")) -> MemoryBudget | None:
    """The budget that has the least available; None where the kernel says nothing."""
    return min(memory_budgets(root), key=lambda budget: budget.available, default=None)


def meminfo_bytes(field: str, root: Path = Path("/")) -> int | None:
    """One line of the kernel's account of memory, such as `CmaFree`, in bytes; None where it does not say.

    Args:
        field: its name.
        root: where `proc` is looked for.
    """
    kib = _table(root / "proc/meminfo").get(f"{field}:")
    return None if kib is None else kib << 10


def _machine(root: Path) -> Iterator[MemoryBudget]:
    kib = _table(root / "proc/meminfo")
    if "MemTotal:" in kib and "MemAvailable:" in kib:
        yield MemoryBudget(None, kib["MemTotal:"] << 10, kib["MemAvailable:"] << 10)


def _cgroups(root: Path) -> Iterator[MemoryBudget]:
    """The process's own cgroup and those it lies in: each limit holds for all below it."""
    for path, folder in memory_cgroups(root):
        limit = min(_numbers(folder, _LIMITS), default=_UNLIMITED)
        if limit < _UNLIMITED:
            used = sum(_numbers(folder, _USAGE)) - _droppable(folder / "memory.stat")
            yield MemoryBudget(path, limit, max(0, limit - max(0, used)))


def memory_cgroups(root: Path = Path("/")) -> Iterator[tuple[str, Path]]:
    """The cgroups whose memory controller counts this process, its own first, then each that the one before lies in.

    Args:
        root: where `proc` and the cgroups' mounts are looked for.

    Yields:
        The cgroup's path below its mount, and the folder that shows it.
    """
    version_1, version_2 = None, None
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version_1 = path
        elif number == "0":
            version_2 = path
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        fields = place.split(" ")
        if len(fields) < 5:
            continue
        mounted, mount = fields[3:5]
        if version_1 is not None:
            own = version_1 if kind.startswith("cgroup ") and "memory" in kind.split()[-1].split(",") else None
        else:
            own = version_2 if kind.startswith("cgroup2 ") else None
        if own is not None:
            absolute = PurePosixPath(own)
            # In a container the mount may begin at the container's cgroup, and the path at the host's root.
            inside = absolute.is_relative_to(mounted) and ".." not in absolute.parts
            below = absolute.relative_to(mounted) if inside else PurePosixPath()
            for step in (below, *below.parents):
                yield f"{PurePosixPath('/') / step}", root / mount.lstrip("/") / step


def _table(path: Path) -> dict[str, int]:
    """Lines of a name, a number, and perhaps a unit."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and _is_number(row[1])}


def _numbers(folder: Path, names: tuple[str, ...]) -> list[int]:
    """What stands in some files of one number each; not every version has all, and `max` is no number."""
    texts = ("".join(_lines(folder / name)) for name in names)
    return [int(text) for text in texts if _is_number(text)]


def _is_number(text: str) -> bool:
    """Whether a kernel prints such a text for a number of bytes."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _droppable(stat: Path) -> int:
    """Bytes that the kernel can drop; with what lies in cgroups below, which version 1 counts apart."""
    pages = _table(stat)
    return sum(pages.get(f"total_{kind}", pages.get(kind, 0)) for kind in _DROPPABLE)


def _lines(path: Path) -> list[str]:
    """The lines of a file; the kernel shows names in it as they are, and they may hold any byte but a newline."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
    except OSError:
        return []
    return text.removesuffix("\n").split("\n") if text else []

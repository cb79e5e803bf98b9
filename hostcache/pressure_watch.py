"""Where the kernel says that memory is short: stall triggers, a cgroup's events, and what is left.

| says                                       | where                   | how it is heard                             |
|--------------------------------------------|-------------------------|---------------------------------------------|
| `memory.pressure`, `/proc/pressure/memory` | Linux 5.2, `CONFIG_PSI` | `poll()`: tasks waited for 15 % of a second |
| `memory.events` of the own cgroup          | cgroup v2               | `poll()`, then the counters of deaths       |
| what machine and cgroups have left         | everywhere              | read when one of these speaks, and at times |

A trigger of any window asks for CAP_SYS_RESOURCE; newer kernels grant everybody one of two seconds
(Documentation/accounting/psi.rst). Where no trigger can be had, what is left is all that is watched.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError
from .memory_budget import MemoryBudget, memory_budgets, memory_cgroups
from .pressure import PressureReading

__all__ = ["PressureWatch"]

TRIGGERS = (b"some 150000 1000000\0", b"some 300000 2000000\0")
"""Some task waited for memory during 15 % of a window of so many microseconds; the second asks for no right."""

AMPLE_SHARE = 8
"""The machine's tasks may as well stall at the limit of some cgroup that is no concern of ours; they stall for want of
the machine's memory if less than an eighth of it is left. Chosen, not measured."""


class PressureWatch:
    """Opens what the kernel offers and reads it when there is something to read.

    Nothing runs by itself: `read` asks whether a trigger has fired, which takes a system call, and looks at what is
    left only then, or when `interval` has passed.

    Args:
        interval: seconds after which what is left is looked at anyway.
        root: where `proc` and the cgroups' mounts are looked for.

    Attributes:
        sources: what is listened to, for people: names of triggers and events; empty where there are none.

    Raises:
        UsageError: the kernel does not even say what is left.
    """

    def __init__(self, interval: float = 0.25, root: Path = Path("/")) -> None:
        if not memory_budgets(root):
            raise UsageError(f"{root / 'proc/meminfo'} does not say what memory is left: nothing can be watched")
        self._interval = interval
        self._root = root
        self._next_look = 0.0
        self._poll = select.poll()
        self._pending: dict[int, int] = {}  # descriptor -> what it said during `wait`
        self._triggers: dict[int, str] = {}
        self._events: int | None = None
        self._deaths = 0
        own = next(memory_cgroups(root), None)
        if own is not None:
            path, folder = own
            if (folder / "cgroup.type").exists():  # all but the root have it, whose stalls are the machine's
                self._open_trigger(folder / "memory.pressure", f"cgroup {path}")
            self._open_events(folder / "memory.events")
        self._open_trigger(root / "proc/pressure/memory", _MACHINE)

    @property
    def sources(self) -> list[str]:
        """What is listened to beside what is left."""
        named = [f"stalls of {whose}" for whose in self._triggers.values()]
        return named if self._events is None else [*named, "events of the cgroup"]

    def describe(self) -> str:
        """One sentence for people about what is watched."""
        looked = f"what is left is looked at every {self._interval:g} s"
        return f"{', '.join(self.sources)}; {looked}" if self.sources else f"no stall triggers here (PSI): {looked}"

    def read(self, now: float) -> PressureReading | None:
        """What there is to know; None if nothing spoke and the last look is recent.

        Args:
            now: seconds, of a clock that does not go back.
        """
        spoken = self._pending | dict(self._poll.poll(0))
        self._pending = {}
        if not spoken and now < self._next_look:
            return None
        self._next_look = now + self._interval
        budgets = memory_budgets(self._root)
        stalls = [stall for descriptor, event in spoken.items() if (stall := self._heard(descriptor, event, budgets))]
        scarcest = min(budgets, key=lambda budget: budget.available)
        return PressureReading(scarcest.available, scarcest.owner, " and ".join(stalls))

    def wait(self, seconds: float, readable: Sequence[int] = ()) -> bool:
        """Sleep until something speaks, at most so long.

        Args:
            seconds: 0 or more.
            readable: descriptors of others', which end the sleep, too, when they can be read.

        Returns:
            Whether one of `readable` ended it.
        """
        try:
            for descriptor in readable:
                self._poll.register(descriptor, select.POLLIN)
            said = dict(self._poll.poll(seconds * 1000))
        finally:
            for descriptor in readable:
                with contextlib.suppress(KeyError):  # one that is none was not registered
                    self._poll.unregister(descriptor)
        others = [said.pop(descriptor) for descriptor in set(readable) if descriptor in said]
        self._pending |= said  # a trigger speaks once: it must not be lost
        return bool(others)

    def close(self) -> None:
        """Listen no longer. Safe to call twice."""
        for descriptor in (*self._triggers, *([] if self._events is None else [self._events])):
            os.close(descriptor)
        self._poll = select.poll()
        self._pending, self._triggers, self._events = {}, {}, None

    def _open_trigger(self, path: Path, whose: str) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # a kernel without it, or one that asks for a right to listen
            return
        for trigger in TRIGGERS:
            with contextlib.suppress(OSError):
                os.write(descriptor, trigger)
                self._triggers[descriptor] = whose
                self._poll.register(descriptor, select.POLLPRI)
                return
        os.close(descriptor)

    def _open_events(self, path: Path) -> None:
        try:
            self._events = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        self._poll.register(self._events, select.POLLPRI)
        self._deaths = self._count_deaths()

    def _heard(self, descriptor: int, event: int, budgets: list[MemoryBudget]) -> str:
        """What a source that spoke has to say about a stall; empty if it is none."""
        if descriptor == self._events:
            before, self._deaths = self._deaths, self._count_deaths()
            return "the cgroup ran out of memory" if self._deaths > before else ""
        whose = self._triggers[descriptor]
        if event & select.POLLERR:  # the cgroup is gone, and would speak for ever
            self._drop(descriptor)
            return ""
        machines = [budget for budget in budgets if budget.cgroup is None]
        if whose == _MACHINE and any(budget.available * AMPLE_SHARE > budget.limit for budget in machines):
            return ""
        return f"tasks of {whose} waited for memory"

    def _count_deaths(self) -> int:
        """How often the cgroup ran out of memory, or had a process killed; reading it also arms the next event."""
        assert self._events is not None
        try:
            lines = os.pread(self._events, 4096, 0).decode().splitlines()
        except OSError:  # the cgroup is gone
            self._drop(self._events)
            return self._deaths
        rows = (line.split() for line in lines)
        return sum(int(row[1]) for row in rows if row[0] in ("oom", "oom_kill"))

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        if descriptor == self._events:
            self._events = None
        else:
            del self._triggers[descriptor]


_MACHINE = "this machine"

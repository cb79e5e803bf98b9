"""What an engine does about memory pressure, with limits that fit the memory it lives in."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hostcache.cache import PagedKVCache
from hostcache.errors import UsageError
from hostcache.memory_budget import scarcest_budget
from hostcache.pressure import PressureLadder, PressureLimits
from hostcache.pressure_response import PressureResponse
from hostcache.pressure_watch import PressureWatch
from hostcache.scheduler import Scheduler

__all__ = ["LOOK_SECONDS", "Readable", "respond_to_pressure", "wait_for"]

LOOK_SECONDS = 0.25
"""Between two looks at what memory is left while no step is taken, as `PressureWatch` does it between steps."""


def respond_to_pressure(cache: PagedKVCache, scheduler: Scheduler) -> PressureResponse | None:
    """Watch the machine and the process's cgroups for as long as the cache lives.

    Args:
        cache: lends its unused blocks' memory.
        scheduler: over that cache.

    Returns:
        What is to be called between steps, and closed before the cache; None where the kernel does not say what memory
        is left.
    """
    budget = scarcest_budget()
    if budget is None:
        return None
    ladder = PressureLadder(PressureLimits.of(budget.limit))
    return PressureResponse(PressureWatch(), ladder, cache.balloon(), scheduler)


class Readable(Protocol):
    """A socket, a pipe, or anything else that has a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


def wait_for(
    readable: Sequence[int | Readable],
    seconds: float,
    pressure: PressureResponse | None,
    *,
    tend: Callable[[], None],
    idle: Callable[[], bool],
) -> bool:
    """Sleep while an engine is idle until something can be read, or so many seconds have passed.

    Args:
        readable: what new requests come by.
        seconds: 0 or more.
        pressure: hears at once when memory is short; None: nobody does.
        tend: looks after memory; called first, whenever `pressure` has heard something, and now and then.
        idle: whether to sleep on.

    Returns:
        Whether something can be read.

    Raises:
        UsageError: `seconds` is negative.
    """
    if not seconds >= 0:
        raise UsageError(f"nobody can wait for {seconds} seconds: give 0 or more", seconds=seconds)
    descriptors = [one if isinstance(one, int) else one.fileno() for one in readable]
    end = time.monotonic() + seconds
    while True:
        tend()
        left = max(0.0, end - time.monotonic()) if idle() else 0.0
        if _sleep(descriptors, min(left, LOOK_SECONDS), pressure):
            return True
        if not left:
            return False


def _sleep(descriptors: Sequence[int], seconds: float, pressure: PressureResponse | None) -> bool:
    if pressure is not None:
        return pressure.watch.wait(seconds, descriptors)
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))

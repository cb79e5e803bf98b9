"""What an engine does about memory pressure, with limits that fit the memory it lives in."""

from __future__ import annotations

from hostcache.cache import PagedKVCache
from hostcache.memory_budget import scarcest_budget
from hostcache.pressure import PressureLadder, PressureLimits
from hostcache.pressure_response import PressureResponse
from hostcache.pressure_watch import PressureWatch
from hostcache.scheduler import Scheduler

__all__ = ["respond_to_pressure"]


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

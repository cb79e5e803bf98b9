"""What is done when memory is short, in order: give back, pause, shed, refuse; and how it is undone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .balloon import Balloon
from .errors import RequestFailed, RequestRefused
from .pressure import PressureLadder, PressureLevel
from .pressure_watch import PressureWatch
from .request import FinishReason
from .scheduler import Scheduler

__all__ = ["PressureResponse", "PressureStats"]

WAIT_SECONDS = 0.05
"""Between two steps that could do nothing for want of memory."""

KEPT_SHARE = 8
"""An eighth of the pool is never given back: one request at a time goes on in it. Chosen, not measured."""

PATIENCE_SECONDS = 30.0
"""For memory to come back while nothing can be computed without it; what waits first fails then."""


@dataclass
class PressureStats:
    """What memory pressure has caused so far.

    Attributes:
        given_bytes: given back to the kernel.
        taken_bytes: taken again.
        pauses: times that admission was paused.
        shed: requests that were preempted.
        refused: requests that were refused.
        failed: requests that waited for memory which did not come back.
    """

    given_bytes: int = 0
    taken_bytes: int = 0
    pauses: int = 0
    shed: int = 0
    refused: int = 0
    failed: int = 0


class PressureResponse:
    """Ties what the kernel says to what the scheduler and the pool do.

    It works between steps, and starts no thread: call `tend` before each step, and now and then while nothing is to be
    computed.

    Args:
        watch: what the kernel says; this object owns it from now on.
        ladder: how far to go.
        balloon: of the scheduler's cache.
        scheduler: admits, preempts.
        clock: seconds.

    Attributes:
        watch: as given.
        ladder: as given.
        stats: counters.
    """

    def __init__(
        self,
        watch: PressureWatch,
        ladder: PressureLadder,
        balloon: Balloon,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watch = watch
        self.ladder = ladder
        self.stats = PressureStats()
        self._balloon = balloon
        self._extents = balloon.extents
        self._scheduler = scheduler
        self._clock = clock
        self._more_may_come = True
        self._held_out_since: float | None = None

    def tend(self) -> None:
        """Between two steps: look, and do what is due. Costs a system call when there is nothing to see."""
        reading = self.watch.read(self._clock())
        if reading is None:
            return
        level = self.ladder.update(self._clock(), reading)
        if level >= PressureLevel.PAUSE:
            self.stats.pauses += not self._scheduler.pause_reason
            self._scheduler.pause_admission(self.ladder.reason)
        else:
            self._scheduler.resume_admission()
        if level >= PressureLevel.SHED and self.ladder.short and self._scheduler.shed_lowest() is not None:
            self.stats.shed += 1
        if level > PressureLevel.CALM:
            self.stats.given_bytes += self._balloon.inflate(self.ladder.wanted(reading), self._spare())
            self._more_may_come = True
        elif self._balloon.given_bytes:
            taken = self._balloon.deflate(self.ladder.takeable(reading))
            self.stats.taken_bytes += taken
            self._more_may_come = taken > 0

    def after_schedule(self, rows: int) -> None:
        """Once a step is planned, of so many rows: bear with it if it can do nothing for want of withheld blocks."""
        starved = self._balloon.given_bytes and self._scheduler.waiting and not self._scheduler.running
        if rows or not starved:
            self._held_out_since = None
        else:
            self._hold_out()

    def check_admissible(self) -> None:
        """Do nothing unless new requests are refused now; it looks first, since nobody may have for long.

        Raises:
            RequestRefused: memory is short, and all else has been done.
        """
        self.tend()
        if self.ladder.level is PressureLevel.REFUSE:
            self.stats.refused += 1
            raise RequestRefused(
                f"no new requests while memory is short ({self.ladder.reason}): free memory, or try again in "
                f"{self.ladder.limits.calm_seconds:g} seconds",
                reason=self.ladder.reason,
            )

    def close(self) -> None:
        """Listen no longer. Safe to call twice."""
        self.watch.close()

    def _spare(self) -> int:
        """Extents to leave available: one for each running sequence, to grow by before somebody has to give way."""
        kept = self._extents.total // KEPT_SHARE - self._extents.used
        return max(len(self._scheduler.running), kept)

    def _hold_out(self) -> None:
        """Nothing runs for want of withheld blocks: wait a little, or fail the request that waits first.

        It fails when it is calm and no more memory can be had, or still short after `PATIENCE_SECONDS`.
        """
        now = self._clock()
        if self._held_out_since is None:
            self._held_out_since = now
        if self.ladder.level is PressureLevel.CALM:
            hopeless = not self._more_may_come
        else:
            hopeless = self.ladder.short and now - self._held_out_since >= PATIENCE_SECONDS
        if not hopeless:
            self.watch.wait(WAIT_SECONDS)
            return
        request = self._scheduler.waiting[0]
        given = self._balloon.given_bytes / 2**20
        error = RequestFailed(
            f"request {request.id} needs more blocks than memory is left for: {given:.1f} MiB of the pool were given "
            "back when memory was short, and cannot be had again; free memory, or load with a smaller pool",
            id=request.id,
            given_bytes=self._balloon.given_bytes,
        )
        self.stats.failed += 1
        self._scheduler.end(request, FinishReason.FAILED, error)

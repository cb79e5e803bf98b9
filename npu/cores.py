"""Which cores of a device are trusted, and what happened on them."""

from __future__ import annotations

import logging

from hostcache.errors import DeviceError

__all__ = ["QUARANTINE_AFTER", "Cores"]

QUARANTINE_AFTER = 3
"""Failures of a core without a success between them, after which it gets no more jobs."""

_log = logging.getLogger(__name__)


class Cores:
    """Spreads jobs over the cores that work.

    A core that failed `QUARANTINE_AFTER` times in a row, or holds a job that never ended, gets no more until the device
    is opened anew. Every failure is logged for the operator, without anything of the request.

    Args:
        count: cores of the device.

    Attributes:
        count: as given.
        launches: jobs that ended well.
        failures: jobs that failed, or whose result was not fresh.
        on_host: launches that the host computed in place of the device.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.launches = self.failures = self.on_host = 0
        self._in_flight = [0] * count
        self._in_a_row = [0] * count
        self._quarantined: set[int] = set()

    @property
    def quarantined(self) -> list[int]:
        """Cores that get no more jobs."""
        return sorted(self._quarantined)

    def pick(self, avoid: int | None = None) -> int | None:
        """The trusted core with the fewest jobs in flight, the lowest of several; None if there is none.

        Args:
            avoid: a core that is not wanted now.
        """
        trusted = [core for core in range(len(self._in_flight)) if core not in self._quarantined and core != avoid]
        return min(trusted, key=self._in_flight.__getitem__, default=None)

    def started(self, core: int) -> None:
        """A job was given to `core`."""
        self._in_flight[core] += 1

    def worked(self, core: int) -> None:
        """A job of `core` ended well."""
        self._in_flight[core] -= 1
        self._in_a_row[core] = 0
        self.launches += 1

    def refused(self, core: int, error: DeviceError) -> None:
        """A core did not take a job."""
        self._count(core, error, dead=False)

    def failed(self, core: int, error: DeviceError, *, ended: bool) -> None:
        """A job of `core` failed.

        Args:
            core: where it ran.
            error: what went wrong.
            ended: whether the core is free again.
        """
        self._in_flight[core] -= 1
        self._count(core, error, dead=not ended)

    def abandoned(self, core: int) -> None:
        """A job of `core` ended, but nobody wants its result."""
        self._in_flight[core] -= 1

    def _count(self, core: int, error: DeviceError, *, dead: bool) -> None:
        self.failures += 1
        self._in_a_row[core] += 1
        _log.warning("NPU core %d: %s", core, str(error))  # the error itself would keep its frames alive
        if core not in self._quarantined and (dead or self._in_a_row[core] >= QUARANTINE_AFTER):
            self._quarantined.add(core)
            left = len(self._in_flight) - len(self._quarantined)
            _log.error(
                "NPU core %d gets no more jobs, after %d failures in a row; %d cores are left%s. "
                "Load the model anew to try it again",
                core,
                self._in_a_row[core],
                left,
                "" if left else ", so attention runs on the CPU",
            )

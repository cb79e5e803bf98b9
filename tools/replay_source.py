"""Where the requests of a replay come from: a file, or a generator."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hostcache.errors import UsageError

from .replay_trace import TraceRequest, read_trace
from .replay_workload import Workload, generate
from .terminal import ProgressBar

__all__ = ["FileTrace", "MadeTrace", "TraceSource"]

DAY = 86400.0

UPDATE_EVERY = 256
"""Requests between two looks at the progress bar."""


class TraceSource(Protocol):
    """A trace that can be read several times."""

    @property
    def title(self) -> str:
        """What it is, for people."""

    @property
    def bounds(self) -> Sequence[float]:
        """Seconds at which its later phases begin."""

    def requests(self) -> Iterator[TraceRequest]:
        """All of it, from the start."""


@dataclass(frozen=True)
class FileTrace:
    """A trace in a file.

    Attributes:
        path: of it; `-` is stdin, which can be read once.
    """

    path: str

    @property
    def title(self) -> str:
        """As in `TraceSource`."""
        return "stdin" if self.path == "-" else self.path

    @property
    def bounds(self) -> Sequence[float]:
        """A file has one phase."""
        return ()

    def requests(self) -> Iterator[TraceRequest]:
        """As in `TraceSource`.

        Raises:
            UsageError: a line is no request, or stdin is closed.
            OSError: the file cannot be read.
        """
        if self.path != "-":
            with open(self.path, "rb") as stream:
                yield from read_trace(stream, self.title)
        elif sys.stdin is None:
            raise UsageError("stdin is closed: give the trace as a file")
        else:
            yield from read_trace(sys.stdin.buffer, self.title)


@dataclass(frozen=True)
class MadeTrace:
    """A trace made up as it is read.

    Attributes:
        workload: what its requests are like.
        rates: mean requests a second; several: each for an equal part of the time.
        seconds: how long requests arrive.
        seed: of the random numbers.
    """

    workload: Workload
    rates: Sequence[float]
    seconds: float
    seed: int

    @property
    def title(self) -> str:
        """As in `TraceSource`."""
        rates = ", ".join(f"{rate:.3g}" for rate in self.rates)
        return f"{self.workload.name}, {self.seconds / DAY:.3g} days, {rates} requests a second, seed {self.seed}"

    @property
    def bounds(self) -> Sequence[float]:
        """As in `TraceSource`."""
        return [self.seconds * number / len(self.rates) for number in range(1, len(self.rates))]

    def requests(self) -> Iterator[TraceRequest]:
        """As in `TraceSource`; a terminal shows how far it has come."""
        made = generate(self.workload, self.rates, self.seconds, self.seed)
        with ProgressBar("replaying", unit=_days) as bar:
            for number, request in enumerate(made):
                if number % UPDATE_EVERY == 0:
                    bar.update(int(request.arrival), int(self.seconds))
                yield request


def _days(seconds: int) -> str:
    return f"{seconds / DAY:.2f} days"

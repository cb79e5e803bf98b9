"""Requests whose time is up."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .errors import RequestFailed
from .request import Request, RequestState
from .timeline import Timeline

__all__ = ["Deadlines"]


class Deadlines:
    """Watches until when requests must have ended, and until when they must have been admitted."""

    def __init__(self) -> None:
        self._timeline = Timeline(_matters)

    def watch(self, request: Request) -> None:
        """Watch a new request's `deadline` and `admit_by`."""
        for when in (request.deadline, request.admit_by):
            if when < math.inf:
                self._timeline.add(when, request)

    def passed(self, now: float) -> Iterator[tuple[Request, RequestFailed]]:
        """Requests whose time is up, and what to tell them; each is to be ended before the next."""
        for request in self._timeline.due(now):
            late = "its deadline has passed" if request.deadline <= now else "it was not admitted in time"
            yield (
                request,
                RequestFailed(
                    f"request {request.id}: {late}; it is {request.state.value} with {len(request.output)} tokens "
                    "generated: allow more time, or send fewer requests",
                    id=request.id,
                    state=request.state.value,
                    deadline=request.deadline,
                    admit_by=request.admit_by,
                ),
            )


def _matters(when: float, request: Request) -> bool:
    waits = request.state is RequestState.WAITING
    return not request.finished and (when == request.deadline or (waits and when == request.admit_by))

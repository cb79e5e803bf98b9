"""One step at a time, of an open engine: what would disturb a step is refused, or waits for its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hostcache.errors import UsageError

__all__ = ["StepGuard"]


class StepGuard:
    """Says whether a step is under way, and keeps what has to wait for its end.

    A signal handler, a generator that is collected and another thread can all come in the middle of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put_off: list[Callable[[], None]] = []
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._lock.locked()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be the only step; when it is over, however it ends, do what was put off.

        Raises:
            UsageError: another one is under way, or the engine is closed.
        """
        self.check_open()
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "a step is under way already: step, generate and score come from one thread, and not from within a step"
            )
        try:
            yield
        finally:
            self._lock.release()
            while self._put_off:
                self._put_off.pop(0)()

    def put_off(self, action: Callable[[], None]) -> None:
        """Have something done when the step that is under way is over."""
        self._put_off.append(action)

    def check_open(self) -> None:
        """Do nothing before `close`.

        Raises:
            UsageError: the engine is closed.
        """
        if self._closed:
            raise UsageError("this engine is closed: load a new one")

    def close(self) -> None:
        """Let nothing begin any more. Safe to call twice.

        Raises:
            UsageError: a step is under way, and uses what would be given back.
        """
        if self.busy:
            raise UsageError("close came from within a step: call it when step has returned")
        self._closed = True

"""A thread for one NPU core: its jobs run in order, beside those of the other cores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["CoreWorker"]


class CoreWorker:
    """Runs work one piece after the other, in the order it came.

    A vendor's call that never returns keeps its thread for ever. So the thread is a daemon: unlike those of
    `concurrent.futures`, it does not keep the process from ending.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Hand over work; it can be cancelled as long as it has not begun."""
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def stop(self) -> None:
        """End the thread after the work that was handed over. Safe to call twice."""
        self._work.put(None)

    def stopped(self, seconds: float) -> bool:
        """Wait until the thread has ended, `seconds` at most, and say whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del item, future, work  # while waiting, nothing of a job is kept alive

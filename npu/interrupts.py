"""Holds Ctrl-C back while the books are half written.

Python runs a signal's handler between any two bytecodes of the main thread, and the usual one for Ctrl-C raises
KeyboardInterrupt there: after a request has left one list, say, and before it is in the other. Where that must not
happen, handlers wait for a moment at which everything can be undone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deliver_signals", "held_signals"]

ENDING = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals whose handlers commonly raise, to end the program or to end what takes too long."""

_held = False
_arrived: list[Callable[[], object]] = []  # handlers to run, with their arguments; only the main thread touches it


@contextmanager
def held_signals() -> Iterator[None]:
    """Within the block, handlers of `ENDING` wait for `deliver_signals` or for the end of the block.

    It does nothing inside another such block, nor outside the main thread, where no handler ever runs.
    """
    global _held  # noqa: PLW0603 - handlers belong to the process
    if _held or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Neither signals that are ignored, nor those that end the process on the spot.
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}

    def hold(number: int, frame: FrameType | None) -> None:
        _arrived.append(lambda: handlers[signal.Signals(number)](number, frame))

    try:
        for number in handlers:
            signal.signal(number, hold)
        _held = True
        yield
    finally:
        _held = False
        for number, handler in reversed(handlers.items()):
            signal.signal(number, handler)
        deliver_signals()


def deliver_signals() -> None:
    """Run the handlers that wait and raise what they raise; for moments at which the caller can undo what it began."""
    while _arrived and threading.current_thread() is threading.main_thread():
        _arrived.pop(0)()

"""Signals that end the command, as exceptions: what it holds is given back on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Unwinding", "unwinding_signals"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Unwinding:
    """What ended the command, if a signal did.

    Attributes:
        status: 128 + the signal's number; None as long as none came. An exception may get lost on its way, in a C
            library's initialisation or in a destructor: this is not.
    """

    def __init__(self) -> None:
        self.status: int | None = None


@contextmanager
def unwinding_signals() -> Iterator[Unwinding]:
    """Within the block SIGINT raises KeyboardInterrupt; SIGTERM and SIGHUP raise SystemExit with status 128 + number.

    By default the latter two would end the process on the spot and leave its temporary files. Whoever sends a second
    signal does not want to wait for that: it ends the process by its default action. A signal that the caller has
    ignored or handles (`nohup`, a library) stays as it is, as do all of them outside the main thread.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in ENDING if (handler := signal.getsignal(number)) in defaults}
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers nowhere else
        before = {}

    unwinding = Unwinding()

    def unwind(number: int, _: FrameType | None) -> None:
        unwinding.status = 128 + number
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, unwind)
    try:
        yield unwinding
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The user's terminal: left as it was found, and a progress bar for those who watch."""

from __future__ import annotations

import contextlib
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from npu.sizes import format_size

__all__ = ["ProgressBar", "preserved_terminal", "tell"]

BAR_WIDTH = 30
REDRAW_SECONDS = 0.2  # slow enough for a serial line: 80 characters at 9600 baud take 0.08 s


@contextmanager
def preserved_terminal() -> Iterator[None]:
    """Put the terminal's modes back at the end, however the block ends."""
    try:
        descriptor = sys.stdin.fileno()
        modes = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):  # no stdin, closed, or not a terminal
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):  # it may have gone meanwhile
            # Only what has changed: setting modes from the background would stop the whole job (SIGTTOU).
            if termios.tcgetattr(descriptor) != modes:
                termios.tcsetattr(descriptor, termios.TCSANOW, modes)  # not DRAIN: output may be stopped (Ctrl-S)


def tell(what: str) -> None:
    """A line on stderr that says what takes a while now; nothing where that is no terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"{what} ...\n")


class ProgressBar:
    """A line on stderr that follows a number, of bytes by default; silent where stderr is no terminal.

    Args:
        label: what is going on.
        unit: writes the number for people.
        stream: where to draw; stderr by default, so that stdout stays clean.
        shown: False never draws.
    """

    def __init__(
        self,
        label: str,
        *,
        unit: Callable[[int], str] = format_size,
        stream: TextIO | None = None,
        shown: bool = True,
    ) -> None:
        self._label = label
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown and self._stream.isatty()
        self._drawn_at = 0.0

    def update(self, done: int, total: int) -> None:
        """Draw `done` of `total`, at most a few times a second."""
        now = time.monotonic()
        if not self._shown or (now - self._drawn_at < REDRAW_SECONDS and done < total):
            return
        self._drawn_at = now
        filled = BAR_WIDTH * min(done, total) // max(total, 1)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        self._stream.write(f"\r{self._label} [{bar}] {self._unit(done)} of {self._unit(total)}")
        self._stream.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line, if one was drawn, so that what comes next starts on its own."""
        if self._drawn_at:
            self._stream.write("\n")
            self._stream.flush()

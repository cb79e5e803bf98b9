"""The standard streams: usable whatever the caller left of them, and complaints as one line."""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["complain", "one_line", "prepare_streams"]

LONGEST_LINE = 1000
"""Characters of a complaint; what an argument or a file put into it beyond that is cut out of its middle."""


def prepare_streams() -> None:
    """Make sure that output is not lost to an encoding, nor written to a file that took a stream's place.

    A stream that the caller closed is None in Python, and the next file to be opened gets its number: a library
    that writes to "stderr" would then write into that file. /dev/null takes the number instead.
    """
    for descriptor in range(3):
        if not _is_open(descriptor):
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what an old locale cannot show


def complain(message: str) -> None:
    """Write `rockpage: error: MESSAGE` to stderr, as one line whatever the message holds."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # a full disk behind stderr: the exit status still tells
            sys.stderr.write(f"rockpage: error: {one_line(message)}\n")
            sys.stderr.flush()


def one_line(text: str) -> str:
    """Text from outside on one printable line: it may hold line breaks, terminal escapes, or a megabyte."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2  # the end is kept for the way out, which it names
    return f"{line[:half]} ... {line[-half:]}"


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

"""Text that the user gives: on the command line, in a file, or on stdin."""

from __future__ import annotations

import json
import os
import reprlib
import sys

__all__ = ["read_ids", "read_text"]

TEXT_LIMIT = 1 << 20
"""Bytes of text read at most: 8 for each token of the longest context of Llama-type models, 131,072.

Tokenising takes 200 to 340 bytes of memory for a byte of text (tokenizers 0.22), so this also bounds that.
"""


def read_text(text: str | None, path: str | None) -> str:
    """The text itself, or a file's content, or stdin (also for the path `-`).

    Raises:
        UsageError: both are given, the text cannot be read, is too long, or is not UTF-8.
    """
    from hostcache.errors import UsageError

    if text is not None and path is not None:
        raise UsageError("give the text or a file, not both")
    if text is not None:
        return text
    if path == "-":
        path = None
    name = "stdin" if path is None else path
    try:
        content = _read(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {name}: {reason}", name=name, reason=reason) from error
    if len(content) > TEXT_LIMIT:
        raise UsageError(f"{name} holds more than {TEXT_LIMIT >> 20} MiB of text: shorten or split it", name=name)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8: byte {error.start} is 0x{content[error.start]:02x}; convert it first",
            name=name,
            offset=error.start,
        ) from error


def read_ids(path: str) -> list[int]:
    """Token ids from a file that holds a JSON list.

    Raises:
        UsageError: it does not, or cannot be read.
    """
    from hostcache.errors import UsageError

    text = read_text(None, path)
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON list of token ids: {error}", path=path) from error
    if not isinstance(ids, list):
        raise UsageError(f"{path} is not a JSON list of token ids: it holds a {type(ids).__name__}", path=path)
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise UsageError(
                f"{path} is not a JSON list of token ids: element {index} is {reprlib.repr(token)}",
                path=path,
                index=index,
            )
    return ids


def _read(path: str | None) -> bytes:
    """The first `TEXT_LIMIT` bytes of a file, or of stdin if `path` is None, and one more if there are more."""
    if path is not None:
        with open(path, "rb", opener=_open_at_once) as file:
            os.set_blocking(file.fileno(), True)  # a writer that is there may take its time
            return file.read(TEXT_LIMIT + 1)
    if sys.stdin is None:
        raise OSError("it is closed")
    if sys.stdin.isatty() and sys.stderr is not None:
        sys.stderr.write("rockpage: reading from the terminal; Ctrl-D ends the text\n")
    return sys.stdin.buffer.read(TEXT_LIMIT + 1)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a FIFO that nobody writes to is empty, where a plain open would wait for ever."""
    return os.open(path, flags | os.O_NONBLOCK)

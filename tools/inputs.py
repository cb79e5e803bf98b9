"""Text that the user gives: on the command line, in a file, or on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["read_ids", "read_text"]

TEXT_LIMIT = 64 << 20
"""Bytes of text read at most: far beyond any context, far below what would hurt."""


def read_text(text: str | None, path: str | None) -> str:
    """The text itself, or a file's content, or stdin (also for the path `-`).

    Raises:
        UsageError: both are given, the text is too long, or it is not UTF-8.
        OSError: the file cannot be read.
    """
    from hostcache.errors import UsageError

    if text is not None and path is not None:
        raise UsageError("give the text or a file, not both")
    if text is not None:
        return text
    name = "stdin" if path in (None, "-") else str(path)
    if name == "stdin":
        content = sys.stdin.buffer.read(TEXT_LIMIT + 1)
    else:
        with Path(name).open("rb") as file:
            content = file.read(TEXT_LIMIT + 1)
    if len(content) > TEXT_LIMIT:
        raise UsageError(f"{name} holds more than {TEXT_LIMIT >> 20} MiB of text", limit=TEXT_LIMIT)
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
        UsageError: it does not.
        OSError: the file cannot be read.
    """
    from hostcache.errors import UsageError

    text = read_text(None, path)
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON list of token ids: {error}", path=path) from error
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise UsageError(f"{path} is not a JSON list of token ids", path=path)
    return ids

"""The small JSON and text files of a Hugging Face model folder, read with their size and shape checked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hostcache.errors import BadModelFile

from .mapped_file import open_regular_file

__all__ = ["read_object", "read_text"]

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, by its escape; text itself cannot hold one

_LARGEST = 64 << 20
"""Bytes; a tokenizer.json with 256,000 tokens has 33 MB."""


def read_text(path: Path) -> str | None:
    """The text of a file, None when there is no such file.

    Raises:
        BadModelFile: it is larger than 64 MiB or not UTF-8.
        UsageError: it cannot be opened, or is not a regular file.
    """
    fd = open_regular_file(path)
    if fd is None:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise BadModelFile(f"{path} is larger than {_LARGEST} bytes; fetch it again", path=str(path))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadModelFile(
            f"{path} is not UTF-8 (byte {error.start}); fetch it again", path=str(path), position=error.start
        ) from error


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None when there is no such file.

    Raises:
        BadModelFile: it is larger than 64 MiB, not UTF-8, not one JSON object, or holds half a character.
        UsageError: it cannot be opened, or is not a regular file.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # mostly whole ones, in two escapes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not JSON ({error}); fetch it again", path=str(path)) from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path} holds a {type(value).__name__}, not a JSON object; fetch it again", path=str(path))
    return value

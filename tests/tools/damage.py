"""Breaks the bytes of a sound GGUF file in one place and leaves everything else as it is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Damage", "behind", "cut", "dimension", "entry", "put", "renamed", "u32", "u64", "value"]

Damage: TypeAlias = Callable[[bytes], bytes]
"""From the bytes of a sound file to those of a damaged one."""


def u32(number: int) -> bytes:
    """As the format stores counts of dimensions, types and most sizes of a model."""
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    """As the format stores lengths, counts and dimensions."""
    return struct.pack("<Q", number)


def put(at: int, data: bytes) -> Damage:
    """Write over what stands at a place."""
    return lambda raw: raw[:at] + data + raw[at + len(data) :]


def behind(marker: str, distance: int, data: bytes) -> Damage:
    """Write over what stands `distance` bytes behind the first `marker`."""
    return lambda raw: put(_end(raw, marker) + distance, data)(raw)


def value(key: str, data: bytes) -> Damage:
    """Change the value of a metadata key: behind the key and four bytes of type."""
    return behind(key, 4, data)


def dimension(tensor: str, index: int, size: int) -> Damage:
    """Change a dimension of a tensor, in the file's order: columns first. In front of them stands their count."""
    return behind(tensor, 4 + 8 * index, u64(size))


def entry(tensor: str, kind: int) -> Damage:
    """Change the type of a matrix: behind two dimensions."""
    return behind(tensor, 4 + 2 * 8, u32(kind))


def renamed(old: str, new: str) -> Damage:
    """Write another text of the same length over the first `old`."""
    assert len(old) == len(new)
    return behind(old, -len(old), new.encode())


def cut(marker: str, distance: int = 0) -> Damage:
    """Cut the file `distance` bytes behind the first `marker`."""
    return lambda raw: raw[: _end(raw, marker) + distance]


def _end(raw: bytes, marker: str) -> int:
    return raw.index(marker.encode()) + len(marker)

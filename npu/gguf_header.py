"""Parses the header of a GGUF file: everything in front of the tensors' bytes.

    "GGUF" | version u32 | tensors u64 | pairs u64
    pairs   x (key string | value type u32 | value)
    tensors x (name string | dims u32 | dims x u64, fastest first | type u32 | offset u64)
    padding to `general.alignment`, then the tensors' bytes at their offsets

Nothing in it is believed: each count is held against the bytes that remain before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np

from hostcache.errors import BadModelFile, UnsupportedModel

from .ggml import GGMLType

__all__ = ["GGUFHeader", "MetaValue", "TensorInfo"]

MetaValue: TypeAlias = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]
"""A metadata value; every integer width reads as int, every float width as float."""

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32  # of the format, when `general.alignment` is absent
_MAX_DIMS = 4  # GGML_MAX_DIMS

# Real headers are a few MiB (vocabulary and merges) with hundreds of entries. The limits bound what a hostile one can
# make us allocate: at worst 8 bytes of list for each byte of an array of uint8.
_HEADER_LIMIT = 32 << 20
_ENTRIES_LIMIT = 1 << 16

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")} | {
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ARRAY_DTYPES = {number: np.dtype("<" + layout.format[1:]) for number, layout in _SCALARS.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory.

    Attributes:
        name: unique in the file.
        shape: in numpy's order: rows first, the contiguous dimension last.
        type: how elements are stored.
        offset: bytes from the start of the file.
        nbytes: bytes of the tensor; `offset + nbytes` lies within the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class GGUFHeader:
    """A header, read from front to back: `_at` is the next byte to read.

    `where` arguments name the part being read; they reach the user in messages.

    Args:
        path: names the file in messages.
        mapping: the whole file.

    Attributes:
        version: the format's version.
        metadata: every key with its value.
        tensors: the tensor directory, in the file's order.

    Raises:
        BadModelFile: not GGUF, cut short, or contradicting itself.
        UnsupportedModel: big endian, a version other than 2 or 3, or an unknown tensor type.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self._path = path
        self._map = mapping
        self._at = 0
        self._end = min(len(mapping), _HEADER_LIMIT)
        self.version = self._read_version()
        tensors = self._count("tensor")
        pairs = self._count("metadata")
        self.metadata: dict[str, MetaValue] = self._read_metadata(pairs)
        self.tensors: dict[str, TensorInfo] = self._read_tensors(tensors)

    def _read_version(self) -> int:
        magic = self._map[:4]
        if magic != b"GGUF":
            self._fail(f"starts with {magic!r}, not with b'GGUF': not a GGUF model", magic=magic)
        self._at = 4
        version = self._number(_U32, "the version")
        if version in _VERSIONS:
            return version
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian version {swapped}" if swapped in _VERSIONS else f"version {version}"
        raise UnsupportedModel(
            f"{self._path}: GGUF {kind}; rockpage reads little-endian versions 2 and 3: convert it with a current"
            " llama.cpp",
            path=str(self._path),
            version=version,
        )

    def _count(self, what: str) -> int:
        count = self._number(_U64, f"the {what} count")
        if count > _ENTRIES_LIMIT:
            self._fail(f"the {what} count is {count}; rockpage reads up to {_ENTRIES_LIMIT}", count=count)
        return count

    def _read_metadata(self, pairs: int) -> dict[str, MetaValue]:
        metadata: dict[str, MetaValue] = {}
        for index in range(pairs):
            key = self._string(f"metadata key {index}")
            if key in metadata:
                self._fail(f"metadata key '{key}' occurs twice", key=key)
            metadata[key] = self._value(f"metadata key '{key}'")
        return metadata

    def _value(self, where: str) -> MetaValue:
        kind = self._number(_U32, where)
        if kind == _STRING:
            return self._string(where)
        if kind == _ARRAY:
            return self._array(where)
        layout = _SCALARS.get(kind)
        if layout is None:
            self._fail(f"{where} has the unknown value type {kind}", type=kind)
        if kind == _BOOL:
            return self._bools(1, where)[0]
        self._need(layout.size, where)
        (value,) = layout.unpack_from(self._map, self._at)
        self._at += layout.size
        number: int | float = value
        return number

    def _array(self, where: str) -> MetaValue:
        kind = self._number(_U32, where)
        count = self._number(_U64, where)
        if kind == _STRING:
            return self._strings(count, where)
        if kind == _BOOL:
            return self._bools(count, where)
        dtype = _ARRAY_DTYPES.get(kind)
        if dtype is None:
            self._fail(f"{where} is an array of the unsupported element type {kind}", type=kind)
        self._need(count * dtype.itemsize, f"{where}, an array of {count} elements,")
        values: list[int] | list[float] = np.frombuffer(self._map, dtype, count, self._at).tolist()
        self._at += count * dtype.itemsize
        return values

    def _bools(self, count: int, where: str) -> list[bool]:
        self._need(count, f"{where}, {count} booleans,")
        values = np.frombuffer(self._map, np.uint8, count, self._at)
        if values.size and values.max() > 1:
            self._fail(f"{where} holds a boolean of {values.max()}; only 0 and 1 exist", value=int(values.max()))
        self._at += count
        flags: list[bool] = values.astype(np.bool_).tolist()
        return flags

    def _strings(self, count: int, where: str) -> list[str]:
        self._need(count * _U64.size, f"{where}, an array of {count} strings,")
        strings: list[str] = []
        # Vocabularies have 10^5 strings: this loop does no more than it must, and leaves a bad one to `_string`.
        data, end, at = self._map, self._end, self._at
        unpack, prefix = _U64.unpack_from, _U64.size
        while len(strings) < count and at + prefix <= end:
            stop = at + prefix + unpack(data, at)[0]
            if stop > end:
                break
            try:
                strings.append(data[at + prefix : stop].decode())
            except UnicodeDecodeError:
                break
            at = stop
        self._at = at
        while len(strings) < count:
            strings.append(self._string(f"{where}, element {len(strings)},"))
        return strings

    def _string(self, where: str) -> str:
        length = self._number(_U64, where)
        self._need(length, where)
        start, self._at = self._at, self._at + length
        try:
            return self._map[start : self._at].decode()
        except UnicodeDecodeError as error:
            self._fail(f"{where} at byte {start} is not valid UTF-8 ({error.reason})", at=start)

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        entries = [self._tensor_entry(f"tensor {index}") for index in range(count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of two", alignment=alignment)
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                self._fail(f"tensor '{name}' occurs twice", tensor=name)
            if offset % alignment:
                self._fail(f"tensor '{name}' lies at {offset}, not a multiple of {alignment}", offset=offset)
            nbytes = kind.bytes_of(math.prod(shape))
            if start + offset + nbytes > len(self._map):
                self._fail(
                    f"tensor '{name}' {list(shape)} {kind.name} ends at byte {start + offset + nbytes}, but the file"
                    f" has {len(self._map)}",
                    tensor=name,
                    end=start + offset + nbytes,
                    size=len(self._map),
                )
            tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
        return tensors

    def _tensor_entry(self, where: str) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self._string(f"the name of {where}")
        where = f"tensor '{name}'"
        dims = self._number(_U32, where)
        if not 1 <= dims <= _MAX_DIMS:
            self._fail(f"{where} has {dims} dimensions; GGML knows 1 to {_MAX_DIMS}", dims=dims)
        shape = tuple(self._number(_U64, where) for _ in range(dims))[::-1]
        number = self._number(_U32, where)
        offset = self._number(_U64, where)
        try:
            kind = GGMLType(number)
        except ValueError:
            raise UnsupportedModel(
                f"{self._path}: {where} has the unknown type {number}; convert the model to Q4_0, Q4_1, Q8_0 or F16",
                path=str(self._path),
                tensor=name,
                type=number,
            ) from None
        if 0 in shape or shape[-1] % kind.block_elements:
            self._fail(
                f"{where} {list(shape)} is not made of whole {kind.name} blocks of {kind.block_elements} elements",
                tensor=name,
                shape=shape,
            )
        return name, shape, kind, offset

    def _number(self, layout: struct.Struct, where: str) -> int:
        self._need(layout.size, where)
        (value,) = layout.unpack_from(self._map, self._at)
        self._at += layout.size
        number: int = value
        return number

    def _need(self, nbytes: int, where: str) -> None:
        if nbytes > self._end - self._at:
            self._fail_short(nbytes, where)

    def _fail_short(self, nbytes: int, where: str) -> NoReturn:
        limit = f"the file has {len(self._map)}" if self._end == len(self._map) else f"headers end by {self._end}"
        self._fail(f"{where} takes {nbytes} bytes at byte {self._at}, but {limit}", at=self._at, needed=nbytes)

    def _fail(self, problem: str, **values: Any) -> NoReturn:  # noqa: ANN401 - values of any type are carried
        message = f"{self._path}: {problem}; the file is damaged or cut short: fetch it again"
        raise BadModelFile(message, path=str(self._path), **values)

"""GGUF files that were sound: one is taken apart, changed in a few places, and put together again.

A change says what it does to the structure (a value, a count, a shape), so that the rest of the file still fits and
what lies behind the header's checks is reached; or it writes over bytes, whatever they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from npu.ggml import GGMLType
from tests.fuzz.gguf_seeds import ARRAY, FORMATS, MORE_PAIRS, SEEDS, STRING, Pair, TensorEntry, parts_of, string
from tests.fuzz.raw_bytes import Change, change_bytes, changes_of_bytes
from tests.fuzz.values import FLOATS, INTEGERS, TEXTS

__all__ = ["GGUFCase", "gguf_cases"]


@dataclass(frozen=True)
class GGUFCase:
    """A seed and what is done to it."""

    seed: str
    changes: list[Change] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The file."""
        parts = parts_of(self.seed)
        draft = _Draft(parts.version, list(parts.pairs), list(parts.tensors), bytearray(parts.data))
        # Arrays are changed while they are still the seed's.
        in_order = sorted(self.changes, key=lambda change: change[0] not in ("element", "short"))
        in_bytes = [change for change in in_order if not draft.apply(change)]
        raw = draft.to_bytes()
        for change in in_bytes:
            raw = change_bytes(raw, change)
        return raw


@dataclass
class _Draft:
    """A file in parts that may be changed."""

    version: int
    pairs: list[Pair]
    tensors: list[TensorEntry]
    data: bytearray
    counts: tuple[int, int] | None = None

    def to_bytes(self) -> bytes:
        tensors, pairs = self.counts or (len(self.tensors), len(self.pairs))
        header = b"GGUF" + struct.pack("<IQQ", self.version, tensors, pairs)
        for key, kind, value in self.pairs:
            header += string(key) + struct.pack("<I", kind) + value
        for name, dims, kind, offset in self.tensors:
            header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return header + bytes(-len(header) % 32) + self.data

    def apply(self, change: Change) -> bool:
        """Do what a change says; False if it is one of bytes."""
        match change:
            case ("version", version):
                self.version = version
            case ("counts", tensors, pairs):
                self.counts = tensors, pairs
            case ("value", key, kind, value):
                self._set(key, kind, value)
            case ("vocabulary", count):
                texts = b"".join(string(b"%x" % number) for number in range(count))
                self._set(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, count) + texts)
                self._set(b"tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ", 5, count) + b"\1\0\0\0" * count)
                self._set(b"tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 0))
            case ("element" | "short" as what, key, index, value):
                edit = _with_element if what == "element" else _shortened
                self.pairs = [
                    (*pair[:2], edit(pair[2], index, value)) if pair[0] == key else pair for pair in self.pairs
                ]
            case ("twice", "pairs" | "tensors" as part, index):
                entries = getattr(self, part)
                entries.insert(index % len(entries), entries[index // 2 % len(entries)])
            case ("without", "pairs" | "tensors" as part, index):
                entries = getattr(self, part)
                del entries[index % len(entries)]
            case ("tensor", index, place, value):
                entry: list[Any] = list(self.tensors[index % len(self.tensors)])
                entry[place] = value
                self.tensors[index % len(self.tensors)] = tuple(entry)
            case ("fill", at, length, byte):
                at %= len(self.data)
                self.data[at : at + length] = bytes([byte]) * len(self.data[at : at + length])
            case _:
                return False
        return True

    def _set(self, key: bytes, kind: int, value: bytes) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] != key]
        self.pairs.append((key, kind, value))


def _split_array(value: bytes) -> tuple[int, list[bytes]]:
    """The type of an array's elements, and the bytes of each, of a text without its length."""
    kind, count = struct.unpack_from("<IQ", value)
    at, items = 12, []
    for _ in range(count):
        size = struct.unpack_from("<Q", value, at)[0] if kind == STRING else struct.calcsize("<" + FORMATS[kind])
        at += 8 if kind == STRING else 0
        items.append(value[at : at + size])
        at += size
    return kind, items


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(string(item) if kind == STRING else item for item in items)


def _with_element(value: bytes, index: int, element: bytes) -> bytes:
    """An array with one element replaced: a text by these bytes, a number by as many of them as it has."""
    kind, items = _split_array(value)
    if not items:
        return value
    size = len(element) if kind == STRING else len(items[0])
    items[index % len(items)] = element[:size].ljust(size, b"\0")
    return _array(kind, items)


def _shortened(value: bytes, index: int, _: bytes) -> bytes:
    """An array that ends earlier, if at all."""
    kind, items = _split_array(value)
    return _array(kind, items[: index % (len(items) + 1)])


# Strategies


@st.composite
def gguf_cases(draw: st.DrawFn) -> GGUFCase:
    """Any seed with up to three changes."""
    return GGUFCase(draw(_SEED_NAMES), [_CHANGES[draw(_KINDS)](draw) for _ in range(draw(_COUNTS))])


_SEED_NAMES = st.sampled_from(SEEDS)
_COUNTS = st.sampled_from([1, 1, 1, 2, 3])
_INDICES, _ALL_PLACES, _ODD = st.integers(0, 300), st.integers(0, 1 << 16), st.booleans()
_SIZES = st.integers(0, 40) | INTEGERS.map(lambda number: number % 2**64)
_U32 = st.integers(0, 40) | INTEGERS.map(lambda number: number % 2**32)
_RAW_TEXTS = TEXTS.map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=6)
_TENSOR_PARTS = (
    _RAW_TEXTS,
    st.lists(_SIZES, max_size=6).map(tuple),
    st.sampled_from(list(map(int, GGMLType))) | _U32,
    _SIZES,
)
_PARTS = st.sampled_from(["pairs", "tensors"])
_LISTS = st.sampled_from([f"tokenizer.ggml.{name}".encode() for name in ("tokens", "token_type", "merges", "scores")])
_FILLS = st.tuples(st.sampled_from([1, 2, 64, 1 << 20]), st.sampled_from([0x00, 0x7C, 0x7F, 0x80, 0xFF]))
_VOCABULARIES = st.sampled_from([0, 1, 300, 20_000])
_OF_BYTES = changes_of_bytes()
_VALUE_TYPES = st.sampled_from([*FORMATS, STRING, STRING, STRING, ARRAY, ARRAY, 13, 2**32 - 1])


def _numbers(kind: int) -> st.SearchStrategy[bytes]:
    if FORMATS[kind] in "fd":
        return FLOATS.map(lambda number: _rounded(number, np.float32 if FORMATS[kind] == "f" else np.float64))
    size = struct.calcsize("<" + FORMATS[kind])
    return INTEGERS.map(lambda number: (number % (1 << 8 * size)).to_bytes(size, "little"))


def _rounded(number: float, kind: type[np.floating[Any]]) -> bytes:
    with np.errstate(over="ignore", under="ignore"):
        return kind(number).tobytes()


_NUMBERS = {kind: _numbers(kind) for kind in FORMATS}


@cache
def _pairs() -> st.SearchStrategy[Pair]:
    return st.sampled_from([*parts_of("Q4_1").pairs, *MORE_PAIRS])


def _value_change(draw: st.DrawFn) -> Change:
    """Another value for a key: every other time of the type it should have."""
    key, usual, _ = draw(_pairs())
    kind = draw(_VALUE_TYPES) if draw(_ODD) else usual
    return "value", key, kind, _value(draw, kind)


def _value(draw: st.DrawFn, kind: int) -> bytes:
    if kind in FORMATS:
        return draw(_NUMBERS[kind])
    if kind == STRING:
        return string(draw(_RAW_TEXTS))
    if kind != ARRAY:
        return draw(_RAW_TEXTS)
    element = draw(_VALUE_TYPES)
    if element == ARRAY:  # nested, which GGUF allows and no model needs
        return struct.pack("<IQ", ARRAY, 1) * draw(_INDICES)
    items = [_value(draw, element) for _ in range(draw(_COUNTS))]
    claimed = draw(_SIZES) if draw(_COUNTS) == 3 else len(items)
    return struct.pack("<IQ", element, claimed) + b"".join(items)


def _tensor_change(draw: st.DrawFn) -> Change:
    place = draw(st.sampled_from(range(len(_TENSOR_PARTS))))
    return "tensor", draw(_INDICES), place, draw(_TENSOR_PARTS[place])


_CHANGES: dict[str, Callable[[st.DrawFn], Change]] = {
    "value": _value_change,
    "tensor": _tensor_change,
    "element": lambda draw: ("element", draw(_LISTS), draw(_INDICES), draw(_RAW_TEXTS)),
    "short": lambda draw: ("short", draw(_LISTS), draw(_INDICES), b""),
    "twice": lambda draw: ("twice", draw(_PARTS), draw(_INDICES)),
    "without": lambda draw: ("without", draw(_PARTS), draw(_INDICES)),
    "counts": lambda draw: ("counts", draw(_SIZES), draw(_SIZES)),
    "version": lambda draw: ("version", draw(_U32)),
    "vocabulary": lambda draw: ("vocabulary", draw(_VOCABULARIES)),
    "fill": lambda draw: ("fill", draw(_ALL_PLACES), *draw(_FILLS)),
    "bytes": lambda draw: draw(_OF_BYTES),
}
_KINDS = st.sampled_from([*_CHANGES, *["value"] * 8, "tensor", "element", "fill", "fill"])

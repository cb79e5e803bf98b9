"""GGUF files that were sound: one is taken apart, changed in a few places, and put together again.

A change says what it does to the structure (a value, a count, a shape), so that the rest of the file still fits and
what lies behind the header's checks is reached; or it writes over bytes, whatever they are.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hypothesis import strategies as st

from npu.ggml import GGMLType
from tests.fuzz.raw_bytes import Change, change_bytes, changes_of_bytes
from tests.fuzz.values import FLOATS, INTEGERS, TEXTS
from tests.npu.tiny import TinyLlama, write_tiny_llama

__all__ = ["SEEDS", "GGUFCase", "gguf_cases"]

_OF_32 = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
_OF_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_SMALL = TinyLlama(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32)
_WIDE = TinyLlama(layers=1, hidden=256, heads=2, kv_heads=1, head_dim=128, ffn=256)
SEEDS = {
    **{kind: replace(_SMALL, matrix_type=kind) for kind in _OF_32},
    **{kind: replace(_WIDE, matrix_type=kind, embedding_type=kind) for kind in _OF_256},
}
"""A tiny model of each type of matrix that is run."""

_STRING, _ARRAY = 8, 9
_FORMATS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}  # of scalar value types, for `struct`
_FLOAT_TYPES = {6: np.float32, 12: np.float64}

_MORE_KEYS = (
    "general.alignment",
    "llama.expert_count",
    "llama.attention.sliding_window",
    *(
        f"llama.rope.{name}"
        for name in (
            "scale_linear",
            "scaling.type",
            "scaling.factor",
            "scaling.attn_factor",
            "scaling.original_context_length",
            "scaling.yarn_beta_fast",
            "scaling.yarn_beta_slow",
            "scaling.yarn_ext_factor",
        )
    ),
    *(
        f"tokenizer.ggml.{name}"
        for name in (
            "scores",
            "add_space_prefix",
            "precompiled_charsmap",
            "eot_token_id",
            "unknown_token_id",
            "padding_token_id",
        )
    ),
    "tokenizer.chat_template.tool_use",
)
"""Keys that are read and that no seed has."""


@dataclass(frozen=True)
class GGUFCase:
    """A seed and what is done to it."""

    seed: str
    changes: list[Change] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The file."""
        version, pairs, tensors, data = _parts_of(self.seed)
        draft = _Draft(version, list(pairs), list(tensors), bytearray(data))
        elements_first = sorted(
            self.changes, key=lambda change: change[0] != "element"
        )  # the lists are still the seed's
        in_bytes = [change for change in elements_first if not draft.apply(change)]
        raw = draft.to_bytes()
        for change in in_bytes:
            raw = change_bytes(raw, change)
        return raw


@dataclass
class _Draft:
    """A file in parts: pairs of (key, value type, value), tensors of (name, dims, type, offset), and their bytes."""

    version: int
    pairs: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, tuple[int, ...], int, int]]
    data: bytearray
    counts: tuple[int, int] | None = None

    def to_bytes(self) -> bytes:
        tensors, pairs = self.counts or (len(self.tensors), len(self.pairs))
        header = b"GGUF" + struct.pack("<IQQ", self.version, tensors, pairs)
        for key, kind, value in self.pairs:
            header += _string(key) + struct.pack("<I", kind) + value
        for name, dims, kind, offset in self.tensors:
            header += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
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
                texts = b"".join(_string(b"%x" % number) for number in range(count))
                self._set("tokenizer.ggml.tokens", _ARRAY, struct.pack("<IQ", _STRING, count) + texts)
                self._set("tokenizer.ggml.token_type", _ARRAY, struct.pack("<IQ", 5, count) + b"\1\0\0\0" * count)
                self._set("tokenizer.ggml.merges", _ARRAY, struct.pack("<IQ", _STRING, 0))
            case ("element", key, index, value):
                self.pairs = [
                    (*pair[:2], _with_element(pair[2], index, value)) if pair[0] == key.encode() else pair
                    for pair in self.pairs
                ]
            case ("twice", "pairs" | "tensors" as part, index):
                entries = getattr(self, part)
                entries.insert(index % len(entries), entries[index // 2 % len(entries)])
            case ("without", "pairs" | "tensors" as part, index):
                entries = getattr(self, part)
                del entries[index % len(entries)]
            case ("tensor", index, place, value):
                entry = list(self.tensors[index % len(self.tensors)])
                entry[place] = value
                self.tensors[index % len(self.tensors)] = tuple(entry)
            case ("fill", at, length, byte):
                at %= len(self.data)
                self.data[at : at + length] = bytes([byte]) * len(self.data[at : at + length])
            case _:
                return False
        return True

    def _set(self, key: str, kind: int, value: bytes) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] != key.encode()]
        self.pairs.append((key.encode(), kind, value))


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _with_element(value: bytes, index: int, element: bytes) -> bytes:
    """An array's value with one element replaced: a text by its bytes, a number by as many bytes as it has."""
    kind, count = struct.unpack_from("<IQ", value)
    head, rest = value[:12], value[12:]
    if kind != _STRING:
        size = struct.calcsize("<" + _FORMATS[kind])
        at = index % count * size
        return head + rest[:at] + element[:size].ljust(size, b"\0") + rest[at + size :]
    at = 0
    for _ in range(index % count):
        at += 8 + struct.unpack_from("<Q", rest, at)[0]
    behind = at + 8 + struct.unpack_from("<Q", rest, at)[0]
    return head + rest[:at] + _string(element) + rest[behind:]


@cache
def _parts_of(seed: str) -> tuple[int, list[Any], list[Any], bytes]:
    """A seed's parts, by the gguf package's reader: a field is length of its name, name, type, and then its value."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder) / "seed.gguf", SEEDS[seed])
        reader = gguf.GGUFReader(path)
        raw = path.read_bytes()
    pairs = [
        (name.encode(), int(read.parts[2][0]), b"".join(part.tobytes() for part in read.parts[3:]))
        for name, read in reader.fields.items()
        if not name.startswith("GGUF.")
    ]
    start = min(tensor.data_offset for tensor in reader.tensors)
    tensors = [
        (t.name.encode(), tuple(map(int, t.shape)), int(t.tensor_type), int(t.data_offset) - start)
        for t in reader.tensors
    ]
    return int(reader.fields["GGUF.version"].parts[0][0]), pairs, tensors, raw[start:]


# Strategies


@st.composite
def gguf_cases(draw: st.DrawFn) -> GGUFCase:
    """Any seed with up to three changes."""
    return GGUFCase(draw(_SEED_NAMES), [_CHANGES[draw(_KINDS)](draw) for _ in range(draw(_COUNTS))])


_SEED_NAMES = st.sampled_from(list(SEEDS))
_COUNTS = st.sampled_from([1, 1, 1, 2, 3])
_INDICES = st.integers(0, 300)
_SIZES = st.integers(0, 40) | INTEGERS.map(lambda number: number % 2**64)
_U32 = st.integers(0, 40) | INTEGERS.map(lambda number: number % 2**32)
_RAW_TEXTS = TEXTS.map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=6)
_PLACES = {
    0: _RAW_TEXTS,
    1: st.lists(_SIZES, max_size=6).map(tuple),
    2: st.sampled_from(list(map(int, GGMLType))),
    3: _SIZES,
}
_PARTS = st.sampled_from(["pairs", "tensors"])
_LISTS = st.sampled_from([f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")])
_FILLS = st.tuples(st.sampled_from([1, 2, 64, 1 << 20]), st.sampled_from([0x00, 0x7C, 0x7F, 0x80, 0xFF]))
_VOCABULARIES = st.sampled_from([0, 1, 300, 20_000])
_OF_BYTES = changes_of_bytes()


@st.composite
def _values(draw: st.DrawFn) -> tuple[int, bytes]:
    """A value of any type, and what no type is."""
    kind = draw(_VALUE_TYPES)
    if kind in _FORMATS:
        return kind, draw(_NUMBERS[kind])
    if kind == _STRING:
        return kind, _string(draw(_RAW_TEXTS))
    if kind != _ARRAY:
        return kind, draw(_RAW_TEXTS)
    element = draw(_VALUE_TYPES)
    if element == _ARRAY:  # nested, which GGUF allows and no model needs
        return kind, struct.pack("<IQ", _ARRAY, 1) * draw(_INDICES)
    items = [
        draw(_NUMBERS[element]) if element in _FORMATS else _string(draw(_RAW_TEXTS)) for _ in range(draw(_COUNTS))
    ]
    return kind, struct.pack("<IQ", element, draw(_SIZES) if draw(_COUNTS) == 3 else len(items)) + b"".join(items)


def _numbers(kind: int) -> st.SearchStrategy[bytes]:
    if kind in _FLOAT_TYPES:
        return FLOATS.map(lambda number: _rounded(number, _FLOAT_TYPES[kind]))
    size = struct.calcsize("<" + _FORMATS[kind])
    return INTEGERS.map(lambda number: (number % (1 << 8 * size)).to_bytes(size, "little"))


def _rounded(number: float, kind: type[Any]) -> bytes:
    with np.errstate(over="ignore", under="ignore"):
        return bytes(kind(number).tobytes())


_NUMBERS = {kind: _numbers(kind) for kind in _FORMATS}
_VALUE_TYPES = st.sampled_from([*_FORMATS, _STRING, _STRING, _STRING, _ARRAY, _ARRAY, 13, 2**32 - 1])


@cache
def _keys() -> st.SearchStrategy[str]:
    return st.sampled_from([*(key.decode() for key, *_ in _parts_of("Q4_1")[1]), *_MORE_KEYS])


def _tensor_change(draw: st.DrawFn) -> Change:
    place = draw(st.sampled_from(list(_PLACES)))
    return "tensor", draw(_INDICES), place, draw(_PLACES[place])


_CHANGES: dict[str, Callable[[st.DrawFn], Change]] = {
    "value": lambda draw: ("value", draw(_keys()), *draw(_values())),
    "tensor": _tensor_change,
    "element": lambda draw: ("element", draw(_LISTS), draw(_INDICES), draw(_RAW_TEXTS)),
    "twice": lambda draw: ("twice", draw(_PARTS), draw(_INDICES)),
    "without": lambda draw: ("without", draw(_PARTS), draw(_INDICES)),
    "counts": lambda draw: ("counts", draw(_SIZES), draw(_SIZES)),
    "version": lambda draw: ("version", draw(_U32)),
    "vocabulary": lambda draw: ("vocabulary", draw(_VOCABULARIES)),
    "fill": lambda draw: ("fill", draw(st.integers(0, 1 << 16)), *draw(_FILLS)),
    "bytes": lambda draw: draw(_OF_BYTES),
}
_KINDS = st.sampled_from([*_CHANGES, *["value"] * 8, "tensor", "element", "fill", "fill"])

"""Sound GGUF files, taken apart: what fuzzing starts from."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import gguf

from tests.npu.tiny import TinyLlama, write_tiny_llama

__all__ = ["ARRAY", "FORMATS", "MORE_PAIRS", "SEEDS", "STRING", "Pair", "Parts", "TensorEntry", "parts_of", "string"]

Pair: TypeAlias = tuple[bytes, int, bytes]
"""Key, value type, and the value's bytes."""

TensorEntry: TypeAlias = tuple[bytes, tuple[int, ...], int, int]
"""Name, dimensions as the file has them, type, and offset behind the header."""

STRING, ARRAY = 8, 9
FORMATS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Of scalar value types, for `struct`."""


class Parts(NamedTuple):
    """A file in parts."""

    version: int
    pairs: tuple[Pair, ...]
    tensors: tuple[TensorEntry, ...]
    data: bytes


def string(raw: bytes) -> bytes:
    """A text as the format has it."""
    return struct.pack("<Q", len(raw)) + raw


def _pair(key: str, value: str | bool | int | float | list[str] | list[float]) -> Pair:
    """A pair of the type that llama.cpp's converter would choose."""
    if isinstance(value, list):
        texts = value and isinstance(value[0], str)
        items = b"".join(string(str(item).encode()) if texts else struct.pack("<f", item) for item in value)
        return key.encode(), ARRAY, struct.pack("<IQ", STRING if texts else 6, len(value)) + items
    if isinstance(value, str):
        return key.encode(), STRING, string(value.encode())
    kind = 7 if isinstance(value, bool) else 4 if isinstance(value, int) else 6
    return key.encode(), kind, struct.pack("<" + FORMATS[kind], value)


_SMALL = TinyLlama(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32)
_WIDE = TinyLlama(layers=1, hidden=256, heads=2, kv_heads=1, head_dim=128, ffn=256)
_MODELS = {
    **{
        kind: replace(_SMALL, matrix_type=kind)
        for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
    },
    **{
        kind: replace(_WIDE, matrix_type=kind, embedding_type=kind) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    },
}
_YARN: dict[str, str | int | float] = {
    "type": "yarn",
    "factor": 4.0,
    "attn_factor": 1.0,
    "original_context_length": 64,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_ext_factor": 1.0,
}
_VARIANTS: dict[str, tuple[Pair, ...]] = {
    "yarn": tuple(_pair(f"llama.rope.scaling.{key}", value) for key, value in _YARN.items()),
    "pieces": (
        _pair("tokenizer.ggml.model", "llama"),
        _pair(
            "tokenizer.ggml.tokens",
            ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijkl"],
        ),
        (b"tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ272i", 5, 272, 2, 3, 3, *[6] * 256, *[1] * 13)),
        _pair("tokenizer.ggml.scores", [-float(token) for token in range(272)]),
        _pair("tokenizer.ggml.add_space_prefix", True),
    ),
}
"""What a model has on top of, or in place of, the smallest one's pairs."""

MORE_PAIRS = (
    *(pair for pairs in _VARIANTS.values() for pair in pairs),
    _pair("general.alignment", 32),
    _pair("llama.expert_count", 0),
    _pair("llama.attention.sliding_window", 0),
    _pair("llama.rope.scale_linear", 2.0),
    _pair("tokenizer.ggml.precompiled_charsmap", ""),
    *(_pair(f"tokenizer.ggml.{name}_token_id", 0) for name in ("eot", "eom", "unknown", "padding")),
    _pair("tokenizer.chat_template.tool_use", "{{ tools }}"),
)
"""Pairs that are read and that not every seed has."""

SEEDS = (*_MODELS, *_VARIANTS)
"""Names: a tiny model of each type of matrix that is run, one with a stretched context, one with SentencePiece."""


@cache
def parts_of(seed: str) -> Parts:
    """A seed, by the gguf package's reader: a field is length of its name, name, value type, and then its value."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder) / "seed.gguf", _MODELS.get(seed, _SMALL))
        reader = gguf.GGUFReader(path)
        raw = path.read_bytes()
    pairs = {
        name.encode(): (name.encode(), int(read.parts[2][0]), b"".join(part.tobytes() for part in read.parts[3:]))
        for name, read in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    pairs |= {pair[0]: pair for pair in _VARIANTS.get(seed, ())}
    start = min(tensor.data_offset for tensor in reader.tensors)
    tensors = tuple(
        (t.name.encode(), tuple(map(int, t.shape)), int(t.tensor_type), int(t.data_offset) - start)
        for t in reader.tensors
    )
    return Parts(int(reader.fields["GGUF.version"].parts[0][0]), tuple(pairs.values()), tensors, raw[start:])

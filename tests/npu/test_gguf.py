"""The GGUF reader against the gguf package's writer, and against every kind of damage."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as reference_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import BadModelFile, ModelError, UnsupportedModel, UsageError
from npu.ggml import RUNNABLE_TYPES, GGMLType, dequantize
from npu.gguf import GGUFFile, MetaValue
from tests.npu.quantised import encode
from tests.npu.tiny import TinyLlama, write_tiny_llama

MAGIC = b"GGUF"


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def u32_pair(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(
    pairs: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), version: int = 3, data: bytes = b"\0" * 256
) -> bytes:
    """A file of these parts, padded to 32 bytes before `data`."""
    raw = MAGIC + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return raw + b"\0" * (-len(raw) % 32) + data


def open_bytes(folder: Path, raw: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return GGUFFile.open(path)


# --- what a sound file says ---------------------------------------------------------------------------------------

INTEGERS = {
    gguf.GGUFValueType.UINT8: (0, 2**8 - 1),
    gguf.GGUFValueType.INT8: (-(2**7), 2**7 - 1),
    gguf.GGUFValueType.UINT16: (0, 2**16 - 1),
    gguf.GGUFValueType.INT16: (-(2**15), 2**15 - 1),
    gguf.GGUFValueType.UINT32: (0, 2**32 - 1),
    gguf.GGUFValueType.INT32: (-(2**31), 2**31 - 1),
    gguf.GGUFValueType.UINT64: (0, 2**64 - 1),
    gguf.GGUFValueType.INT64: (-(2**63), 2**63 - 1),
}


@st.composite
def typed_value(draw: st.DrawFn) -> tuple[Any, gguf.GGUFValueType]:
    kind = draw(
        st.sampled_from([*INTEGERS, *(gguf.GGUFValueType[name] for name in ("FLOAT32", "FLOAT64", "BOOL", "STRING"))])
    )
    if kind in INTEGERS:
        return draw(st.integers(*INTEGERS[kind])), kind
    if kind is gguf.GGUFValueType.BOOL:
        return draw(st.booleans()), kind
    if kind is gguf.GGUFValueType.STRING:
        return draw(st.text(max_size=20)), kind
    return draw(st.floats(allow_nan=False, width=32 if kind is gguf.GGUFValueType.FLOAT32 else 64)), kind


@st.composite
def typed_entry(draw: st.DrawFn) -> tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """A scalar, or an array of one element type: (value, type, element type)."""
    value, kind = draw(typed_value())
    if draw(st.booleans()):
        return value, kind, None
    elements = draw(st.lists(typed_value().filter(lambda v: v[1] is kind).map(lambda v: v[0]), max_size=3))
    return [value, *elements], gguf.GGUFValueType.ARRAY, kind


KEYS = st.text(min_size=1, max_size=12).filter(lambda key: not key.startswith(("GGUF.", "general.")))


@given(st.dictionaries(KEYS, typed_entry(), max_size=5))
@settings(max_examples=60, deadline=None)
def test_reads_back_whatever_metadata_the_reference_writer_writes(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, tuple[Any, Any, Any]]
) -> None:
    path = tmp_path_factory.mktemp("meta") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind, element) in entries.items():
        writer.add_key_value(key, value, kind, element)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected: dict[str, MetaValue] = {"general.architecture": "llama"} | {k: v[0] for k, v in entries.items()}
    with GGUFFile.open(path) as opened:
        assert opened.version == 3
        assert opened.metadata == expected
        # 1 == True == 1.0 in Python, so types are compared apart.
        assert {k: type(v) for k, v in opened.metadata.items()} == {k: type(v) for k, v in expected.items()}


@pytest.mark.parametrize("kind", RUNNABLE_TYPES, ids=lambda kind: kind.name)
def test_tensors_decode_as_the_reference_decodes_them(tmp_path: Path, kind: GGMLType) -> None:
    values = np.random.default_rng(kind).standard_normal((3, 5, 256), np.float32)
    values[0, 0, :32] = 0  # a block of scale 0
    reference_type = gguf.GGMLQuantizationType(kind)
    stored = encode(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_tensor("first", np.ones(3, np.float32))  # so that the second does not start at 0
    writer.add_tensor("second", stored, raw_dtype=reference_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "model.gguf") as opened:
        info = opened.tensors["second"]
        assert (info.shape, info.type, info.offset % 64) == ((3, 5, 256), kind, 0)
        raw = opened.data("second")
        assert not raw.flags.writeable
        assert info.nbytes == len(raw) == 15 * 256 // kind.block_elements * kind.block_bytes
        expected = reference_dequantize(stored, reference_type)
        np.testing.assert_array_equal(dequantize(kind, raw.reshape(15, -1)).reshape(3, 5, 256), expected)
        np.testing.assert_array_equal(opened.data("first").view("<f4"), np.ones(3, np.float32))


@pytest.mark.parametrize("byte", [0x7C, 0x7F, 0xFC, 0xFF])
@pytest.mark.parametrize("kind", RUNNABLE_TYPES)
def test_weights_that_are_no_numbers_decode_without_a_warning(kind: GGMLType, byte: int) -> None:
    """Infinite and NaN scales, times zero and less infinity; warnings are errors here."""
    assert dequantize(kind, np.full((2, kind.block_bytes), byte, np.uint8)).shape == (2, kind.block_elements)


def test_block_sizes_are_those_of_the_reference() -> None:
    ours = {kind.name: (kind.block_elements, kind.block_bytes) for kind in GGMLType}
    theirs = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert ours == {name: theirs[name] for name in ours}
    assert {kind.name: int(kind) for kind in GGMLType} == {name: gguf.GGMLQuantizationType[name] for name in ours}


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    opened = open_bytes(tmp_path, header((u32_pair("k", 7),), (tensor("t", (4,)),), version=2))
    assert (opened.version, opened.metadata) == (2, {"k": 7})
    assert opened.tensors["t"].shape == (4,)


def test_demo_model_opens_in_a_fraction_of_a_second(demo_model: Path) -> None:
    start = time.perf_counter()
    with GGUFFile.open(demo_model) as opened:
        seconds = time.perf_counter() - start
        tokens = opened.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        assert (len(tokens), tokens[1], len(opened.tensors)) == (49152, "<|im_start|>", 272)
    assert seconds < 1.0, seconds  # 0.06 s on an idle core


def test_data_outlives_close_and_a_closed_file_says_so(tmp_path: Path) -> None:
    opened = open_bytes(tmp_path, header(tensors=(tensor("t", (4,)),), data=np.arange(4, dtype="<f4").tobytes()))
    view = opened.data("t")
    opened.close()
    opened.close()
    np.testing.assert_array_equal(view.view("<f4"), [0, 1, 2, 3])
    with pytest.raises(UsageError, match="was closed"):
        opened.data("t")


# --- damage -------------------------------------------------------------------------------------------------------

F32_4 = tensor("t", (4,))
DAMAGE = {
    "empty": (b"", "empty"),
    "wrong magic": (b"GGML" + header()[4:], "not a GGUF"),
    "cut in the magic": (b"GG", "not a GGUF"),
    "version 0 or 4": (header(version=4), "version 4"),
    "version 1": (header(version=1), "version 1"),
    "big endian": (header(version=3 << 24), "big-endian version 3"),
    "2^60 tensors": (MAGIC + struct.pack("<IQQ", 3, 2**60, 0), "tensor count is 1152921504606846976"),
    "2^60 pairs": (MAGIC + struct.pack("<IQQ", 3, 0, 2**60), "metadata count is 1152921504606846976"),
    "more pairs than bytes": (MAGIC + struct.pack("<IQQ", 3, 0, 1000), "metadata key 0"),
    "key longer than the file": (header((struct.pack("<Q", 2**40) + b"k",)), "takes 1099511627776 bytes"),
    "string beyond 64 bits of address": (header((struct.pack("<Q", 2**64 - 1) + b"k",)), "takes 18446744073709551615"),
    "array longer than the file": (header((string("k") + struct.pack("<IIQ", 9, 0, 2**62),)), "key 'k', an array of"),
    "strings longer than the file": (header((string("k") + struct.pack("<IIQ", 9, 8, 2**61),)), "an array of 230584"),
    "string in an array too long": (
        header((string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a") + struct.pack("<Q", 4000),)),
        "element 1, takes 4000",
    ),
    "booleans longer than the file": (header((string("k") + struct.pack("<IIQ", 9, 7, 2**50),)), "booleans"),
    "a boolean of 2": (header((string("k") + struct.pack("<IB", 7, 2),)), "boolean of 2"),
    "array of arrays": (header((string("k") + struct.pack("<IIQ", 9, 9, 1),)), "element type 9"),
    "array of an unknown type": (header((string("k") + struct.pack("<IIQ", 9, 13, 1),)), "element type 13"),
    "unknown value type": (header((string("k") + struct.pack("<I", 13),)), "value type 13"),
    "key not UTF-8": (header((string(b"\xff") + struct.pack("<II", 4, 0),)), "UTF-8"),
    "value not UTF-8": (header((string("k") + struct.pack("<I", 8) + string(b"\xc3"),)), "'k' at byte .* UTF-8"),
    "token not UTF-8": (
        header((string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string(b"\x80"),)),
        "'k', element 1, at byte .* UTF-8",
    ),
    "key twice": (header((u32_pair("k", 1), u32_pair("k", 2))), "'k' occurs twice"),
    "tensor twice": (header(tensors=(F32_4, F32_4)), "'t' occurs twice"),
    "tensor name not UTF-8": (header(tensors=(string(b"\xff") + F32_4[9:],)), "name of tensor 0"),
    "no dimension": (header(tensors=(tensor("t", ()),)), "has 0 dimensions"),
    "five dimensions": (header(tensors=(tensor("t", (1,) * 5),)), "has 5 dimensions"),
    "2^32 - 1 dimensions": (header(tensors=(string("t") + struct.pack("<I", 2**32 - 1),)), "dimensions"),
    "dimension 0": (header(tensors=(tensor("t", (4, 0)),)), "not made of whole"),
    "half a block": (header(tensors=(tensor("t", (48, 2), kind=2),)), "blocks of 32"),
    "elements beyond 64 bits": (header(tensors=(tensor("t", (2**63, 2**63)),)), "ends at byte"),
    "removed type": (header(tensors=(tensor("t", (32,), kind=4),)), "'t' has the unknown type 4"),
    "type of the future": (header(tensors=(tensor("t", (32,), kind=999),)), "'t' has the unknown type 999"),
    "tensor beyond the file": (header(tensors=(tensor("t", (65,)),)), "ends at byte"),
    "offset beyond the file": (header(tensors=(tensor("t", (4,), offset=2**63),)), "ends at byte"),
    "offset not aligned": (header(tensors=(tensor("t", (4,), offset=4),)), "not a multiple of 32"),
    "alignment 0": (header((u32_pair("general.alignment", 0),)), "general.alignment is 0"),
    "alignment 24": (header((u32_pair("general.alignment", 24),)), "general.alignment is 24"),
    "alignment a string": (
        header((string("general.alignment") + struct.pack("<I", 8) + string("32"),)),
        "general.alignment is '32'",
    ),
}
UNSUPPORTED = {"version 0 or 4", "version 1", "big endian", "removed type", "type of the future"}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    raw, words = DAMAGE[case]
    with pytest.raises(UnsupportedModel if case in UNSUPPORTED else BadModelFile, match=words) as caught:
        open_bytes(tmp_path, raw)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "model.gguf") + ": ")
    assert "\n" not in message
    assert caught.value.values["path"] == str(tmp_path / "model.gguf")


def test_the_parts_of_the_damaged_files_are_sound(tmp_path: Path) -> None:
    """Without its fault each file above would open: the refusals are not accidents of how they are built."""
    opened = open_bytes(tmp_path, header((u32_pair("general.alignment", 32), u32_pair("k", 1)), (F32_4,)))
    assert opened.metadata == {"general.alignment": 32, "k": 1}
    assert opened.data("t").nbytes == 16


def test_a_cut_at_any_byte_is_noticed(tmp_path: Path) -> None:
    whole = write_tiny_llama(
        tmp_path / "whole.gguf", TinyLlama(layers=1, hidden=32, heads=1, kv_heads=1, head_dim=32, ffn=32)
    )
    raw = whole.read_bytes()
    with GGUFFile.open(whole) as opened:
        # Behind the last tensor there is only padding: a file cut there has lost nothing.
        needed = max(info.offset + info.nbytes for info in opened.tensors.values())
        first = min(info.offset for info in opened.tensors.values())
    # Every byte of the header; the data by steps.
    cuts = sorted({*range(first), *range(first, needed, 997), *range(needed - 40, needed)})
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw)
    for cut in reversed(cuts):
        os.truncate(path, cut)
        with pytest.raises(BadModelFile):
            GGUFFile.open(path)
    for length in range(needed, len(raw) + 1):
        path.write_bytes(raw[:length])
        GGUFFile.open(path).close()


FLIP_SOURCE = header(
    (u32_pair("general.alignment", 32), string("list") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("bc")),
    (tensor("t", (32, 2), kind=2), tensor("u", (4,), offset=64)),
)


@given(st.lists(st.tuples(st.integers(0, len(FLIP_SOURCE) - 1), st.integers(1, 255)), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_flipped_bytes_raise_only_model_errors(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    raw = bytearray(FLIP_SOURCE)
    for at, bits in flips:
        raw[at] ^= bits
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(raw)
    try:
        opened = GGUFFile.open(path)
    except ModelError as error:
        assert str(path) in str(error)  # noqa: PT017 - both outcomes are right
    else:
        # Whatever it now claims, every tensor it lists can be read in full.
        for name, info in opened.tensors.items():
            assert opened.data(name).nbytes == info.nbytes


@pytest.mark.parametrize(("element", "size"), [(0, 1), (6, 4), (8, 8)], ids=["uint8", "float32", "empty strings"])
def test_a_hostile_header_takes_bounded_memory(tmp_path: Path, element: int, size: int) -> None:
    """A sparse gigabyte of array costs nothing to send; it must not cost us gigabytes either."""
    path = tmp_path / "hostile.gguf"
    count = (1 << 30) // size
    path.write_bytes(MAGIC + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, element, count))
    os.truncate(path, (1 << 30) + 4096)
    tracemalloc.start()
    try:
        with pytest.raises(BadModelFile, match="headers end by 33554432"):
            GGUFFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(UsageError, match="not a regular file"):
        GGUFFile.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        GGUFFile.open(tmp_path / "fifo")
    with pytest.raises(UsageError, match="null"):
        GGUFFile.open("a\0b")

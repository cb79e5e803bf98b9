"""Blocks taken apart are the same weights, whatever their type and their bytes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import MissingExtra, UnsupportedModel
from npu.blocks import FORMATS, Blocks, unpack_blocks
from npu.ggml import RUNNABLE_TYPES, GGMLType, dequantize
from tests.npu.quantised import SCALES_AT, reference

KINDS = tuple(FORMATS)
WITHOUT_GGUF = (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0)


def assembled(blocks: Blocks) -> NDArray[np.float64]:
    """The weights in float64, where the product of a float32 scale and a code is exact."""
    weights = blocks.scales.astype(np.float64)[..., None] * blocks.codes
    if blocks.offsets is not None:
        weights += blocks.offsets.astype(np.float64)[..., None]
    return weights.reshape(len(weights), -1)


def make_finite(kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks `[blocks, bytes]` of any bytes, without the scales that are infinite or no numbers."""
    for at in SCALES_AT[kind]:
        high = raw[:, at + 1]
        high[high & 0x7C == 0x7C] &= 0xBF
    return raw


def rounding(kind: GGMLType, raw: NDArray[np.uint8], blocks: Blocks) -> float:
    """How far weights with offsets may be off: theirs is rounded once, and so is the reference's own sum."""
    if blocks.offsets is None:
        return 0.0
    minima = abs(blocks.offsets.astype(np.float64)) + 32 * abs(blocks.scales.astype(np.float64))
    return 2 * 2.0**-24 * float((minima + abs(reference(kind, raw)).max()).max())


def test_every_quantised_type_that_runs_has_a_format() -> None:
    assert set(FORMATS) | {GGMLType.F32, GGMLType.F16, GGMLType.BF16} == set(RUNNABLE_TYPES)
    assert {kind: layout.record.itemsize for kind, layout in FORMATS.items()} == {
        kind: kind.block_bytes for kind in FORMATS
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_rows_are_the_same_weights(kind: GGMLType) -> None:
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (40, kind.block_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        raw[:, at : at + 2] = rng.standard_normal((40, 1)).astype("<f2").view(np.uint8)
    raw = raw.reshape(20, -1)  # two blocks a row: rows and blocks must not be mistaken for each other
    blocks = unpack_blocks(kind, raw)
    layout = FORMATS[kind]
    count = 2 * kind.block_elements // layout.size
    assert blocks.codes.shape == (20, count, layout.size)
    assert blocks.scales.shape == (20, count)
    assert [array.dtype.name for array in (blocks.codes, blocks.scales)] == ["int8", "float32"]
    assert (blocks.offsets is not None) == layout.offset
    assert set(range(-8, 8)).issuperset(blocks.codes.ravel().tolist()) == (layout.bits == 4)
    np.testing.assert_array_equal(dequantize(kind, raw), reference(kind, raw).astype(np.float32))
    assert abs(assembled(blocks) - reference(kind, raw)).max() <= rounding(kind, raw, blocks)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_are_the_same_weights(kind: GGMLType, data: st.DataObject) -> None:
    """Not only what a quantiser writes: any code, and any finite scale from the subnormal to the largest."""
    size = kind.block_bytes
    raw = make_finite(
        kind, np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8).reshape(1, -1).copy()
    )
    blocks = unpack_blocks(kind, raw)
    assert abs(assembled(blocks) - reference(kind, raw)).max() <= rounding(kind, raw, blocks)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("scale", [0.0, 65504.0, -65504.0, 2.0**-24], ids=["zero", "largest", "lowest", "subnormal"])
def test_extreme_scales_are_the_same_weights(kind: GGMLType, scale: float) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (3, kind.block_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        raw[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    blocks = unpack_blocks(kind, raw)
    assert np.isfinite(blocks.scales).all()
    assert abs(assembled(blocks) - reference(kind, raw)).max() <= rounding(kind, raw, blocks)
    if scale == 0:
        np.testing.assert_array_equal(assembled(blocks), np.zeros((3, kind.block_elements)))


def test_a_q4_k_block_worked_out_by_hand() -> None:
    raw = np.zeros((1, 144), np.uint8)
    raw[0, 0:4] = np.array([2.0, 0.5], "<f2").view(np.uint8)  # d, dmin
    raw[0, 4], raw[0, 8] = 3, 5  # scale and minimum of the first 32 weights, six bits each
    raw[0, 16:48] = 0x1F  # low nibbles: codes of the first 32 weights; high nibbles: of the next 32
    blocks = unpack_blocks(GGMLType.Q4_K, raw)
    assert blocks.scales[0].tolist() == [2.0 * 3] + [0.0] * 7
    assert blocks.codes[0, :2].tolist() == [[15 - 8] * 32, [1 - 8] * 32]
    assert blocks.offsets is not None
    assert blocks.offsets[0].tolist() == [8 * 6.0 - 0.5 * 5] + [0.0] * 7
    assert assembled(blocks)[0, :64].tolist() == [6.0 * 15 - 2.5] * 32 + [0.0] * 32


def test_a_q6_k_block_worked_out_by_hand() -> None:
    raw = np.zeros((1, 210), np.uint8)
    raw[0, 208:210] = np.array([0.25], "<f2").view(np.uint8)
    raw[0, 192:194] = np.array([-128, 7], np.int8).view(np.uint8)  # scales of weights 0-15 and 16-31
    raw[0, 0], raw[0, 16] = 0x05, 0x0F  # low four bits of weights 0 and 16
    raw[0, 128] = 0b11  # high two bits of weight 0
    blocks = unpack_blocks(GGMLType.Q6_K, raw)
    assert blocks.codes[0, :2, 0].tolist() == [0b110101 - 32, 0b001111 - 32]
    assert blocks.scales[0, :3].tolist() == [-32.0, 1.75, 0.0]


@pytest.mark.parametrize("kind", RUNNABLE_TYPES, ids=lambda kind: kind.name)
def test_only_some_types_need_the_gguf_package(kind: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "gguf.quants", raising=False)
    raw = np.zeros((1, kind.block_bytes), np.uint8)
    if kind in WITHOUT_GGUF or kind not in FORMATS:
        assert not dequantize(kind, raw).any()
    else:
        for decode in (dequantize, unpack_blocks):
            with pytest.raises(MissingExtra, match=r"need gguf: pip install 'rockpage\[model\]'"):
                decode(kind, raw)


def test_a_type_that_does_not_run_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor type MXFP4 cannot be run; use a file of F32, .*, IQ4_NL"):
        dequantize(GGMLType.MXFP4, np.zeros((1, 17), np.uint8))

"""GGML's tensor types: their block layouts, and the exact decoding of those rockpage runs.

A row of a quantised tensor is a sequence of blocks; each block holds its scales and its quants together. Numbers and
layouts are those of `ggml.h` and `ggml-common.h` (MIT). The commonest types are decoded here; the others by the `gguf`
package, which llama.cpp's makers keep beside the format: pure Python over numpy, the same on every architecture.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import MissingExtra, UnsupportedModel

__all__ = ["RUNNABLE_TYPES", "GGMLType", "dequantize", "gguf_quants"]


class GGMLType(IntEnum):
    """Every tensor type a GGUF file may hold today. A member knows the size of its blocks."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block_elements(self) -> int:
        """Elements of one block; a row holds a whole number of blocks."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _BLOCKS[self][1]

    def bytes_of(self, elements: int) -> int:
        """Bytes that `elements` elements take; `elements` is a multiple of `block_elements`."""
        return elements // self.block_elements * self.block_bytes


# (elements, bytes) of a block.
_BLOCKS: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
}

# One record per block, as it lies in the file. Q4: element i is the low nibble of byte i, element i + 16 the high one.
Q4_0_BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
Q4_1_BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))])
Q8_0_BLOCK = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])

RUNNABLE_TYPES = (
    GGMLType.F32,
    GGMLType.F16,
    GGMLType.BF16,
    GGMLType.Q4_0,
    GGMLType.Q4_1,
    GGMLType.Q5_0,
    GGMLType.Q5_1,
    GGMLType.Q8_0,
    GGMLType.Q2_K,
    GGMLType.Q3_K,
    GGMLType.Q4_K,
    GGMLType.Q5_K,
    GGMLType.Q6_K,
    GGMLType.IQ4_NL,
)
"""The types rockpage can compute with; files of other types can still be read and planned for."""


def unpack_nibbles(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Spread the 16 bytes of each Q4 block, uint8 `[..., 16]`, into its 32 elements, uint8 `[..., 32]`, in order."""
    return np.concatenate([qs & np.uint8(0x0F), qs >> np.uint8(4)], axis=-1)


@np.errstate(invalid="ignore", over="ignore")  # a damaged scale is inf or NaN here as it is in the file
def dequantize(kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode whole rows exactly as ggml does.

    Args:
        kind: one of `RUNNABLE_TYPES`.
        raw: uint8 `[rows, row_bytes]`, C-contiguous; the bytes as they lie in the file.

    Returns:
        float32 `[rows, row_elements]`, a new array.

    Raises:
        UnsupportedModel: `kind` is not one of `RUNNABLE_TYPES`.
        MissingExtra: the type needs the `gguf` package, which is not installed.
    """
    if kind not in RUNNABLE_TYPES:
        raise UnsupportedModel(
            f"tensor type {kind.name} cannot be run; use a file of {', '.join(t.name for t in RUNNABLE_TYPES)}",
            type=kind.name,
        )
    rows = raw.shape[0]
    if kind is GGMLType.F32:
        return raw.view("<f4").astype(np.float32)
    if kind is GGMLType.F16:
        return raw.view("<f2").astype(np.float32)
    if kind is GGMLType.BF16:  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind is GGMLType.Q4_0:
        blocks = raw.view(Q4_0_BLOCK)
        values = (unpack_nibbles(blocks["qs"]).astype(np.float32) - 8) * blocks["d"].astype(np.float32)[..., None]
    elif kind is GGMLType.Q4_1:
        blocks = raw.view(Q4_1_BLOCK)
        values = unpack_nibbles(blocks["qs"]).astype(np.float32) * blocks["d"].astype(np.float32)[..., None]
        values += blocks["m"].astype(np.float32)[..., None]
    elif kind is GGMLType.Q8_0:
        blocks = raw.view(Q8_0_BLOCK)
        values = blocks["qs"].astype(np.float32) * blocks["d"].astype(np.float32)[..., None]
    else:
        quants = gguf_quants()
        values = quants.dequantize(raw, quants.GGMLQuantizationType(kind))
    return values.reshape(rows, -1)


def gguf_quants() -> ModuleType:
    """The module `gguf.quants`.

    Raises:
        MissingExtra: the `gguf` package is not installed.
    """
    try:
        import gguf.quants  # noqa: PLC0415 - comes with an extra, and most models do without
    except ModuleNotFoundError as error:
        raise MissingExtra("this model's tensor types need gguf: pip install 'rockpage[model]'") from error
    return gguf.quants

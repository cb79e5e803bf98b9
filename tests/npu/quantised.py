"""Rows of each tensor type for tests: quantised where the reference can, else made of blocks drawn at random."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from npu.ggml import GGMLType

__all__ = ["K_TYPES", "SCALES_AT", "encode", "reference"]

K_TYPES = (GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K)
"""Types with blocks of 256 weights."""

SCALES_AT: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}
"""Bytes of a block at which its float16 numbers begin: the scale, and the scale of the minima or the minimum."""

# The reference cannot quantise to these. With a scale of minima of so many scales, their weights are about symmetric.
_MINIMA_PER_SCALE = {GGMLType.Q2_K: 1.5, GGMLType.Q4_K: 7.5, GGMLType.Q5_K: 15.5}


def encode(values: NDArray[np.float32], kind: GGMLType) -> NDArray[Any]:
    """A matrix of a type: the values, or, where the reference cannot quantise, random weights of the same size.

    Random weights depend on nothing but the values; a matrix that begins with zeros gets a block of zeros there.
    """
    if kind not in (*K_TYPES, GGMLType.IQ4_NL):
        return quantize(values, gguf.GGMLQuantizationType(kind))
    blocks = values.size // kind.block_elements
    rng = np.random.default_rng(abs(values).astype(np.float64).sum().view(np.uint64))
    raw = rng.integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8)
    scale = 1.0
    for _ in range(2):  # at scale 1, and then at that which brings the weights to size
        for at, factor in zip(SCALES_AT[kind], (1.0, _MINIMA_PER_SCALE.get(kind, 0.0)), strict=False):
            raw[:, at : at + 2] = np.array([scale * factor], "<f2").view(np.uint8)
        scale = float(np.sqrt((values.astype(np.float64) ** 2).mean() / (reference(kind, raw) ** 2).mean()))
    if not values.ravel()[:32].any():
        for at in SCALES_AT[kind]:
            raw[0, at : at + 2] = 0
    return raw.reshape(*values.shape[:-1], -1)


def reference(kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The weights of rows, uint8 `[rows, row_bytes]`, as the reference decodes them; in float64."""
    stored = raw.view({GGMLType.F16: np.float16, GGMLType.F32: np.float32}.get(kind, np.uint8))
    return dequantize(stored, gguf.GGMLQuantizationType(kind)).astype(np.float64)

"""Takes GGML's quantised blocks apart into codes, scales and offsets, without changing a weight.

Every type here, whatever its bit layout, means `scale * code + offset` with one scale and one offset for 16 or 32
neighbours. The layouts themselves are left to the `gguf` package: a copy of the blocks whose scales are neutral
(1, and 0 for the minimum) dequantises to nothing but the codes. Q4_0, Q4_1 and Q8_0 need no package.

| type   | size | code                 | scale                   | offset                  |
|--------|------|----------------------|-------------------------|-------------------------|
| Q4_0   | 32   | `q - 8`              | `d`                     |                         |
| Q4_1   | 32   | `q - 8`              | `d`                     | `m + 8 * d`             |
| Q5_0   | 32   | `q - 16`             | `d`                     |                         |
| Q5_1   | 32   | `q - 16`             | `d`                     | `m + 16 * d`            |
| Q8_0   | 32   | `q`                  | `d`                     |                         |
| IQ4_NL | 32   | one of 16 fixed int8 | `d`                     |                         |
| Q2_K   | 16   | `q - 2`              | `d * s`, s in 0..15     | `2 * scale - dmin * m`  |
| Q3_K   | 16   | `q` in -4..3         | `d * s`, s in -32..31   |                         |
| Q4_K   | 32   | `q - 8`              | `d * s`, s in 0..63     | `8 * scale - dmin * m`  |
| Q5_K   | 32   | `q - 16`             | `d * s`, s in 0..63     | `16 * scale - dmin * m` |
| Q6_K   | 16   | `q` in -32..31       | `d * s`, s in -128..127 |                         |

d, dmin and m of 32 are float16, so that scales are exact in float32; an offset is rounded once, to float32. Unsigned
codes are centred because the error of an int8 activation grows with the codes it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .ggml import Q4_0_BLOCK, Q4_1_BLOCK, Q8_0_BLOCK, GGMLType, gguf_quants, unpack_nibbles

__all__ = ["FORMATS", "BlockFormat", "Blocks", "unpack_blocks"]

Floats: TypeAlias = NDArray[np.float32]


class Blocks(NamedTuple):
    """Rows of a matrix as `scales * codes + offsets`.

    Attributes:
        codes: int8 `[rows, blocks, size]`.
        scales: float32 `[rows, blocks]`.
        offsets: float32 `[rows, blocks]`, or None for zeros.
    """

    codes: NDArray[np.int8]
    scales: Floats
    offsets: Floats | None


@dataclass(frozen=True)
class BlockFormat:
    """What the blocks of a type become.

    Attributes:
        size: weights that share a scale.
        bits: 4 if codes lie within -8..7, else 8.
        centre: what is subtracted from unsigned codes; 0 if the type's own codes have both signs.
        offset: whether blocks have offsets.
        record: a block as it lies in the file.
        neutral: field values that make `gguf` dequantise a block to its codes; None where no `gguf` is needed.
    """

    size: int
    bits: int
    centre: int
    offset: bool
    record: np.dtype[Any]
    neutral: Mapping[str, Any] | None = None


def _record(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


# Six-bit scales and minima of a block, packed into 12 bytes: every scale 1 and every minimum 0.
_UNIT_SCALES = {"d": 1, "dmin": 0, "scales": [1] * 4 + [0] * 4 + [1] * 4}

FORMATS: Mapping[GGMLType, BlockFormat] = {
    GGMLType.Q4_0: BlockFormat(32, 4, 8, False, Q4_0_BLOCK),
    GGMLType.Q4_1: BlockFormat(32, 4, 8, True, Q4_1_BLOCK),
    GGMLType.Q8_0: BlockFormat(32, 8, 0, False, Q8_0_BLOCK),
    GGMLType.Q5_0: BlockFormat(32, 8, 0, False, _record(("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)), {"d": 1}),
    GGMLType.Q5_1: BlockFormat(
        32, 8, 16, True, _record(("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)), {"d": 1, "m": 0}
    ),
    GGMLType.IQ4_NL: BlockFormat(32, 8, 0, False, _record(("d", "<f2"), ("qs", "u1", 16)), {"d": 1}),
    GGMLType.Q2_K: BlockFormat(
        16,
        4,
        2,
        True,
        _record(("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")),
        {"d": 1, "dmin": 0, "scales": 1},  # the minimum in the high nibble
    ),
    GGMLType.Q3_K: BlockFormat(
        16,
        4,
        0,
        False,
        _record(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")),
        {"d": 1, "scales": [0x11] * 8 + [0xAA] * 4},  # 33 each, of which 32 are subtracted
    ),
    GGMLType.Q4_K: BlockFormat(
        32, 4, 8, True, _record(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)), _UNIT_SCALES
    ),
    GGMLType.Q5_K: BlockFormat(
        32,
        8,
        16,
        True,
        _record(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
        _UNIT_SCALES,
    ),
    GGMLType.Q6_K: BlockFormat(
        16,
        8,
        0,
        False,
        _record(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")),
        {"d": 1, "scales": 1},
    ),
}
"""The types whose blocks can be taken apart."""


def unpack_blocks(kind: GGMLType, raw: NDArray[np.uint8]) -> Blocks:
    """Take whole rows apart.

    Args:
        kind: a key of `FORMATS`.
        raw: uint8 `[rows, row_bytes]`, C-contiguous; the bytes as they lie in the file.

    Returns:
        New arrays; see the module for what they hold.

    Raises:
        MissingExtra: the type needs the `gguf` package, which is not installed.
    """
    layout = FORMATS[kind]
    records = raw.view(layout.record)
    scales, minima = _scales_and_minima(kind, records)
    codes = _codes(kind, records).reshape(*scales.shape, layout.size)
    return Blocks(codes, scales, None if minima is None else minima + scales * np.float32(layout.centre))


def _codes(kind: GGMLType, records: NDArray[Any]) -> NDArray[np.int8]:
    """The centred codes, in the order of the weights."""
    layout = FORMATS[kind]
    codes: NDArray[np.int8]
    if kind is GGMLType.Q8_0:
        codes = records["qs"]
    elif layout.neutral is None:
        codes = unpack_nibbles(records["qs"]).view(np.int8)
    else:
        codes = _dequantize_with(kind, records, layout.neutral).astype(np.int8)
    return codes - np.int8(layout.centre)


def _scales_and_minima(kind: GGMLType, records: NDArray[Any]) -> tuple[Floats, Floats | None]:
    """float32 `[rows, blocks]` both: a weight is its scale times its code before centring, plus its minimum."""
    d = records["d"].astype(np.float32)
    match kind:
        case GGMLType.Q4_1 | GGMLType.Q5_1:
            return d, records["m"].astype(np.float32)
        case GGMLType.Q2_K:
            packed = records["scales"]
            return _times(d, packed & 0x0F), -_times(records["dmin"].astype(np.float32), packed >> 4)
        case GGMLType.Q4_K | GGMLType.Q5_K:
            packed = np.ascontiguousarray(records["scales"]).reshape(-1, 12)
            s, m = (part.reshape(*d.shape, 8) for part in gguf_quants().Q4_K.get_scale_min(packed))
            return _times(d, s), -_times(records["dmin"].astype(np.float32), m)
        case GGMLType.Q3_K:
            # Where every code is 1, the weights are the scales.
            weights = _dequantize_with(kind, records, {"hmask": 0xFF, "qs": 0x55})
            return weights[:, :: FORMATS[kind].size], None
        case GGMLType.Q6_K:
            return _times(d, records["scales"]), None
    return d, None


def _times(d: Floats, parts: NDArray[np.integer[Any]]) -> Floats:
    """A block's factor by the integers of its parts: `[rows, blocks]` by `[rows, blocks, parts]`, joined by row."""
    return (d[..., None] * parts.astype(np.float32)).reshape(len(d), -1)


def _dequantize_with(kind: GGMLType, records: NDArray[Any], fields: Mapping[str, Any]) -> Floats:
    """The weights `[rows, columns]` that the blocks would hold with some fields set."""
    changed = records.copy()
    for name, value in fields.items():
        changed[name] = value
    quants = gguf_quants()
    values: Floats = quants.dequantize(changed.view(np.uint8), quants.GGMLQuantizationType(kind))
    return values

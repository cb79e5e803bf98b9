"""Chooses a smaller type for each tensor of a model and quantises to it, measuring what that loses.

Quantising itself is the `gguf` package's. A tensor is left alone where quantising could only lose:

- vectors (norms, biases) become F32, which is exact and what every reader of GGUF expects;
- a matrix that is already quantised to no more bits than asked for is copied;
- a matrix whose rows are not made of whole blocks of 32 is copied.

| weights | matrices | embedding and head | bits a weight |
|---------|----------|--------------------|---------------|
| int8    | Q8_0     | Q8_0               | 8.5           |
| int4    | Q4_1     | Q8_0               | 5, and 8.5    |

The relative RMS error of normal weights is 0.5 % in Q8_0, 7.8 % in Q4_1 and 8.6 % in Q4_0: half a bit for a tenth of
the error. K-quants would do better at 4 bits; the package reads them but does not write them. The head decides
between tokens and the embedding is what every layer starts from, so that both keep 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UnsupportedModel

from .ggml import RUNNABLE_TYPES, GGMLType, dequantize, gguf_quants
from .gguf_header import TensorInfo
from .source import ModelSource

__all__ = ["Loss", "Weights", "requantise", "target_type"]

Weights: TypeAlias = Literal["int4", "int8"]
"""Bits of the weights that are asked for."""

_MATRICES: dict[Weights, GGMLType] = {"int4": GGMLType.Q4_1, "int8": GGMLType.Q8_0}
_VOCABULARY_MATRICES = ("token_embd.weight", "output.weight")
_DENSE = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_CHUNK_ELEMENTS = 1 << 18  # quantised at a time; some 40 bytes are taken for each


@dataclass
class Loss:
    """How far stored weights are from the source's.

    Attributes:
        error: sum of the squared differences.
        total: sum of the squared weights.
    """

    error: float = 0.0
    total: float = 0.0

    @property
    def relative(self) -> float:
        """RMS of the differences over RMS of the weights; 0 if nothing was lost."""
        return float(np.sqrt(self.error / self.total)) if self.total else 0.0


def target_type(name: str, info: TensorInfo, weights: Weights) -> GGMLType:
    """The type that a tensor is stored as.

    Args:
        name: GGUF's.
        info: what the source says of it.
        weights: bits that are asked for.

    Raises:
        UnsupportedModel: the tensor is of a type that rockpage does not read.
    """
    if info.type not in RUNNABLE_TYPES:
        raise UnsupportedModel(
            f"tensor '{name}' is {info.type.name}; rockpage converts from"
            f" {', '.join(kind.name for kind in RUNNABLE_TYPES)}: start from one of these",
            tensor=name,
            type=info.type.name,
        )
    if len(info.shape) < 2:
        return GGMLType.F32
    target = GGMLType.Q8_0 if name in _VOCABULARY_MATRICES else _MATRICES[weights]
    if info.shape[-1] % target.block_elements:
        return info.type
    if info.type not in _DENSE and info.nbytes <= target.bytes_of(info.shape[0] * info.shape[1]):
        return info.type
    return target


def requantise(source: ModelSource, name: str, target: GGMLType, loss: Loss) -> Iterator[NDArray[np.uint8]]:
    """Bring a tensor to a type, piece by piece.

    Args:
        source: the open model.
        name: GGUF's, of one of its tensors.
        target: from `target_type`.
        loss: grows by what this tensor loses.

    Yields:
        uint8 `[some rows, row_bytes]` in order, a vector being one row; only a few megabytes are taken at a time.

    Raises:
        BadModelFile: a weight is infinite or not a number, or too large for the scales of `target`.
        MissingExtra: the `gguf` package is not installed.
    """
    info, data = source.tensors[name], source.data(name)
    columns = info.shape[-1]
    rows = data.reshape(-1, info.type.bytes_of(columns))  # a vector is one row
    step = max(1, _CHUNK_ELEMENTS // columns)
    quants = gguf_quants()
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        if target is info.type:
            yield piece
            continue
        wanted = dequantize(info.type, piece)
        if target is GGMLType.F32:
            yield wanted.view(np.uint8)
            continue
        with np.errstate(all="ignore"):  # weights too small or too large for a scale show in the check below
            stored: NDArray[np.uint8] = quants.quantize(wanted, quants.GGMLQuantizationType(target))
            error = (dequantize(target, stored) - wanted).astype(np.float64)
        if not np.isfinite(error).all():
            raise BadModelFile(
                f"{source.path}: tensor '{source.own_name(name)}' has weights that are infinite, not numbers, or"
                f" too large for {target.name}; fetch the model again",
                path=str(source.path),
                tensor=name,
            )
        loss.error += float((error * error).sum())
        loss.total += float((wanted.astype(np.float64) ** 2).sum())
        yield stored

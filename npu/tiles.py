"""Quantised matrices as tiles: the blocks of 16 outputs side by side, so that a vector instruction serves all of them.

GGUF keeps a row's blocks of 32 weights one behind the other, each with its scale. Multiplying by those ends in a sum
across the lanes of a register for each block. In a tile the lanes are 16 outputs, and a sum stays where it is. Nothing
is rounded: codes, scales and offsets are the file's own, in another order, see `_dense.h`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ._dense import lib
from .ggml import Q4_0_BLOCK, Q4_1_BLOCK, Q8_0_BLOCK, GGMLType
from .source import ModelSource

__all__ = ["TILED_TYPES", "TILE_VERSION", "TilePlan", "TiledMatrix", "TiledType", "plan_tiles", "tile_rows"]

TILE_VERSION = 1
"""Part of the cache's key and of a decoder's `numerics`: raise it when a layout or the order of a sum changes."""

_ALIGNMENT = 64  # of each array in the file: a cache line
_CHUNK_BYTES = 1 << 20  # of the model tiled at a time; bounds the memory of a load


@dataclass(frozen=True)
class TiledType:
    """How blocks of a type become tiles.

    Attributes:
        record: a block as it lies in a GGUF file.
        bits: of a code.
        zero: what is subtracted from a 4-bit code, for the error of an int8 activation grows with the codes it is
            multiplied by. The kernel adds it to the block's offset again, where there is one.
        offset: whether blocks have offsets.
    """

    record: np.dtype[Any]
    bits: int
    zero: int
    offset: bool


TILED_TYPES = {
    GGMLType.Q4_0: TiledType(Q4_0_BLOCK, 4, 8, offset=False),
    GGMLType.Q4_1: TiledType(Q4_1_BLOCK, 4, 8, offset=True),
    GGMLType.Q8_0: TiledType(Q8_0_BLOCK, 8, 0, offset=False),
}
"""Types with blocks of 32 and fp16 scales."""


@dataclass(frozen=True)
class TiledMatrix:
    """Where a matrix lies in the file of tiles.

    Attributes:
        type: of its weights.
        rows: outputs, padded to whole tiles.
        columns: inputs.
        offsets: of its arrays, `codes`, `scales` and maybe `offsets`: bytes from the start of the file.
    """

    type: GGMLType
    rows: int
    columns: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class TilePlan:
    """Where every matrix of a model lies in its file of tiles.

    Attributes:
        matrices: by the tensors' names.
        nbytes: bytes of the file.
    """

    matrices: dict[str, TiledMatrix]
    nbytes: int

    def write(self, source: ModelSource, file: BinaryIO) -> None:
        """Write the file, a megabyte of the model at a time.

        Args:
            source: the model the plan was made for.
            file: seekable; left at an unspecified position.

        Raises:
            OSError: the file cannot be written.
        """
        file.truncate(self.nbytes)
        for name, matrix in self.matrices.items():
            at = dict(matrix.offsets)  # where the next tiles of each array go
            for raw in _chunks(source, name):
                for role, tiles in tile_rows(matrix.type, raw).items():
                    file.seek(at[role])
                    at[role] += file.write(tiles.data)
                source.release_pages()  # else the whole model would be in memory in the end, beside its tiles


def plan_tiles(source: ModelSource, names: Iterable[str]) -> TilePlan | None:
    """Find a place for every array; nothing is read or written.

    Args:
        source: the open model.
        names: of its matrices.

    Returns:
        None if one of them is not of `TILED_TYPES`.
    """
    matrices: dict[str, TiledMatrix] = {}
    end = 0
    for name in names:
        info = source.tensors[name]
        kind = TILED_TYPES.get(info.type)
        if kind is None:
            return None
        rows, columns = -(-info.shape[0] // lib.RP_LANES) * lib.RP_LANES, info.shape[1]
        scales = rows * columns // lib.RP_BLOCK * np.dtype(np.float16).itemsize
        offsets = {}
        for role, nbytes in (("codes", rows * columns * kind.bits // 8), ("scales", scales), ("offsets", scales)):
            if role != "offsets" or kind.offset:
                offsets[role] = end
                end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
        matrices[name] = TiledMatrix(info.type, rows, columns, offsets)
    return TilePlan(matrices, end)


def tile_rows(kind: GGMLType, raw: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Tile whole rows.

    Args:
        kind: one of `TILED_TYPES`.
        raw: uint8 `[rows, row_bytes]` as they lie in a GGUF file; rows of zeros stand in for those that a tile lacks.

    Returns:
        New arrays by role, C-contiguous: codes uint32 `[tiles, blocks, 4 or 8, 16]`, four bytes of a row each; scales
        and offsets fp16 `[tiles, blocks, 16]`.
    """
    padded = np.zeros((-(-len(raw) // lib.RP_LANES) * lib.RP_LANES, raw.shape[1]), np.uint8)
    padded[: len(raw)] = raw
    records = padded.view(TILED_TYPES[kind].record)
    tiles, blocks = len(padded) // lib.RP_LANES, records.shape[1]
    codes = np.ascontiguousarray(records["qs"]).view(np.uint32).reshape(tiles, lib.RP_LANES, blocks, -1)
    arrays = {"codes": np.ascontiguousarray(codes.transpose(0, 2, 3, 1))}
    for role, field in (("scales", "d"), ("offsets", "m")):
        if field in (records.dtype.names or ()):
            by_lane = records[field].reshape(tiles, lib.RP_LANES, blocks).transpose(0, 2, 1)
            arrays[role] = np.ascontiguousarray(by_lane)
    return arrays


def _chunks(source: ModelSource, name: str) -> Iterator[NDArray[np.uint8]]:
    """The rows of a tensor, whole tiles of them at a time."""
    raw = source.data(name).reshape(source.tensors[name].shape[0], -1)
    step = max(1, _CHUNK_BYTES // raw.shape[1] // lib.RP_LANES) * lib.RP_LANES
    for start in range(0, len(raw), step):
        yield raw[start : start + step]

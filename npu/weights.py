"""Repacks GGUF matrices into forms that ONNX Runtime's kernels run fast, without changing a weight.

`MatMulNBits` multiplies by block-quantised weights `scale * (q - 8)` (4 bits) or `scale * (q - 128)` (8 bits), blocks
of 32. A zero point per block would cover every GGML type, but a float one leaves the fast kernels: 10 to 24 times
slower (ONNX Runtime 1.32). So what a symmetric block cannot say goes into a second, small product: every element of a
block has the same offset, and `sum(x_i * offset) = sum(x_i) * offset` needs only the sums of x over each block.

====================  =============================================  ===============================================
form                  weight                                         product
====================  =============================================  ===============================================
Q4 (Q4_0)             `d * (q - 8)`                                  4-bit
Q4_OFFSET (Q4_1)      `d * q + m = d * (q - 8) + (m + 8 * d)`        4-bit, plus block sums by `m + 8 * d`
Q8 (Q8_0)             `d * q`                                        8-bit, int8 activations only
Q8_HALVES (Q8_0)      `16 * d * hi + d * (lo - 8) + 8 * d`           two 4-bit, plus block sums by `8 * d`
DENSE (F16, F32)      the value in float32                           float32
====================  =============================================  ===============================================

Q8_HALVES is Q8_0 for float activations, for which the 8-bit kernel has no fast path: `q = 16 * hi + lo` with hi in
-8..7 and lo in 0..15. The powers of two are exact; `m + 8 * d` is rounded once, to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UnsupportedModel

from .ggml import Q4_0_BLOCK, Q4_1_BLOCK, Q8_0_BLOCK, RUNNABLE_TYPES, GGMLType, dequantize, unpack_nibbles
from .gguf import GGUFFile
from .model import ModelConfig

__all__ = ["BLOCK", "Activations", "Form", "PackedArray", "PackedMatrix", "WeightsPlan", "pack_rows", "plan_weights"]

BLOCK = 32
"""Weights per block, in every quantised form."""

Activations: TypeAlias = Literal["int8", "fp32"]
"""How the inputs of a product are held: quantised to int8 by blocks of 32, or as they are."""

_ALIGNMENT = 64  # of each array in the file: a cache line
_CHUNK_BYTES = 1 << 20  # of GGUF repacked at a time; bounds the memory of a load


class Form(Enum):
    """How a packed matrix is stored and multiplied by; see the module."""

    Q4 = "q4"
    Q4_OFFSET = "q4+offset"
    Q8 = "q8"
    Q8_HALVES = "q8-halves"
    DENSE = "dense"


@dataclass(frozen=True)
class PackedArray:
    """One array in the weights file.

    Attributes:
        dtype: element type, native byte order.
        shape: `[rows, ...]`.
        offset: bytes from the start of the file.
        nbytes: bytes of the array.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix that maps `columns` inputs to `rows` outputs; tensors that share their input may be stacked in it.

    Attributes:
        form: how it is stored.
        sources: names of the stacked tensors, in order.
        source_rows: rows of each of them.
        columns: inputs.
        arrays: by role: `quants`, `scales`, `offsets`, ... as `pack_rows` names them.
    """

    form: Form
    sources: tuple[str, ...]
    source_rows: tuple[int, ...]
    columns: int
    arrays: dict[str, PackedArray]

    @property
    def rows(self) -> int:
        """Outputs of all stacked tensors."""
        return sum(self.source_rows)


@dataclass(frozen=True)
class WeightsPlan:
    """Where every matrix of a model lies in its weights file.

    Attributes:
        groups: by the names of the tensors that share an input: one stacked matrix if their forms are equal, else
            one for each tensor.
        nbytes: bytes of the whole file.
    """

    groups: dict[tuple[str, ...], tuple[PackedMatrix, ...]]
    nbytes: int

    def write(self, gguf: GGUFFile, file: BinaryIO) -> None:
        """Write the weights file, a megabyte of the model at a time.

        Args:
            gguf: the file the plan was made for.
            file: seekable; left at an unspecified position.

        Raises:
            OSError: the file cannot be written.
        """
        file.truncate(self.nbytes)
        for group in self.groups.values():
            for matrix in group:
                _write_matrix(matrix, gguf, file)
        gguf.release_pages()  # all of them were touched; the sessions that follow need the room


def plan_weights(gguf: GGUFFile, config: ModelConfig, activations: Activations) -> WeightsPlan:
    """Choose a form for every matrix and a place for every array; nothing is read or written.

    Raises:
        UnsupportedModel: a tensor is of a type that rockpage does not run.
    """
    for name, info in gguf.tensors.items():
        if info.type not in RUNNABLE_TYPES:
            runnable = ", ".join(kind.name for kind in RUNNABLE_TYPES)
            raise UnsupportedModel(
                f"{gguf.path}: tensor '{name}' is {info.type.name}; rockpage runs {runnable}: requantise the model",
                path=str(gguf.path),
                tensor=name,
                type=info.type.name,
            )
    planner = _Planner(gguf, activations)
    for layer in range(config.layers):
        block = f"blk.{layer}"
        planner.add(f"{block}.attn_q.weight", f"{block}.attn_k.weight", f"{block}.attn_v.weight")
        planner.add(f"{block}.attn_output.weight")
        planner.add(f"{block}.ffn_gate.weight", f"{block}.ffn_up.weight")
        planner.add(f"{block}.ffn_down.weight")
    planner.add(config.head_tensor)
    return WeightsPlan(planner.groups, planner.end)


@np.errstate(invalid="ignore", over="ignore")  # a damaged scale is inf or NaN here as it is in the file
def pack_rows(form: Form, kind: GGMLType, raw: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Repack whole rows of a tensor.

    Args:
        form: one that suits `kind`.
        kind: type of the tensor.
        raw: uint8 `[rows, row_bytes]`, as it lies in the GGUF file.

    Returns:
        New arrays by role, each `[rows, ...]`: quants uint8 `[rows, blocks, bytes]`, scales and offsets float32
        `[rows, blocks]`, dense weights float32 `[rows, columns]`.
    """
    if form is Form.DENSE:
        return {"weights": dequantize(kind, raw)}
    if form in (Form.Q4, Form.Q4_OFFSET):
        blocks = raw.view(Q4_0_BLOCK if form is Form.Q4 else Q4_1_BLOCK)
        d = blocks["d"].astype(np.float32)
        packed: dict[str, NDArray[Any]] = {"quants": _pack_nibbles(unpack_nibbles(blocks["qs"])), "scales": d}
        if form is Form.Q4_OFFSET:
            packed["offsets"] = blocks["m"].astype(np.float32) + d * 8
        return packed
    blocks = raw.view(Q8_0_BLOCK)
    d = blocks["d"].astype(np.float32)
    biased = blocks["qs"].view(np.uint8) ^ np.uint8(0x80)  # q + 128: flipping the sign bit of two's complement adds it
    if form is Form.Q8:
        return {"quants": biased, "scales": d}
    return {
        "high": _pack_nibbles(biased >> np.uint8(4)),  # hi + 8
        "high_scales": d * 16,
        "low": _pack_nibbles(biased & np.uint8(0x0F)),
        "low_scales": d,
        "offsets": d * 8,
    }


def _pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack 0..15, uint8 `[..., 32]`, as MatMulNBits reads it, uint8 `[..., 16]`: even elements in the low halves."""
    return values[..., 0::2] | values[..., 1::2] << np.uint8(4)


def _form_of(kind: GGMLType, activations: Activations) -> Form:
    if kind is GGMLType.Q4_0:
        return Form.Q4
    if kind is GGMLType.Q4_1:
        return Form.Q4_OFFSET
    if kind is GGMLType.Q8_0:
        return Form.Q8 if activations == "int8" else Form.Q8_HALVES
    return Form.DENSE


class _Planner:
    """Lays groups of matrices one behind the other; `end` is the first byte not yet given away."""

    def __init__(self, gguf: GGUFFile, activations: Activations) -> None:
        self._gguf = gguf
        self._activations = activations
        self.groups: dict[tuple[str, ...], tuple[PackedMatrix, ...]] = {}
        self.end = 0

    def add(self, *names: str) -> None:
        forms = [_form_of(self._gguf.tensors[name].type, self._activations) for name in names]
        if len(set(forms)) == 1:
            self.groups[names] = (self._place(forms[0], names),)
        else:
            self.groups[names] = tuple(self._place(form, (name,)) for form, name in zip(forms, names, strict=True))

    def _place(self, form: Form, names: tuple[str, ...]) -> PackedMatrix:
        infos = [self._gguf.tensors[name] for name in names]
        source_rows = tuple(info.shape[0] for info in infos)
        # The packing of one row tells dtypes and shapes: the layout has no second description to disagree with.
        sample = pack_rows(form, infos[0].type, np.zeros((1, infos[0].nbytes // source_rows[0]), np.uint8))
        arrays = {}
        for role, row in sample.items():
            offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
            nbytes = sum(source_rows) * row.nbytes
            arrays[role] = PackedArray(row.dtype, (sum(source_rows), *row.shape[1:]), offset, nbytes)
            self.end = offset + nbytes
        return PackedMatrix(form, names, source_rows, infos[0].shape[1], arrays)


def _write_matrix(matrix: PackedMatrix, gguf: GGUFFile, file: BinaryIO) -> None:
    at = dict.fromkeys(matrix.arrays, 0)  # bytes of each array written so far
    for name, rows in zip(matrix.sources, matrix.source_rows, strict=True):
        raw = gguf.data(name).reshape(rows, -1)
        step = max(1, _CHUNK_BYTES // raw.shape[1])
        for start in range(0, rows, step):
            for role, values in pack_rows(matrix.form, gguf.tensors[name].type, raw[start : start + step]).items():
                file.seek(matrix.arrays[role].offset + at[role])
                at[role] += file.write(np.ascontiguousarray(values).data)

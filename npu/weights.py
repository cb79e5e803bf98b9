"""Repacks GGUF matrices into forms that ONNX Runtime's kernels run fast, without changing a weight.

`MatMulNBits` multiplies by block-quantised weights `scale * (q - 8)` (4 bits) or `scale * (q - 128)` (8 bits), blocks
of 32 or 16. A zero point per block would cover every GGML type, but a float one leaves the fast kernels: 10 to 24 times
slower (ONNX Runtime 1.32). So what a symmetric block cannot say goes into a second, small product: every element of a
block has the same offset, and `sum(x_i * offset) = sum(x_i) * offset` needs only the sums of x over each block.

With codes, scales and offsets as `blocks.py` takes them apart:

| form      | of                       | weight                                    | product                           |
|-----------|--------------------------|-------------------------------------------|-----------------------------------|
| Q4        | Q4_0, Q3_K               | `scale * code`                            | 4-bit                             |
| Q4_OFFSET | Q4_1, Q4_K, Q2_K         | `scale * code + offset`                   | 4-bit, and block sums by `offset` |
| Q8        | Q8_0, Q5_0, Q6_K, IQ4_NL | `scale * code`                            | 8-bit, int8 activations only      |
| Q8_OFFSET | Q5_1, Q5_K               | `scale * code + offset`                   | 8-bit, and block sums by `offset` |
| Q8_HALVES | Q8's and Q8_OFFSET's     | `16 * scale * hi + scale * lo' + offset'` | two 4-bit, and block sums         |
| DENSE     | F16, BF16, F32           | the value in float32                      | float32                           |

Q8_HALVES is for float activations, for which the 8-bit kernel has no fast path: `code = 16 * hi + lo` with hi in -8..7
and lo in 0..15, `lo' = lo - 8` and `offset' = offset + 8 * scale`, rounded to float32. Everything else is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UnsupportedModel, UsageError

from .blocks import FORMATS, unpack_blocks
from .ggml import RUNNABLE_TYPES, GGMLType, dequantize
from .model import ModelConfig
from .source import ModelSource

__all__ = ["Activations", "Form", "PackedArray", "PackedMatrix", "WeightsPlan", "form_of", "pack_rows", "plan_weights"]

Activations: TypeAlias = Literal["int8", "fp32"]
"""How the inputs of a product are held: quantised to int8 by the blocks of the weights, or as they are."""

_ALIGNMENT = 64  # of each array in the file: a cache line
_CHUNK_BYTES = 1 << 20  # of GGUF repacked at a time; bounds the memory of a load


class Form(Enum):
    """How a packed matrix is stored and multiplied by; see the module."""

    Q4 = "q4"
    Q4_OFFSET = "q4+offset"
    Q8 = "q8"
    Q8_OFFSET = "q8+offset"
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
        block: weights per block, 32 or 16; 1 in a dense matrix.
        sources: names of the stacked tensors, in order.
        source_rows: rows of each of them.
        columns: inputs.
        arrays: by role: `quants`, `scales`, `offsets`, ... as `pack_rows` names them.
    """

    form: Form
    block: int
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

    def write(self, source: ModelSource, file: BinaryIO) -> None:
        """Write the weights file, a megabyte of the model at a time.

        Args:
            source: the model the plan was made for.
            file: seekable; left at an unspecified position.

        Raises:
            OSError: the file cannot be written.
        """
        file.truncate(self.nbytes)
        for group in self.groups.values():
            for matrix in group:
                _write_matrix(matrix, source, file)
        source.release_pages()  # all of them were touched; the sessions that follow need the room


def plan_weights(source: ModelSource, config: ModelConfig, activations: Activations) -> WeightsPlan:
    """Choose a form for every matrix and a place for every array; nothing is read or written.

    Raises:
        UsageError: `activations` is not known.
        UnsupportedModel: a tensor is of a type that rockpage does not run.
        MissingExtra: a tensor's type needs the `gguf` package, which is not installed.
    """
    if activations not in get_args(Activations):
        raise UsageError(f"activations must be int8 or fp32, got {activations!r}", activations=activations)
    for name, info in source.tensors.items():
        if info.type not in RUNNABLE_TYPES:
            runnable = ", ".join(kind.name for kind in RUNNABLE_TYPES)
            raise UnsupportedModel(
                f"{source.path}: tensor '{name}' is {info.type.name}; rockpage runs {runnable}: requantise the model",
                path=str(source.path),
                tensor=name,
                type=info.type.name,
            )
    planner = _Planner(source, activations)
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

    Raises:
        MissingExtra: the type needs the `gguf` package, which is not installed.
    """
    if form is Form.DENSE:
        return {"weights": dequantize(kind, raw)}
    codes, scales, offsets = unpack_blocks(kind, raw)
    if form is Form.Q8_HALVES:
        biased = _biased(codes)
        low_bias = scales * np.float32(8)
        return {
            "high": _pack_nibbles(biased >> np.uint8(4)),  # hi + 8
            "high_scales": scales * np.float32(16),
            "low": _pack_nibbles(biased & np.uint8(0x0F)),
            "low_scales": scales,
            "offsets": low_bias if offsets is None else low_bias + offsets,
        }
    four_bits = form in (Form.Q4, Form.Q4_OFFSET)
    quants = _pack_nibbles((codes + np.int8(8)).view(np.uint8)) if four_bits else _biased(codes)
    packed: dict[str, NDArray[Any]] = {"quants": quants, "scales": scales}
    return packed if offsets is None else {**packed, "offsets": offsets}


def _biased(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """`codes + 128`: flipping the sign bit of two's complement adds it."""
    return codes.view(np.uint8) ^ np.uint8(0x80)


def _pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack 0..15, uint8 `[..., n]`, as MatMulNBits reads it, uint8 `[..., n / 2]`: even elements in the low halves."""
    return values[..., 0::2] | values[..., 1::2] << np.uint8(4)


def form_of(kind: GGMLType, activations: Activations) -> tuple[Form, int]:
    """How a tensor of a type is stored, and weights per block."""
    layout = FORMATS.get(kind)
    if layout is None:
        return Form.DENSE, 1
    if layout.bits == 4:
        form = Form.Q4_OFFSET if layout.offset else Form.Q4
    elif activations == "fp32":
        form = Form.Q8_HALVES
    else:
        form = Form.Q8_OFFSET if layout.offset else Form.Q8
    return form, layout.size


class _Planner:
    """Lays groups of matrices one behind the other; `end` is the first byte not yet given away."""

    def __init__(self, source: ModelSource, activations: Activations) -> None:
        self._source = source
        self._activations = activations
        self.groups: dict[tuple[str, ...], tuple[PackedMatrix, ...]] = {}
        self.end = 0

    def add(self, *names: str) -> None:
        forms = [form_of(self._source.tensors[name].type, self._activations) for name in names]
        if len(set(forms)) == 1:
            self.groups[names] = (self._place(*forms[0], names),)
        else:
            self.groups[names] = tuple(self._place(*form, (name,)) for form, name in zip(forms, names, strict=True))

    def _place(self, form: Form, block: int, names: tuple[str, ...]) -> PackedMatrix:
        infos = [self._source.tensors[name] for name in names]
        source_rows = tuple(info.shape[0] for info in infos)
        # The packing of one row tells dtypes and shapes: the layout has no second description to disagree with.
        sample = pack_rows(form, infos[0].type, np.zeros((1, infos[0].nbytes // source_rows[0]), np.uint8))
        arrays = {}
        for role, row in sample.items():
            offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
            nbytes = sum(source_rows) * row.nbytes
            arrays[role] = PackedArray(row.dtype, (sum(source_rows), *row.shape[1:]), offset, nbytes)
            self.end = offset + nbytes
        return PackedMatrix(form, block, names, source_rows, infos[0].shape[1], arrays)


def _write_matrix(matrix: PackedMatrix, source: ModelSource, file: BinaryIO) -> None:
    at = dict.fromkeys(matrix.arrays, 0)  # bytes of each array written so far
    for name, rows in zip(matrix.sources, matrix.source_rows, strict=True):
        raw = source.data(name).reshape(rows, -1)
        step = max(1, _CHUNK_BYTES // raw.shape[1])
        for start in range(0, rows, step):
            for role, values in pack_rows(matrix.form, source.tensors[name].type, raw[start : start + step]).items():
                file.seek(matrix.arrays[role].offset + at[role])
                at[role] += file.write(np.ascontiguousarray(values).data)

"""Writes a model with smaller weights: from any source that speaks GGUF's names to one GGUF file.

GGUF because it is the standard for quantised models of this size: one file holds weights, dimensions, tokenizer and
chat template; llama.cpp and everything built on it read it; and it can be mapped, so that a load copies nothing. The
`gguf` package of llama.cpp's makers writes it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from hostcache.errors import MissingExtra, UsageError
from hostcache.whole_file import whole_file

from .ggml import GGMLType
from .gguf_header import MetaValue
from .requantise import Loss, Weights, requantise, target_type
from .source import ModelSource

if TYPE_CHECKING:
    import gguf

__all__ = ["Conversion", "Part", "convert_model"]

_FILE_TYPES: dict[Weights, int] = {"int4": 3, "int8": 7}  # LLAMA_FTYPE_MOSTLY_Q4_1 and _Q8_0 of llama.h
_OF_THE_WRITER = ("general.architecture", "general.quantization_version", "general.alignment")
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION of ggml.h


@dataclass
class Part:
    """The tensors that were brought to one type.

    Attributes:
        type: what they are stored as.
        copied: they were of this type before, and are the same bytes.
        tensors: how many.
        nbytes: bytes of all.
        loss: what their weights lost.
    """

    type: GGMLType
    copied: bool
    tensors: int = 0
    nbytes: int = 0
    loss: Loss = field(default_factory=Loss)

    def count(self, nbytes: int) -> None:
        """Add a tensor of so many bytes."""
        self.tensors += 1
        self.nbytes += nbytes


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source_bytes: bytes of the source's tensors.
        nbytes: bytes of the file.
        parts: by type, the largest first.
    """

    source_bytes: int
    nbytes: int
    parts: tuple[Part, ...]


def convert_model(
    source: ModelSource, metadata: Mapping[str, MetaValue], weights: Weights, out: str | os.PathLike[str]
) -> Conversion:
    """Write a model's weights with fewer bits.

    Memory is bounded by some ten megabytes, however large a tensor is; a llama's folder adds a copy of one q or k.

    Args:
        source: the open model.
        metadata: what the file says of the model, by GGUF's keys: the source's, and the tokenizer's.
        weights: bits of the matrices.
        out: the file to write; it appears when it is whole.

    Raises:
        UsageError: `out` is there already, or there is no room for it.
        UnsupportedModel: a tensor is of a type that rockpage does not read.
        BadModelFile: a weight is infinite, not a number, or too large.
        MissingExtra: the `gguf` package is not installed.
        OSError: `out` cannot be written.
    """
    try:
        import gguf  # noqa: PLC0415 - comes with an extra
    except ModuleNotFoundError as error:
        raise MissingExtra("writing GGUF needs gguf: pip install 'rockpage[model]'") from error
    out = Path(out)
    targets = {name: target_type(name, info, weights) for name, info in source.tensors.items()}
    parts: dict[tuple[GGMLType, bool], Part] = {}
    with whole_file(out) as fd:
        writer = gguf.GGUFWriter(f"/proc/self/fd/{fd}", str(metadata["general.architecture"]))
        try:
            requantised = any(source.tensors[name].type is not target for name, target in targets.items())
            file_type: Mapping[str, MetaValue] = {"general.file_type": _FILE_TYPES[weights]} if requantised else {}
            _add_metadata(writer, {**metadata, **file_type})
            file, nbytes = _add_directory(writer, source, targets)
            _set_aside(fd, nbytes, out)
            for name, target in targets.items():
                copied = target is source.tensors[name].type
                part = parts.setdefault((target, copied), Part(target, copied))
                written = 0
                for piece in requantise(source, name, target, part.loss):
                    piece.tofile(file)
                    written += piece.nbytes
                    source.release_pages()
                writer.write_padding(file, written)
                part.count(written)
        finally:
            writer.close()
    source_bytes = sum(info.nbytes for info in source.tensors.values())
    return Conversion(source_bytes, nbytes, tuple(sorted(parts.values(), key=lambda part: -part.nbytes)))


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, MetaValue]) -> None:
    """Carry the metadata over in the types that readers insist on, as llama.cpp's own converter chooses them."""
    from gguf import GGUFValueType as Type  # noqa: PLC0415 - comes with an extra

    for key, value in metadata.items():
        if key in _OF_THE_WRITER or value == []:  # GGUF's writer has no empty lists; they say what a missing key says
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, Type.ARRAY, _value_type(value, Type.INT32))
        else:
            writer.add_key_value(key, value, _value_type([value], Type.UINT32))
    writer.add_quantization_version(_QUANTIZATION_VERSION)


def _value_type(values: Sequence[Any], integer: gguf.GGUFValueType) -> gguf.GGUFValueType:
    """The type of some values of one kind: float32 and `integer` where their range holds all of them, else a wider one.

    Readers insist on float32, so that what config.json says in decimals is rounded to it, as by llama.cpp's converter.
    """
    from gguf import GGUFValueType as Type  # noqa: PLC0415 - comes with an extra

    if isinstance(values[0], str):
        return Type.STRING
    if isinstance(values[0], bool):
        return Type.BOOL
    if isinstance(values[0], float):
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        return Type.FLOAT32 if largest <= float(np.finfo(np.float32).max) else Type.FLOAT64
    low, high = min(values), max(values)
    for kind in (integer, Type.INT32, Type.UINT32, Type.INT64):
        limits = np.iinfo(kind.name.lower())
        if limits.min <= low and high <= limits.max:
            return kind
    return Type.UINT64


def _add_directory(
    writer: gguf.GGUFWriter, source: ModelSource, targets: Mapping[str, GGMLType]
) -> tuple[BinaryIO, int]:
    """Write everything that stands before the tensors' bytes; returns the file, and how many bytes it will have."""
    import gguf  # noqa: PLC0415 - comes with an extra

    behind = 0
    for name, target in targets.items():
        *rows, columns = source.tensors[name].shape
        shape = (*rows, target.bytes_of(columns))  # of bytes; the writer makes elements of it
        nbytes = math.prod(shape)
        behind += writer.ggml_pad(nbytes, writer.data_alignment)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), nbytes, gguf.GGMLQuantizationType(target))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None  # since the header was written
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    return file, file.tell() + behind


def _set_aside(fd: int, nbytes: int, out: Path) -> None:
    """Take the room of the whole file, so that a full disk shows before the work and not at its end."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise UsageError(
            f"{out} would have {nbytes} bytes: {error.strerror}; make room or write it elsewhere", needed=nbytes
        ) from error

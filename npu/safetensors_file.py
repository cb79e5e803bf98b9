"""Opens safetensors, the file format of Hugging Face's weights: a tensor directory, then the tensors' bytes.

The directory is parsed and checked by the `safetensors` library. The bytes are views of our own mapping: the library
can only hand out copies, and a step looks up rows of the embedding in place.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, MissingExtra, UnsupportedModel

from .ggml import GGMLType
from .gguf_header import TensorInfo
from .mapped_file import MappedFile

__all__ = ["SAFETENSORS_TYPES", "SafetensorsFile"]

SAFETENSORS_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
"""The types of tensors that are read, by the format's names."""

_LENGTH_BYTES = 8  # the header's length as u64, in front of it
_HEADER_LIMIT = 8 << 20  # 100 to 200 bytes a tensor, hundreds of tensors; the library's own limit is 100 MB


class SafetensorsFile:
    """An open safetensors file.

    Args:
        path: a regular file.

    Attributes:
        file: the mapped file.
        tensors: the tensor directory, in the order of the bytes.

    Raises:
        UsageError: the path cannot be opened or mapped, or is not a regular file.
        BadModelFile: the file is not safetensors, is cut short, or contradicts itself.
        UnsupportedModel: a tensor is neither F32 nor F16 nor BF16.
        MissingExtra: the `safetensors` library is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import safetensors  # noqa: PLC0415 - comes with an extra
        except ModuleNotFoundError as error:
            raise MissingExtra("reading .safetensors needs safetensors: pip install 'rockpage[model]'") from error
        self.file = MappedFile(path)
        header_bytes = int.from_bytes(self.file.mapping[:_LENGTH_BYTES], "little")
        if header_bytes > _HEADER_LIMIT:
            raise BadModelFile(
                f"{path}: says that its header has {header_bytes} bytes; rockpage reads {_HEADER_LIMIT} at most: the"
                " file is damaged, or not safetensors",
                path=str(path),
                header_bytes=header_bytes,
            )
        self.tensors: dict[str, TensorInfo] = {}
        at = _LENGTH_BYTES + header_bytes
        try:
            with safetensors.safe_open(path, framework="numpy") as checked:
                for name in checked.offset_keys():
                    entry = checked.get_slice(name)
                    info = _describe(path, name, entry.get_dtype(), tuple(entry.get_shape()), at)
                    self.tensors[name] = info
                    at += info.nbytes  # the library refuses tensors with gaps between them
        except (safetensors.SafetensorError, OSError) as error:
            raise BadModelFile(
                f"{path}: {error}; the file is damaged or cut short: fetch it again", path=str(path), reason=str(error)
            ) from error
        if at != self.file.size:
            raise BadModelFile(f"{path}: replaced while it was read; load it again", path=str(path))

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 `[nbytes]`, read-only, a view of the mapping. It stays valid after `close`.

        Args:
            name: a key of `tensors`.

        Raises:
            UsageError: the file was closed.
        """
        info = self.tensors[name]
        return self.file.content()[info.offset : info.offset + info.nbytes]


def _describe(path: Path, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> TensorInfo:
    if dtype not in SAFETENSORS_TYPES:
        raise UnsupportedModel(
            f"{path}: tensor '{name}' is {dtype}; rockpage reads {', '.join(SAFETENSORS_TYPES)}: use weights that are"
            " not quantised",
            path=str(path),
            tensor=name,
            type=dtype,
        )
    kind = SAFETENSORS_TYPES[dtype]
    return TensorInfo(name, shape, kind, offset, kind.bytes_of(math.prod(shape)))

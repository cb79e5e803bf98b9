"""Opens GGUF, the file format of llama.cpp's models: metadata, a tensor directory, and the tensors' bytes.

The header is read once into Python values; the tensors stay in the page cache behind a read-only mapping.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile

from .gguf_header import GGUFHeader, MetaValue, TensorInfo
from .mapped_file import MappedFile

__all__ = ["GGUFFile", "MetaValue", "TensorInfo"]


class GGUFFile:
    """An open GGUF file, versions 2 and 3, little endian.

    Attributes:
        path: as given to `open`.
        files: the file itself.
        version: the format's version.
        metadata: every key of the header.
        tensors: the tensor directory, in the file's order.

    Example:
        >>> from npu.gguf import GGUFFile
        >>> with GGUFFile.open("model.gguf") as file:
        ...     print(file.metadata["llama.block_count"], len(file.tensors))  # 9 a layer, embedding and last norm
        30 272
    """

    def __init__(self, file: MappedFile) -> None:
        header = GGUFHeader(file.path, file.mapping)
        self.path = file.path
        self.files = (file,)
        self.version = header.version
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._file = file

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map a file and read its header.

        Args:
            path: a regular file.

        Raises:
            UsageError: the path cannot be opened or mapped, or is not a regular file.
            BadModelFile: the file is not GGUF, is cut short, or contradicts itself.
            UnsupportedModel: big endian, a version other than 2 or 3, or an unknown tensor type.
        """
        return cls(MappedFile(Path(path)))

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._file.size

    def own_name(self, tensor: str) -> str:
        """What the file calls a tensor: the same."""
        return tensor

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as they lie in the file.

        Args:
            name: a key of `tensors`.

        Returns:
            uint8 `[nbytes]`, read-only, a view of the mapping. It stays valid after `close`.

        Raises:
            BadModelFile: the file has no such tensor.
            UsageError: the file was closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise BadModelFile(f"{self.path}: tensor '{name}' is missing", path=str(self.path), tensor=name)
        return self._file.content()[info.offset : info.offset + info.nbytes]

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; touching a view brings its pages back."""
        self._file.release_pages()

    def close(self) -> None:
        """Refuse further use; the mapping goes with this object and the last view from `data`. Safe to call twice."""
        self._file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

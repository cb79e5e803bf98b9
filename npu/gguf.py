"""Opens GGUF, the file format of llama.cpp's models: metadata, a tensor directory, and the tensors' bytes.

The header is read once into Python values; the tensors stay in the page cache behind a read-only mapping.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UsageError

from .gguf_header import GGUFHeader, MetaValue, TensorInfo

__all__ = ["GGUFFile", "MetaValue", "TensorInfo", "file_identity"]


class GGUFFile:
    """An open GGUF file, versions 2 and 3, little endian.

    Attributes:
        path: as given to `open`.
        identity: size, modification time in ns and inode, to notice that the path now names another file.
        version: the format's version.
        metadata: every key of the header.
        tensors: the tensor directory, in the file's order.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, status: os.stat_result) -> None:
        header = GGUFHeader(path, mapping)
        self.path = path
        self.identity = file_identity(status)
        self.version = header.version
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._mapping = mapping
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)

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
        path = Path(path)
        try:
            # Without O_NONBLOCK, opening a FIFO that nobody writes to would wait for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot open model file {path}: {reason}", path=str(path), reason=reason) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"model {path} is not a regular file; give the path of a .gguf file", path=str(path))
            if status.st_size == 0:  # mmap refuses empty files
                raise BadModelFile(f"{path}: the file is empty; fetch it again", path=str(path), size=0)
            mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except OSError as error:  # a file of the kernel's, or an address space too small for it
            raise UsageError(f"cannot map model file {path}: {error.strerror}", path=str(path)) from error
        finally:
            os.close(fd)
        return cls(path, mapping, status)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self._mapped())

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
        return self._mapped()[info.offset : info.offset + info.nbytes]

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; touching a view brings its pages back."""
        self._mapped()
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Refuse further use; the mapping goes with this object and the last view from `data`. Safe to call twice."""
        self._bytes = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mapped(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise UsageError(f"model file {self.path} was closed", path=str(self.path))
        return self._bytes


def file_identity(status: os.stat_result) -> tuple[int, int, int]:
    """What distinguishes a file's content without reading it: size, modification time in ns, inode."""
    return status.st_size, status.st_mtime_ns, status.st_ino

"""A file of a model, mapped read-only: its bytes stay in the page cache and are no memory of this process's own."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UsageError

__all__ = ["MappedFile", "file_identity", "open_regular_file", "release_mappings"]


class MappedFile:
    """A regular file, mapped whole.

    Args:
        path: the file.

    Attributes:
        path: as given.
        identity: size, modification time in ns and inode, to notice that the path now names another file.
        mapping: the file's bytes, for parsers that read in place.

    Raises:
        UsageError: the path cannot be opened or mapped, or is not a regular file.
        BadModelFile: the file is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = open_regular_file(path)
        if fd is None:
            reason = os.strerror(errno.ENOENT)
            raise UsageError(f"cannot open model file {path}: {reason}", path=str(path), reason=reason)
        try:
            status = os.fstat(fd)
            if status.st_size == 0:  # mmap refuses empty files
                raise BadModelFile(f"{path}: the file is empty; fetch it again", path=str(path), size=0)
            self.mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except OSError as error:  # a file of the kernel's, or an address space too small for it
            raise UsageError(f"cannot map model file {path}: {error.strerror}", path=str(path)) from error
        finally:
            os.close(fd)
        self.identity = file_identity(status)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self.mapping, np.uint8)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.content())

    def content(self) -> NDArray[np.uint8]:
        """The whole file, uint8 `[size]`, read-only, a view of the mapping. It stays valid after `close`.

        Raises:
            UsageError: the file was closed.
        """
        if self._bytes is None:
            raise UsageError(f"model file {self.path} was closed", path=str(self.path))
        return self._bytes

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; touching a view brings its pages back."""
        self.content()
        self.mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Refuse further use; the mapping goes with this object and the last view. Safe to call twice."""
        self._bytes = None


def open_regular_file(path: Path) -> int | None:
    """Open a regular file of a model for reading; nothing else that the path may name is opened, or waited for.

    Returns:
        A file descriptor, the caller's own; None when there is no such file.

    Raises:
        UsageError: it cannot be opened, or is not a regular file.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO that nobody writes to would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot open model file {path}: {reason}", path=str(path), reason=reason) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(
            f"{path} is not a regular file; give the path of a .gguf file or of a model folder", path=str(path)
        )
    return fd


def file_identity(status: os.stat_result) -> tuple[int, int, int]:
    """What distinguishes a file's content without reading it: size, modification time in ns, inode."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def release_mappings(path: Path) -> None:
    """Take a file's pages out of this process's memory, whoever in it has mapped them; reading brings them back.

    Args:
        path: a file that nobody writes to through a mapping: what was written to a private one would be lost.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    real = os.path.realpath(path).replace("\n", "\\012")  # as the kernel writes it; it escapes nothing else
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    for line in maps.removesuffix("\n").split("\n"):
        span, *_, name = line.split(maxsplit=5)  # a mapping of no file has no name, and its inode stands there
        if name == real:
            start, end = (int(address, 16) for address in span.split("-"))
            madvise(start, end - start, mmap.MADV_DONTNEED)  # advice: a kernel that does not take it loses nothing

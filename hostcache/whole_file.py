"""Files that are whole from the moment they have a name."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError

__all__ = ["replace_file", "whole_file"]

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)  # open(2): old kernels, some systems


@contextmanager
def whole_file(path: Path, mode: int = 0o666, *, replace: bool = False) -> Iterator[int]:
    """A new file to write, which gets its name when the context ends, and is gone if it ends with an error.

    While it is written it has no name at all, so that not even a killed process leaves a part of it behind. File
    systems that know no unnamed files get a hidden one beside `path`.

    Args:
        path: the name; its folder exists.
        mode: permissions, less the process's umask.
        replace: take the place of a file that is there; readers, and whoever comes after a power cut, see the old one
            or the new.

    Yields:
        A file descriptor, open for reading and writing; closed with the context.

    Raises:
        UsageError: `path` is there already, and is not to be replaced.
        OSError: the folder cannot be written, or the file system is full.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    hidden = _hidden(path)
    fd = -1
    try:
        if not replace and os.path.lexists(path):
            raise UsageError(f"{path} is there already; remove it or give another name", path=str(path))
        try:
            fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
            fd = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=folder)
        yield fd
        os.fsync(fd)
        if not replace:
            # A link, unlike a rename, never takes the place of a file that has come meanwhile.
            _name(fd, path.name, folder)
        else:
            with contextlib.suppress(FileExistsError):  # it has the hidden name already
                _name(fd, hidden, folder)
            os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except FileExistsError as error:
        raise UsageError(f"{path} has come meanwhile; remove it or give another name", path=str(path)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden, dir_fd=folder)
        for open_fd in (fd, folder):
            if open_fd >= 0:
                os.close(open_fd)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a small file so that readers see the old content or the new, never half of it.

    Args:
        path: the name; its folder exists.
        content: all of it.
        mode: permissions, less the process's umask.

    Raises:
        OSError: the folder cannot be written, or the file system is full.
    """
    hidden = path.with_name(_hidden(path))
    try:
        with os.fdopen(os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _name(fd: int, name: str, folder: int) -> None:
    """Give an open file a name: with a folder's descriptor this is linkat with AT_SYMLINK_FOLLOW, through /proc."""
    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder, dst_dir_fd=folder)


def _hidden(path: Path) -> str:
    """A name beside `path` that no other file has."""
    return f".{path.name[:200]}.{secrets.token_hex(8)}.tmp"

"""A disk that may lose whatever was not synced: what a file's name can lead to after a power cut at any moment.

It watches the calls of `os` that writing a file takes, lets them through, and keeps book of what each has made durable:

- `fsync` of a file makes what was written to it durable. Of the rest, a power cut may leave nothing, a part, all, or
  as many zeros (delayed allocation: ext4 and XFS set a file's length before its data is on disk).
- `fsync` of a folder makes the names in it durable. Of later changes, a power cut may leave any number, in order, as
  journals do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OLD = -1
"""Key of the file that was there before, all of it durable."""


@dataclass
class Written:
    """What was written to one file, and how much of it is durable."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0

    def after_a_cut(self) -> Iterator[bytes]:
        """What may be left of it."""
        lost = len(self.data) - self.synced
        for kept in {0, lost // 2, lost}:
            yield bytes(self.data[: self.synced + kept])
        yield bytes(self.data[: self.synced]) + bytes(lost)


class UnsyncedDisk:
    """Watches one folder, in which `name` is to be written.

    Args:
        path: the file; it may exist.
        patch: puts the watched calls in the place of those of `os`.
        unnamed_files: whether the file system knows them.
        sync: False: a disk, or a program, that does not sync at all.

    Attributes:
        cuts: for every moment so far, all contents that the name may lead to after a power cut; None is no file.
    """

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, *, unnamed_files: bool = True, sync: bool = True) -> None:
        self._name = path.name
        self._files: dict[int, Written] = {}
        self._names: list[tuple[str, str, int | str]] = []
        self._names_synced = 0
        self._keys: dict[int, int] = {}  # by descriptor
        self._old = path.read_bytes() if path.exists() else None
        self.cuts: list[set[bytes | None]] = [{self._old}]
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "link", "rename", "unlink")}

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            unnamed = flags & os.O_TMPFILE == os.O_TMPFILE
            if unnamed and not unnamed_files:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            fd: int = real["open"](path, flags, mode, dir_fd=dir_fd)
            if flags & (os.O_WRONLY | os.O_RDWR):
                key = self._keys[fd] = len(self._files)
                self._files[key] = Written()
                if not unnamed:
                    self._happened(("link", os.fspath(path), key))
            else:
                self._keys.pop(fd, None)
            return fd

        def written(fd: int, data: Any) -> int:
            count: int = real["write"](fd, data)
            self._files[self._keys[fd]].data += bytes(data[:count])
            self._happened()
            return count

        def synced(fd: int) -> None:
            real["fsync"](fd)
            if not sync:
                return
            if fd in self._keys:
                file = self._files[self._keys[fd]]
                file.synced = len(file.data)
            else:
                self._names_synced = len(self._names)
            self._happened()

        def linked(source: str, target: str, **folders: int) -> None:
            real["link"](source, target, **folders)
            self._happened(("link", target, self._keys[int(Path(source).name)]))

        def renamed(source: str, target: str, **folders: int) -> None:
            real["rename"](source, target, **folders)
            self._happened(("rename", target, source))

        def unlinked(name: str, **folders: int) -> None:
            real["unlink"](name, **folders)
            self._happened(("unlink", name, 0))

        for name, watched in (
            ("open", opened),
            ("write", written),
            ("fsync", synced),
            ("link", linked),
            ("rename", renamed),
            ("unlink", unlinked),
        ):
            patch.setattr(os, name, watched)

    def _happened(self, change: tuple[str, str, int | str] | None = None) -> None:
        """Note what a power cut at this moment may leave."""
        if change is not None:
            self._names.append(change)
        found: set[bytes | None] = set()
        for count in range(self._names_synced, len(self._names) + 1):
            found |= self._after(self._names[:count])
        self.cuts.append(found)

    def _after(self, changes: list[tuple[str, str, int | str]]) -> set[bytes | None]:
        names: dict[str, int] = {} if self._old is None else {self._name: OLD}
        for what, name, source in changes:
            if what == "unlink":
                del names[name]
            else:
                names[name] = names.pop(source) if isinstance(source, str) else source
        key = names.get(self._name)
        if key is None:
            return {None}
        return {self._old} if key == OLD else set(self._files[key].after_a_cut())

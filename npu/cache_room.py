"""Keeps a cache within bounds: what was used longest ago goes first, what is in use stays.

An entry is a folder with one file that matters, weights or a compiled graph; whatever else lies in the cache is left
alone. Whoever uses the file holds a shared lock on it, and removing needs an exclusive one; the kernel lets go of both
when a process ends, however it ends. The file's modification time says when it was used last: access times are off or
coarse on most systems. A process that is killed while it removes entries leaves a sound cache, for each is whole or not
there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostcache.errors import UsageError

from .sizes import parse_size

__all__ = ["DEFAULT_LIMIT", "CacheEntry", "CacheRoom", "cache_limit", "open_in_use", "open_sound"]

DEFAULT_LIMIT = 4 << 30
"""Bytes: three models of 1.1B weights in 8 bits, which take 1.125 bytes each (1.375 for fp32 activations)."""

_LIMIT_VARIABLE = "ROCKPAGE_CACHE_SIZE"
_ENTRY_NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9]+-[0-9]+")  # half a SHA-256, what it is for, the version of its form


@dataclass(frozen=True)
class CacheEntry:
    """One model's repacked weights for one mode of activations, or one compiled graph.

    Attributes:
        folder: where it lies.
        nbytes: bytes of all files in it.
        used: when a process used it last, seconds since the epoch.
        in_use: whether a process uses it now.
    """

    folder: Path
    nbytes: int
    used: float
    in_use: bool


def cache_limit() -> int:
    """Bytes that all entries of a cache together may have: `ROCKPAGE_CACHE_SIZE`, such as `2GiB`, or `DEFAULT_LIMIT`.

    Raises:
        UsageError: the variable holds no size.
    """
    text = os.environ.get(_LIMIT_VARIABLE)
    if not text:
        return DEFAULT_LIMIT
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{_LIMIT_VARIABLE}: {error}", variable=_LIMIT_VARIABLE, value=text) from error


def open_in_use(path: Path) -> io.BufferedReader:
    """Open an entry's file, which no process removes from the cache until the stream is closed.

    Raises:
        OSError: the file is not there, or is being removed, or its file system knows no locks.
    """
    file = open(path, "rb", opener=_at_once)  # noqa: SIM115 - the caller's own
    try:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for a removal that is under way, and for nothing longer
        if os.fstat(file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        file.close()
        raise
    return file


def open_sound(path: Path, is_sound: Callable[[io.BufferedReader], bool]) -> io.BufferedReader | None:
    """Open an entry's file if it is what it should be, and note that it was used.

    Args:
        path: the file.
        is_sound: looks into it.

    Returns:
        The stream, read as far as `is_sound` read; see `open_in_use`. None if the file is not there or damaged.
    """
    with contextlib.ExitStack() as closing:
        try:
            file = closing.enter_context(open_in_use(path))
            if not is_sound(file):
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError):  # another user's, or read-only: it only seems to be used less than it is
            os.utime(file.fileno())
        closing.pop_all()
        return file


@dataclass(frozen=True)
class CacheRoom:
    """The entries of one cache.

    Attributes:
        folder: where they lie; need not exist.
        file: name of the file that every entry has.
    """

    folder: Path
    file: str

    def entries(self) -> list[CacheEntry]:
        """All of them, those used longest ago first; none if there is no such folder.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            named = [path for path in self.folder.iterdir() if _ENTRY_NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        folders = [path for path in named if path.is_dir() and not path.is_symlink()]
        return sorted(filter(None, map(self._describe, folders)), key=lambda entry: entry.used)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only one who adds to the folder, which exists, or removes from it.

        Raises:
            OSError: the folder cannot be written, or its file system knows no locks.
        """
        with open(self.folder / "lock", "wb", opener=_at_once) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when we are done or dead
            yield

    @contextmanager
    def new_file(self, entry: Path) -> Iterator[Path]:
        """A file to write for an entry, which gets its name when the context ends, and is gone if that is by an error.

        To be called within `writing`.

        Args:
            entry: its folder; made if missing, mode 0700.

        Raises:
            OSError: the folder cannot be written.
        """
        entry.mkdir(mode=0o700, exist_ok=True)
        path = entry / self.file
        unfinished = path.with_suffix(".tmp")  # a killed writer's is written over
        try:
            yield unfinished
        except BaseException:  # a full disk that should not stay full; Ctrl-C
            unfinished.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not if it holds a damaged file
                entry.rmdir()
            raise
        unfinished.replace(path)
        _sync_folder(entry)

    def make_room(self, needed: int, limit: int, *, beside: Path | None = None) -> None:
        """Remove entries until `needed` more bytes keep the cache within its limit and its disk has room for them.

        What is in use stays, even if that is beyond the limit: removing it would free nothing before its users end.
        All stay if the disk would have too little room even without them. To be called within `writing`.

        Args:
            needed: bytes that will be added.
            limit: bytes that all entries together may have.
            beside: the entry that the bytes are for; neither counted nor removed.

        Raises:
            OSError: the folder cannot be read.
        """
        entries = [entry for entry in self.entries() if entry.folder != beside]
        removable = sum(entry.nbytes for entry in entries if not entry.in_use)
        if needed > shutil.disk_usage(self.folder).free + removable:
            return
        total = sum(entry.nbytes for entry in entries)
        for entry in entries:
            if total + needed <= limit and needed <= shutil.disk_usage(self.folder).free:
                return
            if self._remove(entry.folder):
                total -= entry.nbytes

    def clear(self) -> None:
        """Remove every entry that nobody uses.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.folder.exists():
            with self.writing():
                for entry in self.entries():
                    self._remove(entry.folder)

    def _describe(self, entry: Path) -> CacheEntry | None:
        """An entry, or None if it went away meanwhile, or is another user's who lets nobody look."""
        file = entry / self.file
        try:
            nbytes = sum(path.lstat().st_size for path in entry.iterdir())
            used = (file if file.exists() else entry).stat().st_mtime
        except OSError:
            return None
        with self._claimed(entry) as unused:
            return CacheEntry(entry, nbytes, used, not unused)

    def _remove(self, entry: Path) -> bool:
        """Remove an entry unless somebody uses it; whether it is gone."""
        with self._claimed(entry) as unused:
            if unused:
                shutil.rmtree(entry, ignore_errors=True)
        return not entry.exists()

    @contextmanager
    def _claimed(self, entry: Path) -> Iterator[bool]:
        """Whether nobody uses an entry; if so, nobody can begin to before the context ends."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(entry / self.file, "rb", opener=_at_once))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unused = True
            except FileNotFoundError:  # what a killed process left
                unused = True
            except OSError:  # locked, or another user's
                unused = False
            yield unused


def _at_once(path: str, flags: int) -> int:
    """Open a file; a pipe in its place is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Keeps the weights cache within bounds: what was used longest ago goes first, what is in use stays.

An entry is a folder with one weights file, of the name that `weights_cache.py` gives it; whatever else lies in the
cache is left alone. Whoever uses the file holds a shared lock on it, and removing needs an exclusive one; the kernel
lets go of both when a process ends, however it ends. The file's modification time says when it was used last: access
times are off or coarse on most systems. A process that is killed while it removes entries leaves a sound cache, for
each is whole or not there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostcache.errors import UsageError

from .onnx_graph import WEIGHTS_FILE
from .sizes import parse_size

__all__ = ["DEFAULT_LIMIT", "CacheEntry", "cache_limit", "clear", "entries_of", "make_room", "open_in_use", "writing"]

DEFAULT_LIMIT = 4 << 30
"""Bytes: three models of 1.1B weights in 8 bits, which take 1.125 bytes each (1.375 for fp32 activations)."""

_LIMIT_VARIABLE = "ROCKPAGE_CACHE_SIZE"
_ENTRY_NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9]+-[0-9]+")  # half a SHA-256, activations, the version of the form


@dataclass(frozen=True)
class CacheEntry:
    """One model's repacked weights for one mode of activations.

    Attributes:
        folder: where they lie.
        nbytes: bytes of all files in it.
        used: when a process loaded them last, seconds since the epoch.
        in_use: whether a process uses them now.
    """

    folder: Path
    nbytes: int
    used: float
    in_use: bool


def cache_limit() -> int:
    """Bytes that all entries together may have: `ROCKPAGE_CACHE_SIZE`, such as `2GiB`, or `DEFAULT_LIMIT`.

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
    """Open a weights file, which no process removes from the cache until the stream is closed.

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


def entries_of(weights: Path) -> list[CacheEntry]:
    """The entries of a cache's `weights` folder, those used longest ago first; none if there is no such folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        named = [path for path in weights.iterdir() if _ENTRY_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    folders = [path for path in named if path.is_dir() and not path.is_symlink()]
    return sorted(filter(None, map(_describe, folders)), key=lambda entry: entry.used)


@contextmanager
def writing(weights: Path) -> Iterator[None]:
    """Be the only one who adds to a cache's `weights` folder or removes from it.

    Args:
        weights: the folder, which exists.

    Raises:
        OSError: the folder cannot be written, or its file system knows no locks.
    """
    with open(weights / "lock", "wb", opener=_at_once) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when we are done or dead
        yield


def make_room(weights: Path, needed: int, limit: int, *, beside: Path | None = None) -> None:
    """Remove entries until `needed` more bytes keep the cache within its limit and its disk has room for them.

    What is in use stays, even if that is beyond the limit: removing it would free nothing before its users end. All
    stay if the disk would have too little room even without them.

    Args:
        weights: the cache's `weights` folder, within `writing`.
        needed: bytes that will be added.
        limit: bytes that all entries together may have.
        beside: the entry that the bytes are for; neither counted nor removed.

    Raises:
        OSError: the folder cannot be read.
    """
    entries = [entry for entry in entries_of(weights) if entry.folder != beside]
    removable = sum(entry.nbytes for entry in entries if not entry.in_use)
    if needed > shutil.disk_usage(weights).free + removable:
        return
    total = sum(entry.nbytes for entry in entries)
    for entry in entries:
        if total + needed <= limit and needed <= shutil.disk_usage(weights).free:
            return
        if _remove(entry.folder):
            total -= entry.nbytes


def clear(weights: Path) -> None:
    """Remove every entry that nobody uses.

    Raises:
        OSError: the folder cannot be written.
    """
    if weights.exists():
        with writing(weights):
            for entry in entries_of(weights):
                _remove(entry.folder)


def _at_once(path: str, flags: int) -> int:
    """Open a file; a pipe in its place is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _describe(folder: Path) -> CacheEntry | None:
    """An entry, or None if it went away meanwhile, or is another user's who lets nobody look."""
    weights = folder / WEIGHTS_FILE
    try:
        nbytes = sum(file.lstat().st_size for file in folder.iterdir())
        used = (weights if weights.exists() else folder).stat().st_mtime
    except OSError:
        return None
    with _claimed(folder) as unused:
        return CacheEntry(folder, nbytes, used, not unused)


def _remove(folder: Path) -> bool:
    """Remove an entry unless somebody uses it; whether it is gone."""
    with _claimed(folder) as unused:
        if unused:
            shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Whether nobody uses an entry; if so, nobody can begin to before the context ends."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(folder / WEIGHTS_FILE, "rb", opener=_at_once))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unused = True
        except FileNotFoundError:  # what a killed process left
            unused = True
        except OSError:  # locked, or another user's
            unused = False
        yield unused

"""Keeps repacked weights on disk, so that a model is repacked once and mapped from then on.

    $XDG_CACHE_HOME/rockpage/
        digests/<of the path>.json      what a model file hashed to, while its size, time and inode are the same
        weights/
            lock                        held while something is added or removed
            <model>-<form>-<form version>/   the form: int8, fp32, or tiles and their version
                weights.bin             the arrays of a plan, then the SHA-256 of all of them

A file appears under its name only when it is complete and on disk. What is found there is hashed before it is used,
so a damaged file is rebuilt instead of believed. Nothing in it comes from a prompt. `cache_room.py` bounds its size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from hostcache.errors import BadModelFile, RockpageError, UsageError
from hostcache.whole_file import replace_file

from .cache_room import CacheRoom, cache_limit, open_in_use, open_sound
from .folder_files import read_object
from .mapped_file import MappedFile, file_identity
from .onnx_graph import WEIGHTS_FILE
from .source import ModelSource

__all__ = [
    "FORM_VERSION",
    "FilePlan",
    "default_cache_dir",
    "make_private",
    "model_digest",
    "weights_folder",
    "weights_room",
]

FORM_VERSION = 1
"""Part of the cache's key and of a decoder's `numerics`: raise it whenever a file's content or a graph changes."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_DIGEST = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")  # in hex; it becomes the name of a folder
_READ_BYTES = 1 << 20


class FilePlan(Protocol):
    """What is to be in a weights file; `WeightsPlan` and `TilePlan` are some."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""

    def write(self, source: ModelSource, file: BinaryIO) -> None:
        """Write it; `file` is seekable."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/rockpage`, or `~/.cache/rockpage`.

    A relative path in the variable is ignored (XDG Base Directory Specification 0.8).

    Raises:
        UsageError: neither the environment nor the password database names a home folder.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "rockpage"
    except RuntimeError as error:
        raise UsageError(f"user {os.getuid()} has no home folder for the cache: set XDG_CACHE_HOME or HOME") from error


def make_private(folder: Path) -> None:
    """Make a folder of the cache and its missing parents, mode 0700 (XDG Base Directory Specification 0.8).

    What exists keeps its mode: whoever made a cache for several users has set it.

    Raises:
        OSError: the system refuses.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def weights_room(cache_dir: Path) -> CacheRoom:
    """The weights in a cache, whose root `cache_dir` is."""
    return CacheRoom(cache_dir / "weights", WEIGHTS_FILE)


def model_digest(source: ModelSource, cache_dir: Path) -> str:
    """SHA-256 of a model's files in hex, remembered for as long as they are the same.

    Args:
        source: the open model. Of several files, the digests one behind the other are digested once more.
        cache_dir: where to remember; a folder that cannot be written only costs time.

    Raises:
        BadModelFile: a path no longer names the file that was opened.
    """
    digests = [_file_digest(file, cache_dir) for file in source.files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


@contextmanager
def weights_folder(source: ModelSource, plan: FilePlan, digest: str, form: str, cache_dir: Path) -> Iterator[Path]:
    """A folder that holds the finished weights file, which nobody removes as long as the context lasts.

    What was used longest ago is removed to make room for a new file. Where the cache cannot be written, the file goes
    to a temporary folder; mappings of it outlive the context.

    Args:
        source: the open model.
        plan: of the file.
        digest: SHA-256 of the model file, from `model_digest`.
        form: names what the plan makes of the model; it becomes part of a folder's name.
        cache_dir: the cache's root.

    Raises:
        UsageError: neither the cache nor the temporary folder can hold the file, or `ROCKPAGE_CACHE_SIZE` is no size.
    """
    limit = cache_limit()
    path = weights_room(cache_dir).folder / f"{digest[:32]}-{form}-{FORM_VERSION}" / WEIGHTS_FILE
    with contextlib.ExitStack() as stack:
        file = _open_whole(path, plan)
        if file is None:
            try:
                file = _build(path, source, plan, limit)
            except OSError as refusal:
                path, file = _build_elsewhere(stack, source, plan, refusal)
        with file:
            yield path.parent


def _build_elsewhere(
    stack: contextlib.ExitStack, source: ModelSource, plan: FilePlan, refusal: OSError
) -> tuple[Path, io.BufferedReader]:
    """Write the weights file to a folder that `stack` removes; its path and the open file."""
    try:
        # /tmp is often memory, which a board lacks; /var/tmp is not (Filesystem Hierarchy Standard 3.0, 5.15).
        place = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)  # noqa: S108
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rockpage-", dir=place))
        path = Path(folder) / "weights" / WEIGHTS_FILE
        return path, _build(path, source, plan, plan.nbytes)
    except OSError as error:
        raise UsageError(
            f"{plan.nbytes} bytes of repacked weights can be kept neither in the cache ({refusal}) nor in"
            f" a temporary folder ({error}); set XDG_CACHE_HOME to a folder with room",
            needed=plan.nbytes,
        ) from error


def _build(path: Path, source: ModelSource, plan: FilePlan, limit: int) -> io.BufferedReader:
    """Write a weights file, unless another process does so first, and open it."""
    entry, nbytes = path.parent, plan.nbytes + _DIGEST_BYTES
    room = CacheRoom(entry.parent, path.name)
    make_private(room.folder)
    with room.writing():
        file = _open_whole(path, plan)
        if file is not None:
            return file
        room.make_room(nbytes, limit, beside=entry)
        with room.new_file(entry) as unfinished, unfinished.open("w+b") as new:
            os.posix_fallocate(new.fileno(), 0, nbytes)  # a full disk shows before the work, not at its end
            plan.write(source, new)
            new.seek(0)
            new.write(_hash(new, plan.nbytes))
            new.flush()
            os.fsync(new.fileno())
        return open_in_use(path)


def _open_whole(path: Path, plan: FilePlan) -> io.BufferedReader | None:
    """The weights file of a plan, in use until it is closed; None if it is not there or damaged."""

    def is_whole(file: io.BufferedReader) -> bool:
        size = os.fstat(file.fileno()).st_size
        return size == plan.nbytes + _DIGEST_BYTES and _hash(file, plan.nbytes) == file.read()

    return open_sound(path, is_whole)


def _file_digest(model: MappedFile, cache_dir: Path) -> str:
    real = os.path.realpath(model.path)
    note = cache_dir / "digests" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"
    known = {"path": real, "identity": list(model.identity)}
    with contextlib.suppress(RockpageError):  # not readable: it is computed again, as if it had not been noted yet
        noted = read_object(note) or {}
        noted_digest = noted.get("sha256")
        if noted == {**noted, **known} and isinstance(noted_digest, str) and _DIGEST.fullmatch(noted_digest):
            return noted_digest
    with _open_again(model) as file:
        digest = _hash(file, model.size).hex()
    with contextlib.suppress(OSError):
        make_private(note.parent)
        replace_file(note, json.dumps({**known, "sha256": digest}).encode())
    return digest


def _open_again(model: MappedFile) -> io.BufferedReader:
    """The model file as a stream: read in pieces, it never counts as this process's memory as a mapping would."""
    try:
        file = model.path.open("rb")
    except OSError as error:
        raise BadModelFile(f"{model.path}: gone while it was read ({error.strerror})", path=str(model.path)) from error
    if file_identity(os.fstat(file.fileno())) != model.identity:
        file.close()
        raise BadModelFile(f"{model.path}: replaced while it was read; load it again", path=str(model.path))
    return file


def _hash(file: io.BufferedIOBase, nbytes: int) -> bytes:
    """SHA-256 of the next `nbytes` of a file, which is left behind them."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    while nbytes > 0 and (got := file.readinto(buffer[: min(nbytes, _READ_BYTES)])):
        digest.update(buffer[:got])
        nbytes -= got
    return digest.digest()

"""Keeps compiled graphs on disk, so that a graph is compiled once.

::

    $XDG_CACHE_HOME/rockpage/rknn/
        lock                            held while something is compiled or removed
        <key>-<chip>-<note version>/
            graph.rknn                  what the compiler made
            note.json                   its digest, and what the compiler said of it

The key is a digest of all that decides what the compiler makes: the graph, its sets of shapes, the samples it is
calibrated by, the chip, and the compiler's version. What is found is hashed before it is used; a damaged file is made
again. `cache_room.py` bounds its size.
"""

from __future__ import annotations

import hashlib
import io
import json
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from hostcache.errors import DeviceError
from hostcache.whole_file import replace_file

from .cache_room import CacheRoom, cache_limit, open_in_use, open_sound
from .json_data import from_json
from .rknn_log import LayerTable, complaints, layer_tables
from .rknn_toolkit import TARGET, CompileJob
from .weights_cache import default_cache_dir, make_private

__all__ = ["CompileCache", "Compiled", "Compiler", "file_sha256", "require_on_npu"]

_NOTE_VERSION = 1  # part of the key: raise it when logs are read otherwise
_GRAPH_FILE, _NOTE_FILE = "graph.rknn", "note.json"


class Compiler(Protocol):
    """What compiles: an `npu.rknn_toolkit.RknnToolkit`.

    Attributes:
        version: what it makes may differ from what other versions make.
    """

    version: str

    def compile(self, job: CompileJob, out: Path) -> str:
        """Compile a graph into a file, and return what was printed."""


@dataclass(frozen=True)
class _Note:
    """What is known of a compiled file."""

    sha256: str
    tables: tuple[LayerTable, ...]
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled graph.

    Attributes:
        path: the .rknn file, in the cache.
        sha256: of the file, in hex.
        onnx_sha256: of the graph it was made of.
        tables: what each set of shapes became.
        complaints: of the compiler, but for those known to mean nothing.
        found: it was in the cache.
    """

    path: Path
    sha256: str
    onnx_sha256: str
    tables: tuple[LayerTable, ...]
    complaints: tuple[str, ...]
    found: bool


class CompileCache:
    """Compiled graphs in one folder, which may be shared by processes; one of them compiles at a time.

    What was used longest ago is removed to make room for a new graph. What this object has found or made stays as long
    as it lives.

    Args:
        folder: made if missing, mode 0700.

    Attributes:
        room: the entries.
    """

    def __init__(self, folder: Path) -> None:
        self.room = CacheRoom(folder, _GRAPH_FILE)

    @classmethod
    def default(cls) -> CompileCache:
        """The user's.

        Raises:
            UsageError: the user has no home folder.
        """
        return cls(default_cache_dir() / "rknn")

    def compile(self, compiler: Compiler, job: CompileJob) -> Compiled:
        """Compile a graph, unless it is there.

        Raises:
            DeviceError: the compiler failed.
            UsageError: `ROCKPAGE_CACHE_SIZE` is no size.
            OSError: the folder cannot be written, or is full.
        """
        limit = cache_limit()
        path = self.room.folder / f"{_key(compiler.version, job)[:32]}-{TARGET}-{_NOTE_VERSION}" / _GRAPH_FILE
        opened, found = _open(path), True
        if opened is None:
            make_private(self.room.folder)
            with self.room.writing():
                opened = _open(path)  # another process may have been faster
                if opened is None:
                    opened, found = self._make(compiler, job, path, limit), False
        file, note = opened
        weakref.finalize(self, file.close)  # until then it is in use
        onnx_sha256 = hashlib.sha256(job.onnx).hexdigest()
        return Compiled(path, note.sha256, onnx_sha256, note.tables, note.complaints, found)

    def _make(self, compiler: Compiler, job: CompileJob, path: Path, limit: int) -> tuple[io.BufferedReader, _Note]:
        entry = path.parent
        with self.room.new_file(entry) as unfinished:
            log = compiler.compile(job, unfinished)
            note = _Note(file_sha256(unfinished), tuple(layer_tables(log)), tuple(complaints(log)))
            self.room.make_room(0, limit - unfinished.stat().st_size, beside=entry)  # on the disk it is already
            replace_file(entry / _NOTE_FILE, json.dumps(asdict(note)).encode())
        return open_in_use(path), note


def require_on_npu(job: CompileJob, compiled: Compiled) -> None:
    """Refuse a graph of which something would run on the CPU, as a table or a complaint says.

    Raises:
        DeviceError: an operator would, the compiler complained, or left out a set of shapes.
    """
    if compiled.complaints:
        said = "; ".join(compiled.complaints)
        raise DeviceError(f"{job.name}: the compiler complains: {said}", complaints=compiled.complaints)
    for table in compiled.tables:
        if table.on_cpu:
            operators = [layer.op for layer in table.on_cpu]
            raise DeviceError(
                f"{job.name} with {table.shapes} has {', '.join(operators)} on the CPU, not on the NPU",
                operators=operators,
                shapes=table.shapes,
            )
    if missing := set(job.shapes) - {table.shapes for table in compiled.tables}:
        raise DeviceError(f"{job.name}: the compiler left out the shapes {sorted(missing)}", missing=sorted(missing))


def file_sha256(path: Path) -> str:
    """Digest of a file, in hex.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _sha256(file)


def _sha256(file: io.BufferedReader) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _key(version: str, job: CompileJob) -> str:
    digest = hashlib.sha256(json.dumps([_NOTE_VERSION, version, TARGET, job.shapes, job.kept_fp16]).encode())
    digest.update(hashlib.sha256(job.onnx).digest())
    for sample in job.dataset:
        for array in sample:
            digest.update(json.dumps([array.dtype.str, array.shape]).encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _open(path: Path) -> tuple[io.BufferedReader, _Note] | None:
    """A graph that is there and sound, in use until the stream is closed, and what is known of it."""
    try:
        note = from_json(_Note, json.loads((path.parent / _NOTE_FILE).read_bytes()))
    except (OSError, ValueError):
        return None
    file = open_sound(path, lambda file: _sha256(file) == note.sha256)
    return None if file is None else (file, note)

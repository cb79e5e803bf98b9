"""Keeps compiled graphs on disk, so that a graph is compiled once.

::

    $XDG_CACHE_HOME/rockpage/rknn/
        <key>.rknn      what the compiler made
        <key>.json      its digest, and what the compiler said of it; written last
        <key>.lock      held while the two are written

The key is a digest of all that decides what the compiler makes: the graph, its sets of shapes, the samples it is
calibrated by, the chip, and the compiler's version. What is found is hashed before it is used; a damaged file is made
again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from hostcache.errors import DeviceError

from .json_data import from_json
from .rknn_log import LayerTable, complaints, layer_tables
from .rknn_toolkit import TARGET, CompileJob
from .weights_cache import make_private

__all__ = ["CompileCache", "Compiled", "Compiler", "file_sha256", "require_on_npu"]

_NOTE_VERSION = 1  # part of the key: raise it when logs are read otherwise


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
    """Compiled graphs in one folder, which may be shared by processes.

    Args:
        folder: made if missing, mode 0700.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def compile(self, compiler: Compiler, job: CompileJob) -> Compiled:
        """Compile a graph, unless it is there.

        Raises:
            DeviceError: the compiler failed.
            OSError: the folder cannot be written, or is full.
        """
        make_private(self._folder)
        key = _key(compiler.version, job)
        path = self._folder / f"{key}.rknn"
        with (self._folder / f"{key}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when we are done or dead
            note = _read_note(path)
            found = note is not None
            if note is None:
                note = self._make(compiler, job, path)
        onnx_sha256 = hashlib.sha256(job.onnx).hexdigest()
        return Compiled(path, note.sha256, onnx_sha256, note.tables, note.complaints, found)

    def _make(self, compiler: Compiler, job: CompileJob, path: Path) -> _Note:
        unfinished = path.with_suffix(".tmp")  # under the lock it is ours; a killed writer's is written over
        try:
            log = compiler.compile(job, unfinished)
            note = _Note(file_sha256(unfinished), tuple(layer_tables(log)), tuple(complaints(log)))
            unfinished.replace(path)
            unfinished.write_text(json.dumps(asdict(note)))
            unfinished.replace(path.with_suffix(".json"))
        except BaseException:  # a full disk that should not stay full; Ctrl-C
            unfinished.unlink(missing_ok=True)
            raise
        return note


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
    digest = hashlib.sha256()
    with path.open("rb") as file:
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


def _read_note(path: Path) -> _Note | None:
    """What is known of a file that is there and sound."""
    try:
        note = from_json(_Note, json.loads(path.with_suffix(".json").read_bytes()))
        return note if file_sha256(path) == note.sha256 else None
    except (OSError, ValueError):
        return None

"""What a folder of exported graphs holds: `manifest.json`, and the .rknn files it names.

A file's name ends in the first digits of its digest, so that new files never take the place of those an older manifest
names; the manifest is replaced at once. Reading needs neither the vendor's packages nor onnx.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from hostcache.errors import BadModelFile, UsageError
from hostcache.whole_file import replace_file

from .folder_files import read_object
from .json_data import from_json
from .rknn_cache import Compiled, file_sha256

__all__ = [
    "DOMAIN_BYTES",
    "MANIFEST_FILE",
    "GraphFile",
    "Manifest",
    "claim_folder",
    "graphs_digest",
    "read_manifest",
    "write_manifest",
]

MANIFEST_FILE = "manifest.json"
"""In the folder of an export."""

DOMAIN_BYTES = 4 << 30
"""What one IOMMU domain of the NPU can address (32-bit IOVA); the vendor's Python runtime uses one domain."""

_FORMAT = 1  # raise it when a field changes its meaning
_DIGITS = 12


@dataclass(frozen=True)
class GraphFile:
    """One .rknn file.

    Attributes:
        file: its name in the folder.
        nbytes: its size.
        sha256: its digest, in hex.
        onnx_sha256: digest of the graph it was compiled from.
    """

    file: str
    nbytes: int
    sha256: str
    onnx_sha256: str

    @classmethod
    def of(cls, name: str, compiled: Compiled) -> GraphFile:
        """The entry for a compiled graph; its file's name begins with `name`."""
        file = f"{name}-{compiled.sha256[:_DIGITS]}.rknn"
        return cls(file, compiled.path.stat().st_size, compiled.sha256, compiled.onnx_sha256)


class Manifest(Protocol):
    """A dataclass that `from_json` can read.

    Attributes:
        holds: what kind of graphs, in one word.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    holds: ClassVar[str]

    @property
    def npu_bytes(self) -> int:
        """NPU memory of one core that holds all graphs: files, and what their largest shapes need in between."""

    def graph_files(self) -> Iterable[GraphFile]:
        """Every .rknn file."""

    def check(self) -> None:
        """Hold the fields against each other.

        Raises:
            ValueError: they contradict each other, or what this version of rockpage makes of them.
        """


_Manifest = TypeVar("_Manifest", bound=Manifest)


def read_manifest(kind: type[_Manifest], folder: Path) -> _Manifest:
    """Read a folder's manifest and prove that its files are those that were exported.

    Raises:
        UsageError: the folder has no manifest, or one of graphs of another kind.
        BadModelFile: the manifest is damaged or of another version, or a file is missing or has other bytes.
    """
    path = folder / MANIFEST_FILE
    value = read_object(path)
    if value is None:
        raise UsageError(f"{path} is not there: rockpage export {kind.holds} writes it", path=str(path))
    version, holds = value.pop("format", None), value.pop("holds", None)
    value.pop("npu", None)  # follows from the rest
    if version != _FORMAT:
        raise _bad(path, f"it has format {version!r:.20}, this version of rockpage reads {_FORMAT}")
    if holds != kind.holds:
        raise UsageError(f"{path} is of {holds!r:.20} graphs, not {kind.holds}: give another folder", holds=holds)
    try:
        manifest = from_json(kind, value)
        manifest.check()
    except ValueError as error:
        raise _bad(path, str(error)) from error
    for entry in manifest.graph_files():
        _check_file(folder, entry)
    return manifest


def graphs_digest(manifest: Manifest) -> str:
    """Of all graphs, in short: for the numerics of what runs them."""
    digests = "".join(file.sha256 for file in manifest.graph_files())
    return hashlib.sha256(digests.encode()).hexdigest()[:_DIGITS]


def claim_folder(folder: Path, holds: str) -> None:
    """Make a folder for an export, before the work is done.

    Raises:
        UsageError: it holds an export of another kind.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    present = read_object(folder / MANIFEST_FILE)
    if present is not None and present.get("holds") != holds:
        raise UsageError(
            f"{folder} holds {present.get('holds')!r:.20} graphs already: give another folder", holds=holds
        )


def write_manifest(folder: Path, manifest: Manifest, sources: Mapping[str, Path]) -> None:
    """Put compiled files and their manifest into a claimed folder, in place of an older export of the same kind.

    Args:
        folder: see `claim_folder`.
        manifest: names the files.
        sources: where each file lies now, by its name in the manifest.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    for name, source in sources.items():
        _place(source, folder / name)
    memory = {"bytes": manifest.npu_bytes, "domain_bytes": DOMAIN_BYTES}
    content = {"format": _FORMAT, "holds": manifest.holds, "npu": memory, **asdict(manifest)}
    replace_file(folder / MANIFEST_FILE, json.dumps(content, indent=1).encode(), mode=0o666)
    for stray in folder.glob("*.rknn"):  # of an older manifest
        if stray.name not in sources:
            stray.unlink()


def _check_file(folder: Path, entry: GraphFile) -> None:
    path = folder / entry.file
    if entry.file != Path(entry.file).name or "\0" in entry.file:
        raise _bad(folder / MANIFEST_FILE, f"{entry.file!r:.100} is not the name of a file")
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe or a device would be read for ever
            raise _bad(path, "it is no regular file")
        digest = file_sha256(path)
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror})") from error
    if digest != entry.sha256:
        raise _bad(path, f"its SHA-256 is {digest}, the manifest says {entry.sha256}")
    if found.st_size != entry.nbytes:  # which memory is planned by
        raise _bad(path, f"it has {found.st_size} bytes, the manifest says {entry.nbytes}")


def _bad(path: Path, reason: str) -> BadModelFile:
    return BadModelFile(f"{path}: {reason}; export it again", path=str(path), reason=reason)


def _place(source: Path, path: Path) -> None:
    """Make a file appear whole, without a second copy of its bytes where the file system can."""
    if path.exists() and path.samefile(source):
        return
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, unfinished)
    unfinished.replace(path)

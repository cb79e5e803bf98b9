"""What jobs that emulate another machine ask of this one: packages, and commands that end well."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["JobError", "require_packages", "run"]

COMMAND_SECONDS = 1800  # two minutes are usual for the longest, a kernel


class JobError(Exception):
    """A job's tests could not be run; whether they would pass is not known."""


def require_packages(packages: Mapping[str, str]) -> None:
    """Install what is missing, as root; as anyone else, say what to install.

    Args:
        packages: what must be there, and the Debian package that brings it.

    Raises:
        JobError: something is missing and cannot be installed, or this is not an x86-64 machine.
    """
    if platform.machine() != "x86_64":
        raise JobError(f"what emulates comes from packages for x86-64: {platform.machine()} cannot run this")
    missing = [package for path, package in packages.items() if not Path(path).exists()]
    if not missing:
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise JobError(f"install what is missing: sudo apt-get install --no-install-recommends {' '.join(missing)}")
    run(["apt-get", "-qq", "update"])
    run(["apt-get", "-qq", "install", "--no-install-recommends", *missing])


def run(command: Sequence[str], directory: Path | None = None) -> str:
    """Run a command without what `make` hands to its children, and return its output.

    Raises:
        JobError: it fails, or takes half an hour; the message has the end of its output.
    """
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    environment |= {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,  # nobody is there to answer
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise JobError(f"{' '.join(command)} ended with status {done.returncode}:\n{end}")
    return done.stdout

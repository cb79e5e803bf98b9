"""Make a virtual environment that has pip and can compile C, on a Python that may come with neither.

Debian and Ubuntu split Python into packages, and `apt install python3` brings no ensurepip, no pip and no Python.h.
What is missing is fetched into the environment: no root needed, nothing installed on the machine. Only a compiler and
the C library's headers are asked of it. `make` calls this as `python3 bootstrap.py .venv`.
"""
# ruff: noqa: S603, T201 - a script: it runs the machine's own commands, and says what it does

from __future__ import annotations

import hashlib
import html
import importlib.util
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin, urlsplit

__all__ = ["add_pip", "add_python_headers", "main"]

PYTHON = "python{}.{}".format(*sys.version_info)
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc")

# The wheel of pip 25.3, by the digest that PyPI's index gives for it. It need not be the newest, only install that.
PIP_SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"


def main(environment: Path) -> str | None:
    """Make the environment; returns one line for stderr if that cannot be done."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what an older Python is asked to run
        return f"rockpage needs Python >= 3.10, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3"
    if not shutil.which(COMPILER[0]):
        return f"rockpage needs a C compiler ({COMPILER[0]}): on Debian and Ubuntu, apt install gcc libc6-dev"
    if not compiles("stdlib.h"):
        return "rockpage needs the C library's headers (stdlib.h): on Debian and Ubuntu, apt install libc6-dev"
    try:
        if importlib.util.find_spec("ensurepip"):
            run(sys.executable, "-m", "venv", environment)
        else:
            print(f"{PYTHON} has no ensurepip: fetching pip into {environment}", flush=True)
            run(sys.executable, "-m", "venv", "--without-pip", environment)
            add_pip(environment)
        if not compiles("Python.h", sysconfig.get_path("include"), environment / "include"):
            print(f"{PYTHON} has no Python.h: unpacking lib{PYTHON}-dev into {environment}/include", flush=True)
            add_python_headers(environment)
    except OSError as error:
        return f"{PYTHON} lacks pip or headers ({error}): on Debian and Ubuntu, apt install {PYTHON}-venv {PYTHON}-dev"
    return None


def add_pip(environment: Path) -> None:
    """Fetch one known wheel of pip from the package index (PIP_INDEX_URL, else PyPI) and let it install itself.

    Raises:
        OSError: The index cannot be reached or lacks that wheel, or what it gave is another file.
    """
    # The digest says that it is the right file: a fresh machine may have no certificates yet. pip brings its own.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE

    def read(url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=60, context=unverified) as answer:  # noqa: S310 - the user's own index
            return bytes(answer.read())

    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    link = re.search(rf'href="([^"#]+)#sha256={PIP_SHA256}"', read(index).decode())
    if not link:
        raise OSError(f"{index} lists no pip with sha256 {PIP_SHA256}")
    url = urljoin(index, html.unescape(link[1]))
    content = read(url)
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        raise OSError(f"{url} does not have sha256 {PIP_SHA256}")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch, Path(urlsplit(url).path).name)
        wheel.write_bytes(content)
        # A wheel is a zip archive, and Python runs a package that lies in one.
        run(environment / "bin/python", wheel / "pip", "install", "--no-index", wheel)


def add_python_headers(environment: Path) -> None:
    """Unpack the headers of Debian's libpythonX.Y-dev into `include/`, where setuptools looks by itself.

    Raises:
        OSError: There is no apt here, it cannot reach its archive, or it has no such package.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # The machine's own package lists may be absent or out of date, and only root may renew them: bring some here.
        apt = ["apt-get", "-o", f"Dir::State={scratch}", "-o", f"Dir::Cache={scratch}", "-o", "APT::Sandbox::User=root"]
        run(*apt, "update")
        run(*apt, "download", f"lib{PYTHON}-dev", cwd=scratch)
        (package,) = Path(scratch).glob("*.deb")
        run("dpkg-deb", "--extract", package, scratch)
        headers, include = Path(scratch, "usr/include"), environment / "include"
        shutil.copytree(headers / PYTHON, include, dirs_exist_ok=True)
        multiarch = str(sysconfig.get_config_var("MULTIARCH"))  # such as aarch64-linux-gnu; pyconfig.h lies below it
        shutil.copytree(headers / multiarch, include / multiarch, dirs_exist_ok=True)


def compiles(header: str, *folders: str | Path) -> bool:
    """Whether the C compiler finds `header`, and all that it includes, in `folders` or in its own places."""
    command = [*COMPILER, "-E", "-", *(f"-I{folder}" for folder in folders)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=f"#include <{header}>\n")
    return done.returncode == 0


def run(*command: str | Path, cwd: str | None = None) -> None:
    """Run a command silently; what it says last is the error if it fails."""
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{Path(command[0]).name}: {said[-1]}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

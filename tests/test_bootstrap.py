"""What `make` does on a machine whose Python came without pip and without headers."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import bootstrap

WHEEL = "pip-25.3-py3-none-any.whl"
NOTE_ARGUMENTS = "import pathlib, sys; pathlib.Path(sys.prefix, 'installed').write_text('|'.join(sys.argv[1:]))"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name the base class gives it
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder behind a package index on this machine, which PIP_INDEX_URL names; it holds a stand-in for pip."""
    folder = tmp_path / "index"
    (folder / "pip").mkdir(parents=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr("pip/__main__.py", NOTE_ARGUMENTS)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        poll_s = 0.02  # how soon it sees that it shall shut down
        thread = threading.Thread(target=server.serve_forever, args=(poll_s,))
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield folder
        server.shutdown()
        thread.join()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """As `python -m venv --without-pip` leaves it, as far as it matters."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "bin/python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    return folder


def list_pip(index: Path, sha256: str) -> None:
    page = f'<a href="../other.whl#sha256={"0" * 64}">other</a> <a href="../{WHEEL}#sha256={sha256}">{WHEEL}</a>'
    (index / "pip/index.html").write_text(page)


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Shell scripts that stand in for the machine's package tools (`_` in a name is a hyphen)."""
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_pip_is_fetched_by_its_digest_and_installs_itself(
    index: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(bootstrap, "PIP_SHA256", digest)
    list_pip(index, digest)
    bootstrap.add_pip(environment)
    command, option, wheel = (environment / "installed").read_text().split("|")
    assert (command, option, Path(wheel).name) == ("install", "--no-index", WHEEL)


def test_another_file_under_the_right_digest_is_never_run(index: Path, environment: Path) -> None:
    list_pip(index, bootstrap.PIP_SHA256)  # the index claims it; the bytes are the stand-in's
    with pytest.raises(OSError, match=rf"/{WHEEL} does not have sha256 {bootstrap.PIP_SHA256}"):
        bootstrap.add_pip(environment)
    assert not (environment / "installed").exists()


def test_an_index_without_the_wheel_is_named(index: Path, environment: Path) -> None:
    list_pip(index, "f" * 64)
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:\d+/pip/ lists no pip"):
        bootstrap.add_pip(environment)


def test_headers_land_where_setuptools_looks(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in libpythonX.Y-dev: pyconfig.h includes <MULTIARCH/pythonX.Y/pyconfig.h>.
    python, multiarch = bootstrap.PYTHON, "riscv64-linux-gnu"
    monkeypatch.setattr(sysconfig, "get_config_var", {"MULTIARCH": multiarch}.get)
    commands(
        tmp_path / "bin",
        monkeypatch,
        apt_get=f"""
            case "$*" in
                *" update") ;;
                *" download lib{python}-dev") touch lib{python}-dev_1_any.deb ;;
                *) exit 9 ;;
            esac
        """,
        dpkg_deb=f"""
            [ "$1" = --extract ] && [ -f "$2" ] || exit 9
            mkdir -p "$3/usr/include/{python}/cpython" "$3/usr/include/{multiarch}/{python}"
            echo '#include <{multiarch}/{python}/pyconfig.h>' > "$3/usr/include/{python}/Python.h"
            echo '#include <cpython/object.h>' > "$3/usr/include/{multiarch}/{python}/pyconfig.h"
            touch "$3/usr/include/{python}/cpython/object.h"
        """,
    )
    assert not bootstrap.compiles("Python.h", environment / "include")
    bootstrap.add_python_headers(environment)
    assert bootstrap.compiles("Python.h", environment / "include")


def test_what_apt_says_is_passed_on(tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(
        tmp_path / "bin", monkeypatch, apt_get="echo 'W: slow' >&2; echo 'E: Unable to locate package' >&2; exit 100"
    )
    with pytest.raises(OSError, match=r"^apt-get: E: Unable to locate package$"):
        bootstrap.add_python_headers(environment)


def test_a_machine_without_apt_is_an_error_of_the_same_kind(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(environment))
    with pytest.raises(OSError, match="apt-get"):
        bootstrap.add_python_headers(environment)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("COMPILER", ["no-such-compiler"], "a C compiler (no-such-compiler): on Debian and Ubuntu, apt install gcc"),
        ("COMPILER", ["cc", "-nostdinc"], "the C library's headers (stdlib.h): on Debian and Ubuntu, apt install libc"),
        ("sys.version_info", (3, 9, 2), "Python >= 3.10, this is"),
    ],
)
def test_what_only_the_user_can_install_is_named_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, line: str
) -> None:
    monkeypatch.setattr(f"bootstrap.{name}", value)
    answer = bootstrap.main(tmp_path / "environment")
    assert answer is not None
    assert answer.startswith(f"rockpage needs {line}")
    assert not (tmp_path / "environment").exists()


def test_a_failed_fetch_names_the_packages_that_would_help(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_pip(index, "f" * 64)
    monkeypatch.setattr("importlib.util.find_spec", {}.get)  # as where ensurepip is a package of its own
    answer = bootstrap.main(tmp_path / "environment")
    assert answer is not None
    assert "lists no pip" in answer
    assert answer.endswith(f"apt install {bootstrap.PYTHON}-venv {bootstrap.PYTHON}-dev")

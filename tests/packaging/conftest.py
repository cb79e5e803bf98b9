"""The sdist and the wheel, built once for all tests, and clean environments to install them in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.packaging import pythons
from tests.packaging.commands import ROOT, run

POISON = "raise RuntimeError('a folder of the user was imported in place of the installed package')\n"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    tree = tmp_path_factory.mktemp("tree")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # not deleted since the last commit
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", output, tree, cwd=tree)
    return output


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def sdist(built: Path) -> Path:
    (path,) = built.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything runs: folders of the user's own bear our packages' names."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("tools", "npu", "hostcache", "staging"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(POISON)
    return folder


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Finds the interpreter of a version, once. Where there is none, a test fails in CI and is skipped elsewhere."""
    found: dict[str, Path] = {}

    def find(version: str) -> Path:
        if version not in found:
            try:
                found[version] = pythons.find(version, tmp_path_factory.mktemp(f"python{version}-"))
            except LookupError as error:
                give_up = pytest.fail if os.environ.get("CI") else pytest.skip
                give_up(str(error))
        return found[version]

    return find


@pytest.fixture(scope="session")
def environments(
    python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Path]]:
    """Makes a clean environment of a Python version with one requirement in it; the answer is its `bin`."""
    made = []

    def make(version: str, requirement: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        made.append(folder)
        # Debian's Python comes without pip, so all have their packages from this one's. What is imported is compiled
        # then; compiling everything takes longer than all that is run here.
        run(python(version), "-m", "venv", "--without-pip", folder, cwd=folder)
        install = ("--python", folder / "bin/python", "install", "--no-compile", "--quiet", "--only-binary=:all:")
        run(sys.executable, "-m", "pip", *install, requirement, cwd=folder)
        return folder / "bin"

    yield make
    for folder in made:  # 300 MB each
        shutil.rmtree(folder)

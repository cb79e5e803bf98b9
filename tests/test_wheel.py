"""The built wheel: what is in it, and that it works where there is nothing else of ours."""

from __future__ import annotations

import configparser
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[1]
MODULES = {"hostcache/_kv.abi3.so", "staging/_gather.abi3.so", "npu/_attention.abi3.so"}

POISON = "raise RuntimeError('a folder of the user was imported in place of the installed package')\n"

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
packages = ("hostcache", "staging", "npu", "rockpage_tools")
for package in packages:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("_build"):  # compile-time only
            importlib.import_module(module.name)
for name, module in sys.modules.items():
    if name.split(".")[0] in packages and hasattr(module, "__file__"):  # cffi registers its `lib` objects too
        print(module.__file__)
"""

USE_C = """
import numpy as np
from hostcache import _kv
from npu import _attention
from staging import _gather
source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
rows = np.array([[4, 8, 3]], np.int64)  # three bytes from 4 to 8
view = _gather.ffi.from_buffer
_gather.lib.rp_gather(view("uint8_t[]", source), 1, view("uint8_t[]", target), view("int64_t[]", rows), 1)
print(target.tolist())
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def interpreters() -> list[str]:
    """This Python, and every other supported one that this machine happens to have."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        path = shutil.which(f"python{version}")
        # A version manager's shim may be there without the Python behind it.
        if path and subprocess.run([path, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0:
            found.setdefault(version, path)
    return list(found.values())


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command runs: folders of the user's own bear our packages' names."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("tools", "npu", "hostcache", "staging"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(POISON)
    return folder


def test_one_wheel_serves_every_python_of_an_architecture(wheel: Path) -> None:
    assert wheel.name == f"rockpage-0.1.0-cp310-abi3-linux_{platform.machine()}.whl"


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read("rockpage-0.1.0.dist-info/entry_points.txt").decode())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hostcache", "staging", "npu", "rockpage_tools", "rockpage-0.1.0.dist-info"}
    assert {name for name in names if name.endswith(".so")} == MODULES
    assert {f"{package}/py.typed" for package in ("hostcache", "staging", "npu", "rockpage_tools")} <= names
    assert "rockpage-0.1.0.dist-info/licenses/LICENSE" in names
    assert not any(name.endswith((".c", ".h", ".o")) or "test" in name for name in names)
    assert dict(scripts["console_scripts"]) == {"rockpage": "rockpage_tools.main:main"}


def test_the_sdist_holds_what_a_build_needs(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/_*.[ch]")}
    assert len(sources) >= len(MODULES)
    assert sources | {"LICENSE", "Makefile", "setup.py", "tools/main.py", "tests/test_wheel.py"} <= names
    assert not any(name.endswith((".so", ".o", ".pyc")) for name in names)


@pytest.mark.parametrize("python", interpreters())
def test_the_library_works_with_numpy_and_cffi_alone(
    wheel: Path, user_folder: Path, tmp_path: Path, python: str
) -> None:
    run(python, "-m", "venv", tmp_path / "v", cwd=tmp_path)
    installed = tmp_path / "v" / "bin" / "python"
    run(installed, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    expected = [0] * 8 + [5, 6, 7] + [0] * 5  # the source is shifted by one
    assert run(installed, "-I", "-c", USE_C, cwd=user_folder).strip() == str(expected)
    arguments = ["--geometry", "layers=24,kv_heads=2,head_dim=128", "--weights", "1.1GB", "--ram", "4GiB", "--json"]
    answer = json.loads(run(tmp_path / "v" / "bin" / "rockpage", "plan", *arguments, cwd=user_folder))
    assert answer["block_bytes"] == 384 * 1024


def test_the_command_works_beside_folders_of_the_same_names(wheel: Path, user_folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "v", with_pip=True)
    installed = tmp_path / "v" / "bin"
    run(installed / "python", "-m", "pip", "install", "--quiet", f"{wheel}[model]", cwd=tmp_path)
    assert run(installed / "rockpage", "--version", cwd=user_folder) == "rockpage 0.1.0\n"
    assert "plan" in run(installed / "rockpage", "--help", cwd=user_folder)
    files = run(installed / "python", "-I", "-c", IMPORT_EVERYTHING, cwd=user_folder).split()
    assert len(files) > len(MODULES)
    assert all(Path(file).is_relative_to(tmp_path / "v") for file in files)

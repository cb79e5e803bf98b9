"""What is in the built wheel and sdist, and that the wheel's tag promises what is true."""

from __future__ import annotations

import configparser
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.commands import BIN, ROOT, run

pytestmark = pytest.mark.wheel

MODULES = {
    "hostcache/_batch.abi3.so",
    "hostcache/_kv.abi3.so",
    "staging/_gather.abi3.so",
    "staging/_limits.abi3.so",
    "npu/_attention.abi3.so",
    "npu/_dense.abi3.so",
}


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel; some have entries for folders too."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}


def test_one_wheel_serves_every_python_of_an_architecture(wheel: Path) -> None:
    assert wheel.name == f"rockpage-0.1.0-cp310-abi3-linux_{platform.machine()}.whl"


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    files = contents(wheel)
    names = files.keys()
    scripts = configparser.ConfigParser()
    scripts.read_string(files["rockpage-0.1.0.dist-info/entry_points.txt"].decode())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hostcache", "staging", "npu", "rockpage_tools", "rockpage-0.1.0.dist-info"}
    assert {name for name in names if name.endswith(".so")} == MODULES
    assert {f"{package}/py.typed" for package in ("hostcache", "staging", "npu", "rockpage_tools")} <= names
    assert "rockpage-0.1.0.dist-info/licenses/LICENSE" in names
    assert not any(name.endswith((".c", ".h", ".o")) or "/test" in name for name in names)
    assert dict(scripts["console_scripts"]) == {"rockpage": "rockpage_tools.main:main"}


def test_the_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/_*.[ch]")}
    assert len(sources) >= len(MODULES)
    assert sources | {"LICENSE", "Makefile", "setup.py", "tools/main.py", "tests/packaging/test_wheel.py"} <= names
    assert not any(name.endswith((".so", ".o", ".pyc")) for name in names)


def test_the_c_modules_keep_to_the_stable_abi_of_python_3_10(wheel: Path, tmp_path: Path) -> None:
    report = json.loads(run(BIN / "abi3audit", "--strict", "--report", wheel, cwd=tmp_path))
    audited = {entry["name"]: entry["result"] for entry in report["specs"][str(wheel)]["wheel"]}
    assert audited.keys() == {Path(module).name for module in MODULES}
    for result in audited.values():
        assert (result["is_abi3"], result["baseline"], result["non_abi3_symbols"]) == (True, "3.10", [])
        assert result["is_abi3_baseline_compatible"]


def test_only_starting_threads_needs_a_recent_c_library(wheel: Path, tmp_path: Path) -> None:
    """The linker takes each function's newest version; glibc 2.34 gave those of threads a new one, moving them."""
    with zipfile.ZipFile(wheel) as archive:
        for module in MODULES:
            archive.extract(module, tmp_path)
    symbols = run("objdump", "-T", *MODULES, cwd=tmp_path)
    versions = {name: int(minor) for minor, name in re.findall(r"\(GLIBC_2\.(\d+)[.\d]*\)\s+(\w+)", symbols)}
    assert {"memcpy", "pthread_mutex_lock", "pthread_create"} <= versions.keys()
    assert {name for name, minor in versions.items() if minor > 17} <= {"pthread_create", "pthread_join"}
    assert max(versions.values()) <= 34


def test_auditwheel_only_renames_it(wheel: Path, tmp_path: Path) -> None:
    """Nothing to bundle, no path to change: what can be published is what was tested."""
    run(BIN / "auditwheel", "repair", "--wheel-dir", tmp_path, wheel, cwd=tmp_path, PATH=f"{BIN}:{os.environ['PATH']}")
    (repaired,) = tmp_path.glob("*.whl")
    tag = re.search(rf"-cp310-abi3-.*manylinux_2_(\d+)_{platform.machine()}\b", repaired.name)
    assert tag
    assert int(tag[1]) <= 34
    before, after = contents(wheel), contents(repaired)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"rockpage-0.1.0.dist-info/WHEEL", "rockpage-0.1.0.dist-info/RECORD"}


@pytest.mark.parametrize(
    ("version", "abi", "fits"),
    [("3.10", "cp310", True), ("3.15", "cp315", True), ("3.14", "cp314t", False), ("3.9", "cp39", False)],
)
def test_pip_takes_it_for_the_pythons_that_can_load_it(
    wheel: Path, tmp_path: Path, version: str, abi: str, fits: bool
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "--only-binary=:all:"]
    target = ["--python-version", version, "--abi", abi, "--platform", f"linux_{platform.machine()}"]
    done = subprocess.run(
        [*pip, "--target", tmp_path, *target, wheel], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode == 0) is fits, done.stderr
    assert f"{wheel.name} is not a supported wheel on this platform" in done.stderr or fits

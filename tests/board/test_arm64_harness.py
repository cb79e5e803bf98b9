"""What `make test-arm64` copies, runs and makes of a process that hangs; nothing is emulated."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.board import arm64, arm64_root
from tests.board.arm64 import CHECKOUT, TESTS, copy_checkout, run_tests
from tests.board.arm64_root import Arm64Root, mirror
from tests.board.host import JobError


def test_every_file_of_arm64_tests_is_run_and_no_other_of_this_folder() -> None:
    marked = [path for path in Path(__file__).parent.glob("test_*.py") if "pytest.mark.arm64" in path.read_text()]
    ours = {str(path.relative_to(CHECKOUT)) for path in marked} - {str(Path(__file__).relative_to(CHECKOUT))}
    assert ours == {name for name in TESTS if name.startswith("tests/board/")}
    assert all((CHECKOUT / name).is_file() for name in TESTS)


def test_the_copy_has_what_tests_import_and_nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    for name in ("npu/cpu.py", "npu/_attention.c", "npu/_attention.abi3.so", "npu/__pycache__/cpu.pyc", "setup.py"):
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(arm64, "CHECKOUT", checkout)
    monkeypatch.setattr(arm64, "COPIED", ("npu", "setup.py"))
    tree = copy_checkout(tmp_path / "tree")
    copied = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert copied == {"npu/cpu.py", "npu/_attention.c", "setup.py"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have been started."""
    asked: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.update(options, command=command)
        if asked.get("hangs"):
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_one_emulated_process_runs_all_tests_and_its_status_counts(tmp_path: Path, started: dict[str, Any]) -> None:
    (tree := tmp_path / "tree").mkdir()
    assert run_tests(tree, Arm64Root(tmp_path), ["tests/a.py", "tests/b.py"]) == 1
    root = str(tmp_path / "root")
    assert started["command"][:4] == ["qemu-aarch64-static", "-L", root, f"{root}/usr/bin/python3.11"]
    assert started["command"][-2:] == ["tests/a.py", "tests/b.py"]
    environment = started["env"]
    assert environment["PYTHONPATH"] == str(tmp_path / "site")
    assert Path(environment["HOME"]).is_dir()  # its own: the lock and the caches of this machine are not touched
    assert environment["HOME"] == environment["TMPDIR"] == str(tmp_path / "scratch")


def test_a_process_that_hangs_is_an_error(tmp_path: Path, started: dict[str, Any]) -> None:
    started["hangs"] = True
    with pytest.raises(JobError, match="ended after 1200 seconds"):
        run_tests(tmp_path, Arm64Root(tmp_path), TESTS)


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (
            "http://ports.example/ubuntu http://mirror.example/debian/ http://deb.example/debian",
            "http://mirror.example/debian/",
        ),
        ("https://packages.example/apt", "http://deb.debian.org/debian"),
        ("", "http://deb.debian.org/debian"),
    ],
)
def test_debian_comes_from_this_machines_mirror(monkeypatch: pytest.MonkeyPatch, sites: str, expected: str) -> None:
    monkeypatch.setattr(arm64_root, "run", lambda _command: sites.replace(" ", "\n"))
    assert mirror() == expected

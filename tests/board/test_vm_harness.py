"""What `make test-vm` makes of a machine's console; no machine is started."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.board import vm_kernel
from tests.board.host import JobError
from tests.board.vm import console, outcome, qemu, write_init
from tests.board.vm_guest import ENDED, UP
from tests.board.vm_kernel import dropped_lines

FIRMWARE = "\x1b[2J\x1b[1;1Hqboot\r"


def machine(script: str) -> list[str]:
    """Stands in for QEMU: prints on a console."""
    return [sys.executable, "-c", script]


def test_what_is_between_the_first_and_the_last_word_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (FIRMWARE, UP, "collecting ... \rcollected 2 items\r", "\x1b[32m2 passed\x1b[0m", f"{ENDED}0", "Restarting")
    script = f"for line in {lines!r}: print(line, end='\\n')"
    assert outcome(console(machine(script), 30)) == 0
    assert capsys.readouterr().out == "collected 2 items\n2 passed\nRestarting\n"


def test_the_status_is_pytests_own() -> None:
    assert outcome([UP, f"[    3.1] {ENDED}1"]) == 1


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["Kernel panic - not syncing: no init"], "did not come up; it said:\nKernel panic - not syncing: no init"),
        ([UP, "1 passed"], "ended before pytest did"),
        (
            [UP, "BUG: Bad page map in process python", f"{ENDED}0"],
            "status 0, but the kernel complained: BUG: Bad page",
        ),
        ([], "did not come up"),
    ],
)
def test_a_machine_that_does_not_say_how_it_went_is_an_error(lines: list[str], error: str) -> None:
    with pytest.raises(JobError, match=error):
        outcome(lines)


def test_a_machine_that_hangs_is_ended() -> None:
    script = f"import time; print({UP!r}, flush=True); print('test_one', flush=True); time.sleep(600)"
    with pytest.raises(JobError, match=r"ended after 0\.5 seconds"):
        outcome(console(machine(script), 0.5))


def test_a_machine_that_cannot_be_started_is_an_error() -> None:
    with pytest.raises(JobError, match=r"no-such-qemu cannot be started: .*No such file"):
        list(console(["no-such-qemu"], 30))


def test_the_machines_first_program_is_this_python(tmp_path: Path) -> None:
    init = write_init(tmp_path, ["-m", "vm"])
    assert shlex.quote(sys.executable) in init.read_text()
    script = init.read_text().replace(
        "-B -m tests.board.vm_guest", "-c 'import sys, tests.board.vm_guest; print(sys.argv)'"
    )
    init.write_text(script)
    done = subprocess.run([init], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['-c', '-m', 'vm']\n"
    assert f"init={init}" in " ".join(qemu(Path("vmlinux"), init))


def test_lines_that_a_configuration_drops_are_found() -> None:
    fragment = "# The root file system: CONFIG\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=y\n# CONFIG_D is not set\n"
    assert dropped_lines(fragment, "CONFIG_A=y\n# CONFIG_B is not set\n# CONFIG_C is not set\nCONFIG_D=y\n") == [
        "# CONFIG_D is not set",
        "CONFIG_C=y",
    ]


def test_a_kernel_is_built_once_for_a_source_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(work: Path, version: str) -> Path:
        assert list(work.iterdir()) == []
        (work / "vmlinux").write_text(version)
        built.append(version)
        if version == "broken":
            raise JobError("no")
        return work / "vmlinux"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vm_kernel, "build", build)
    for version in ("6.1.1", "6.1.1", "6.1.2", "6.1.1"):
        monkeypatch.setattr(vm_kernel, "source_version", lambda version=version: version)
        assert vm_kernel.kernel_image().read_text() == version
    assert built == ["6.1.1", "6.1.2"]
    monkeypatch.setattr(vm_kernel, "source_version", lambda: "broken")
    for _ in range(2):
        with pytest.raises(JobError):
            vm_kernel.kernel_image()
    assert len(list(tmp_path.rglob("vmlinux"))) == 2
    assert not list(tmp_path.rglob("build"))

    (leftover,) = (path.parent for path in tmp_path.rglob("vmlinux") if path.read_text() == "6.1.2")
    (leftover / "vmlinux").unlink()
    (leftover / "build" / "of a build that was killed").mkdir(parents=True)
    monkeypatch.setattr(vm_kernel, "source_version", lambda: "6.1.2")
    assert vm_kernel.kernel_image().read_text() == "6.1.2"

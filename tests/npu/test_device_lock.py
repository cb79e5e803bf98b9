from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostcache.errors import DeviceError, UsageError
from npu.device_lock import DeviceLock, lock_folders

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from npu.device_lock import DeviceLock
sys.argv = ["/usr/bin/rockpage", "run", "--prompt", "a secret"]
lock = DeviceLock("fdab0000.npu", [Path(sys.stdin.readline().strip())])
print("held", flush=True)
"""
FORK = """
import os
child = os.fork()
if child == 0:
    print(os.getpid(), lock.held, flush=True)
"""
WAIT = "sys.stdin.read()\n"


@contextmanager
def holder(folder: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its stdin is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD + then + WAIT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def take(folder: Path) -> DeviceLock:
    return DeviceLock("fdab0000.npu", [folder])


def test_a_second_process_is_told_who_holds_the_device(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        with pytest.raises(DeviceError) as caught:
            take(tmp_path)
        message = f"the device fdab0000.npu is in use by process {other.pid} (rockpage): end it, or use the cpu runtime"
        assert str(caught.value) == message
        path = tmp_path / "rockpage-fdab0000.npu.lock"
        assert caught.value.values == {
            "device": "fdab0000.npu",
            "pid": other.pid,
            "program": "rockpage",
            "path": str(path),
        }
        assert path.read_text() == f"{other.pid} rockpage\n"  # and nothing of its prompt
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(timeout=30) == 0
        take(tmp_path).release()


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=30)
    with take(tmp_path) as lock:
        assert lock.path.read_text().startswith(f"{os.getpid()} ")


def test_nothing_of_an_earlier_holder_is_left(tmp_path: Path) -> None:
    (tmp_path / "rockpage-fdab0000.npu.lock").write_text("1234567 a-program-with-a-long-name-" + "x" * 50 + "\n")
    with take(tmp_path) as lock:
        assert lock.path.read_text() == f"{os.getpid()} {Path(sys.argv[0]).name}\n"


def test_a_forked_child_does_not_hold_on_after_its_parent(tmp_path: Path) -> None:
    with holder(tmp_path, FORK) as other:
        assert other.stdout is not None
        child, held = other.stdout.readline().split()
        try:
            assert held == "False"
            with pytest.raises(
                DeviceError, match=f"process {other.pid} "
            ):  # the child let go of nothing of its parent's
                take(tmp_path)
            other.kill()
            other.wait(timeout=30)
            os.kill(int(child), 0)  # it is alive
            take(tmp_path).release()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        assert lock.held
        with pytest.raises(DeviceError, match=f"in use by process {os.getpid()} "):
            take(tmp_path)
        DeviceLock("fdac0000.npu", [str(tmp_path)]).release()  # each core's device has its own
    assert not lock.held
    lock.release()
    take(tmp_path).release()


def test_a_shared_lock_is_shared_within_the_process_alone(tmp_path: Path) -> None:
    """Whichever of the two is released last gives the device back."""
    for first in (0, 1):
        shared = DeviceLock("fdab0000.npu", [tmp_path], shared=True)
        both = [shared, take(tmp_path)]
        assert shared.path.read_text().startswith(f"{os.getpid()} ")
        both.pop(first).release()
        assert both[0].held
        with pytest.raises(AssertionError), holder(tmp_path):  # it did not say that it holds the lock
            pass
        both[0].release()
        with holder(tmp_path):
            pass
    with holder(tmp_path), pytest.raises(DeviceError, match="in use by process"):
        DeviceLock("fdab0000.npu", [tmp_path], shared=True)


def test_other_users_may_lock_the_file_that_is_left(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = take(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o666
    lock.release()
    assert lock.path.exists()


@pytest.mark.parametrize(
    "content", ["", "not a process", "\x1b[2J", "-5 rockpage", "\udcff".encode("utf-8", "surrogateescape")]
)
def test_a_file_that_names_nobody_is_no_reason_to_fail(tmp_path: Path, content: str | bytes) -> None:
    with take(tmp_path) as lock:
        lock.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DeviceError, match="is in use by another process: end it") as caught:
            take(tmp_path)
    assert caught.value.values["pid"] is None


def test_what_others_wrote_cannot_reach_the_terminal(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        lock.path.write_bytes(b"12 \x1b]0;owned\x07\n" + b"x" * 9999)
        with pytest.raises(DeviceError) as caught:
            take(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_the_first_folder_that_takes_the_file_has_it(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with DeviceLock("npu", [tmp_path / "missing", plain, tmp_path]) as lock:
        assert lock.path == tmp_path / "rockpage-npu.lock"
    with pytest.raises(
        DeviceError, match=r"missing: No such file or directory; .*plain: Not a directory\): set XDG_RUN"
    ):
        DeviceLock("npu", [tmp_path / "missing", plain])


def test_a_lock_never_writes_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    for link in (os.symlink, os.link):
        path = tmp_path / "rockpage-npu.lock"
        link(precious, path)
        with pytest.raises(DeviceError, match="no folder takes the lock"):
            DeviceLock("npu", [tmp_path])
        path.unlink()
    os.mkfifo(tmp_path / "rockpage-npu.lock")
    with pytest.raises(DeviceError, match="not a plain file of its own"):
        DeviceLock("npu", [tmp_path])
    assert precious.read_text() == "keep me"


@pytest.mark.parametrize("device", ["", ".", "../npu", "/dev/dri/renderD129", "a b", "x" * 65])
def test_a_device_is_a_plain_name(device: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not name a device"):
        DeviceLock(device, [tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_folders_that_all_users_share_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert lock_folders() == [Path("/run/lock"), Path("/run/user/1000"), tmp_path]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert lock_folders() == [Path("/run/lock"), tmp_path]

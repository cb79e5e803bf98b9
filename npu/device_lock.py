"""One process per NPU: an advisory lock that says who holds it."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import stat
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from hostcache.errors import DeviceError, UsageError

__all__ = ["DeviceLock", "lock_folders"]

_HOLDER_BYTES = 256
"""More than a process id and a program's name take."""


def lock_folders() -> list[Path]:
    """Where locks may lie, best first.

    A device belongs to the machine, so a folder that all users share comes first: `/run/lock` (Filesystem Hierarchy
    Standard 3.0, 5.4; not writable for everybody on all distributions), then the user's `$XDG_RUNTIME_DIR`, then the
    temporary folder. Users who end up in different folders do not see each other's locks.
    """
    folders = [Path("/run/lock")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folders.append(Path(runtime))
    return [*folders, Path(tempfile.gettempdir())]


class DeviceLock:
    """Holds a device for this process until `release()`, or until the process ends however it ends.

    The kernel keeps the lock (flock on a file), so nothing of a process that was killed has to be cleaned up. The file
    stays; it names the last holder by process id and program, never by arguments: they may hold a prompt. A child of
    fork() does not hold its parent's locks. Only the runtime of a real device takes one: emulation shares nothing.

    Args:
        device: name of the device that every process would use, such as `fdab0000.npu`.
        folders: where the lock may lie, best first; None: `lock_folders()`.
        shared: further locks of this process share the device with this one, which is held until all are released.

    Attributes:
        device: as given.
        shared: as given.
        path: the lock's file.

    Raises:
        DeviceError: another process holds the device, or another lock of this one that is not shared; or no folder
            takes the file.
        UsageError: `device` is no plain name.
    """

    def __init__(
        self, device: str, folders: Sequence[str | os.PathLike[str]] | None = None, *, shared: bool = False
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", device):
            raise UsageError(
                f"{device!r} does not name a device: use its name without folders, such as fdab0000.npu", device=device
            )
        self.device = device
        self.shared = shared
        places = lock_folders() if folders is None else list(map(Path, folders))
        self.path, self._file = _open_first(f"rockpage-{device}.lock", places)
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds the device through this object."""
        return not self._file.closed

    def release(self) -> None:
        """Let others have the device. Safe to call twice."""
        self._file.close()

    def __enter__(self) -> DeviceLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if self._join():
                return
            pid, program = _read_holder(self._file)
            who = f"process {pid} ({program})" if pid else "another process"
            raise DeviceError(
                f"the device {self.device} is in use by {who}: end it, or use the cpu runtime",
                device=self.device,
                pid=pid,
                program=program,
                path=str(self.path),
            ) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()} {Path(sys.argv[0]).name or 'python'}\n".encode()[:_HOLDER_BYTES])

    def _join(self) -> bool:
        """Hold the device together with a shared lock of this process; whether there is one."""
        sharing = next((lock for lock in _held if lock.held and lock.shared and lock.path == self.path), None)
        if sharing is None:
            return False
        self._file.close()
        # The kernel's lock belongs to the open file, and ends when the last descriptor of it is closed.
        self._file = io.FileIO(os.dup(sharing._file.fileno()), "r+")
        return True


_held: weakref.WeakSet[DeviceLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child shares the open file and with it the lock: it would keep the device after its parent's end."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


def _open_first(name: str, folders: Sequence[Path]) -> tuple[Path, io.FileIO]:
    """Open the lock's file in the first folder that has it or takes it."""
    refusals = []
    for folder in folders:
        try:
            return folder / name, _open(folder / name)
        except OSError as error:  # noqa: PERF203 - three folders at most
            refusals.append(f"{folder}: {error.strerror}")
    raise DeviceError(
        f"no folder takes the lock {name} ({'; '.join(refusals)}): set XDG_RUNTIME_DIR to one of yours", name=name
    )


def _open(path: Path) -> io.FileIO:
    """Open a lock's file, which any user may have left behind, for reading and writing."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # Without O_CREAT: a sticky folder refuses that for another user's file (fs.protected_regular, Linux 4.19).
        fd = os.open(path, flags)
    except FileNotFoundError:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(fd, 0o666)  # it holds nothing secret, and other users must be able to lock it, too
        except FileExistsError:  # somebody was faster
            fd = os.open(path, flags)
    file = io.FileIO(fd, "r+")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # a trap: writing to it would write elsewhere
        file.close()
        raise OSError(errno.EINVAL, "the lock is not a plain file of its own")
    return file


def _read_holder(file: io.FileIO) -> tuple[int | None, str]:
    """Process id and program of whoever holds the lock; None if it has not written them yet."""
    text = file.read(_HOLDER_BYTES).decode(errors="replace")
    pid, _, program = text.strip().partition(" ")
    # Anybody may write to the file: only what a terminal prints is believed.
    return (int(pid) if pid.isdecimal() else None), "".join(filter(str.isprintable, program))

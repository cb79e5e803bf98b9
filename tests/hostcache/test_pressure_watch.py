"""What is heard, from files laid out like the kernel's and a stand-in for its `poll`; and from this very kernel."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hostcache import scarcest_budget
from hostcache.errors import UsageError
from hostcache.pressure import PressureReading
from hostcache.pressure_watch import PressureWatch
from tests.hostcache.fake_heaps import open_descriptors
from tests.hostcache.test_memory_budget import MIB, version_1, version_2, write

TRIGGER = b"some 150000 1000000\0"  # of every second 150 ms, as the kernel's documentation writes it
UNPRIVILEGED = b"some 300000 2000000\0"


class FakePoll:
    """Speaks when told to: regular files cannot."""

    spoken: dict[str, int]  # by path, set by the test

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        if not isinstance(descriptor, int):
            raise TypeError(descriptor)
        self.registered[descriptor] = events

    def unregister(self, descriptor: int) -> None:
        del self.registered[descriptor]

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        assert milliseconds in (0, 50)
        paths = {descriptor: os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in self.registered}
        return [(descriptor, self.spoken[path]) for descriptor, path in paths.items() if path in self.spoken]


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    FakePoll.spoken = {}
    fake = SimpleNamespace(poll=FakePoll, POLLIN=select.POLLIN, POLLPRI=select.POLLPRI, POLLERR=select.POLLERR)
    monkeypatch.setattr("hostcache.pressure_watch.select", fake)
    return FakePoll.spoken


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A board with 4 GiB, 3 of them available, and a service that may have 1 GiB and uses a quarter."""
    version_2(tmp_path, "/service")
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {4 << 20} kB\nMemAvailable: {3 << 20} kB\n",
            "proc/pressure/memory": "",
            "sys/fs/cgroup/service/cgroup.type": "domain\n",
            "sys/fs/cgroup/service/memory.max": f"{1 << 30}\n",
            "sys/fs/cgroup/service/memory.current": f"{256 * MIB}\n",
            "sys/fs/cgroup/service/memory.pressure": "",
            "sys/fs/cgroup/service/memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
        },
    )
    return tmp_path


@pytest.fixture
def service(root: Path) -> Path:
    return root / "sys/fs/cgroup/service"


@pytest.fixture
def watch(root: Path, spoken: dict[str, int]) -> Iterator[PressureWatch]:
    before = open_descriptors()
    watch = PressureWatch(root=root)
    yield watch
    watch.close()
    watch.close()
    assert open_descriptors() == before


WELL = PressureReading(768 * MIB, "cgroup /service")


def test_triggers_are_set_and_named(watch: PressureWatch, root: Path, service: Path) -> None:
    assert (service / "memory.pressure").read_bytes() == TRIGGER
    assert (root / "proc/pressure/memory").read_bytes() == TRIGGER
    assert watch.sources == ["stalls of cgroup /service", "stalls of this machine", "events of the cgroup"]
    assert watch.describe() == f"{', '.join(watch.sources)}; what is left is looked at every 0.25 s"


def test_what_is_left_is_looked_at_when_the_time_has_come(watch: PressureWatch, service: Path) -> None:
    assert watch.read(100.0) == WELL
    write(service, {"memory.current": f"{1000 * MIB}\n"})
    assert watch.read(100.2) is None
    assert watch.read(100.25) == PressureReading(24 * MIB, "cgroup /service")


def test_a_stall_is_heard_at_once(watch: PressureWatch, service: Path, spoken: dict[str, int]) -> None:
    watch.read(100.0)
    spoken[str(service / "memory.pressure")] = select.POLLPRI
    expected = PressureReading(WELL.headroom, WELL.owner, "tasks of cgroup /service waited for memory")
    assert watch.read(100.1) == expected
    spoken.clear()
    assert watch.read(100.2) is None
    assert watch.read(100.5) == WELL


def test_what_was_said_during_a_wait_is_not_lost(watch: PressureWatch, service: Path, spoken: dict[str, int]) -> None:
    watch.read(100.0)
    spoken[str(service / "memory.pressure")] = select.POLLPRI
    watch.wait(0.05)
    spoken.clear()  # the kernel says it once
    reading = watch.read(100.1)
    assert reading is not None
    assert reading.stalled == "tasks of cgroup /service waited for memory"
    assert watch.read(100.2) is None


def test_a_wait_ends_when_others_can_be_read(watch: PressureWatch, service: Path, spoken: dict[str, int]) -> None:
    """What a stall says meanwhile is kept for the next look, and nobody listens to the others any longer."""
    watch.read(100.0)
    ours, theirs = os.pipe()
    pipe = os.readlink(f"/proc/self/fd/{ours}")
    assert not watch.wait(0.05, [ours])
    spoken[pipe] = select.POLLIN
    spoken[str(service / "memory.pressure")] = select.POLLPRI
    assert watch.wait(0.05, [ours])
    del spoken[str(service / "memory.pressure")]
    reading = watch.read(100.1)
    assert reading is not None
    assert reading.stalled == "tasks of cgroup /service waited for memory"
    assert watch.read(100.2) is None  # though the pipe can still be read
    with pytest.raises(TypeError):
        watch.wait(0.05, [ours, "none"])  # type: ignore[list-item]
    assert not watch.wait(0.05)
    os.close(ours)
    os.close(theirs)


def test_stalls_of_the_machine_count_when_it_has_little_left(
    watch: PressureWatch, root: Path, spoken: dict[str, int]
) -> None:
    spoken[str(root / "proc/pressure/memory")] = select.POLLPRI
    assert watch.read(0.0) == WELL  # somebody's cgroup is full, not the machine
    write(root, {"proc/meminfo": f"MemTotal: {4 << 20} kB\nMemAvailable: {(4 << 20) // 8} kB\n"})
    reading = watch.read(0.0)
    assert reading is not None
    assert reading.stalled == "tasks of this machine waited for memory"


@pytest.mark.parametrize(
    ("events", "stalled"),
    [
        ("high 5\nmax 90\noom 0\noom_kill 0\n", ""),  # the limit was met, and what was dropped sufficed
        ("high 0\nmax 1\noom 1\noom_kill 0\n", "the cgroup ran out of memory"),
        ("high 0\nmax 0\noom 0\noom_kill 2\n", "the cgroup ran out of memory"),
    ],
)
def test_events_are_told_apart(
    watch: PressureWatch, service: Path, spoken: dict[str, int], events: str, stalled: str
) -> None:
    watch.read(0.0)
    write(service, {"memory.events": events})
    spoken[str(service / "memory.events")] = select.POLLPRI | select.POLLERR  # as cgroup files do
    assert watch.read(0.1) == PressureReading(WELL.headroom, WELL.owner, stalled)
    assert watch.read(0.2) == WELL  # the same death is not told twice
    assert "events of the cgroup" in watch.sources


def test_deaths_before_the_start_do_not_count(root: Path, service: Path, spoken: dict[str, int]) -> None:
    write(service, {"memory.events": "oom 7\noom_kill 7\n"})
    watch = PressureWatch(root=root)
    spoken[str(service / "memory.events")] = select.POLLPRI | select.POLLERR
    assert watch.read(0.0) == WELL
    watch.close()


def test_a_source_that_is_gone_is_heard_no_more(
    watch: PressureWatch, service: Path, spoken: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> bytes:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(os, "pread", gone)
    for name in ("memory.pressure", "memory.events"):
        spoken[str(service / name)] = select.POLLPRI | select.POLLERR
    assert watch.read(0.0) == WELL
    assert watch.sources == ["stalls of this machine"]
    assert watch.read(0.1) is None


def test_without_the_right_a_longer_window_is_asked_for(
    root: Path, service: Path, spoken: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = os.write

    def unprivileged(descriptor: int, trigger: bytes) -> int:
        if trigger == TRIGGER:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return ask(descriptor, trigger)

    monkeypatch.setattr(os, "write", unprivileged)
    watch = PressureWatch(root=root)
    assert (service / "memory.pressure").read_bytes() == UNPRIVILEGED
    assert "stalls of this machine" in watch.sources
    watch.close()


def test_a_kernel_that_grants_no_trigger_is_polled_and_that_is_said(
    root: Path, spoken: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    before = open_descriptors()
    monkeypatch.setattr(os, "write", refuse)
    watch = PressureWatch(root=root)
    assert watch.sources == ["events of the cgroup"]
    watch.close()
    assert open_descriptors() == before


def test_stalls_of_the_root_are_the_machine_s(tmp_path: Path, spoken: dict[str, int]) -> None:
    version_2(tmp_path, "/")
    files = {
        "proc/pressure/memory": "",
        "sys/fs/cgroup/memory.pressure": "",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\n",
    }
    write(tmp_path, files)
    watch = PressureWatch(root=tmp_path)
    assert watch.sources == ["stalls of this machine"]
    watch.close()


def test_version_1_has_no_pressure_of_its_own(tmp_path: Path) -> None:
    version_1(tmp_path, "/board")
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {4 << 20} kB\nMemAvailable: {3 << 20} kB\n",
            "sys/fs/cgroup/memory/board/memory.limit_in_bytes": f"{64 * MIB}",
            "sys/fs/cgroup/memory/board/memory.usage_in_bytes": f"{60 * MIB}",
        },
    )
    watch = PressureWatch(interval=2, root=tmp_path)
    assert watch.sources == []
    assert watch.describe() == "no stall triggers here (PSI): what is left is looked at every 2 s"
    assert watch.read(0.0) == PressureReading(4 * MIB, "cgroup /board")
    assert watch.read(1.9) is None


def test_a_kernel_that_says_nothing_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="meminfo does not say what memory is left"):
        PressureWatch(root=tmp_path)


def test_this_kernel_is_heard() -> None:
    """No stall is made here: `make test-vm` does. Where there is PSI a trigger is granted, at least the slow one."""
    watch = PressureWatch()
    granted = Path("/proc/pressure/memory").exists() and os.access("/proc/pressure/memory", os.W_OK)
    assert ("stalls of this machine" in watch.sources) == granted
    reading, budget = watch.read(0.0), scarcest_budget()
    assert reading is not None
    assert budget is not None
    assert reading.headroom == pytest.approx(budget.available, rel=0.2)
    watch.wait(0.0)
    watch.close()
    assert watch.sources == []

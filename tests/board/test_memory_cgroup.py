from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostcache.memory_budget import memory_cgroups
from tests.board import memory_cgroup as module
from tests.board.memory_cgroup import MemoryCgroup, NoMemoryCgroup, memory_cgroup

MIB = 1 << 20


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    try:
        with memory_cgroup(64 * MIB) as cgroup:
            yield cgroup
    except NoMemoryCgroup as reason:
        pytest.skip(str(reason))


def test_a_limit_is_a_limit(cgroup: MemoryCgroup) -> None:
    hold = "held = b'x' * (int(__import__('sys').argv[1]) << 20); print(len(held))"
    less = cgroup.run([sys.executable, "-c", hold, "24"], cwd=Path.cwd())
    assert (less.returncode, less.stdout) == (0, f"{24 * MIB}\n")
    assert 24 * MIB < cgroup.peak_bytes < 64 * MIB
    assert cgroup.oom_kills == 0
    more = cgroup.run([sys.executable, "-c", hold, "96"], cwd=Path.cwd())
    assert (more.returncode, more.stdout) == (-9, "")
    assert cgroup.oom_kills == 1


def test_it_leaves_nothing_behind(cgroup: MemoryCgroup) -> None:
    parents = [folder for _, folder in memory_cgroups()]
    assert cgroup.folder.parent in parents
    with pytest.raises(RuntimeError, match="of the test"), memory_cgroup(MIB) as other:
        raise RuntimeError("of the test")
    assert not other.folder.exists()


def test_version_2_is_read(tmp_path: Path) -> None:
    (tmp_path / "memory.peak").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert (MemoryCgroup(tmp_path).peak_bytes, MemoryCgroup(tmp_path).oom_kills) == (4096, 1)


def test_where_none_can_be_made_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_cgroups", lambda: iter(()))
    with pytest.raises(NoMemoryCgroup, match="the memory controller is not mounted"), memory_cgroup(MIB):
        pass
    monkeypatch.setattr(module, "memory_cgroups", lambda: iter([("/", tmp_path)]))  # no kernel adds files there
    with pytest.raises(NoMemoryCgroup, match=f"below {tmp_path} memory is not limited"), memory_cgroup(MIB):
        pass
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(module, "memory_cgroups", lambda: iter([("/", tmp_path / "missing")]))
    with pytest.raises(NoMemoryCgroup, match=r"cannot be made \(No such file or directory\)"), memory_cgroup(MIB):
        pass

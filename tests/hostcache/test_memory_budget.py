"""Budgets as a kernel shows them, from trees of files laid out like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.memory_budget import MemoryBudget, memory_budgets, scarcest_budget

MIB = 1 << 20
UNLIMITED = str((1 << 63) - 4096)  # what version 1 says where nothing is set


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path, {"proc/meminfo": "MemTotal:  4096 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\nHugePages_Total: 0\n"}
    )
    return tmp_path


MACHINE = MemoryBudget(None, 4 * MIB, 2 * MIB)

STAT_OF_VERSION_2 = f"""\
anon {5 * MIB}
file {3 * MIB}
inactive_file {2 * MIB}
active_file {MIB}
slab_reclaimable {MIB // 2}
slab_unreclaimable {MIB // 2}
slab {MIB}
"""


def version_2(root: Path, own: str, mounted: str = "/") -> None:
    mounts = f"""\
20 1 0:20 / /proc rw - proc proc rw
30 25 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""
    write(root, {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mounts})


def version_1(root: Path, own: str, mounted: str = "/") -> None:
    """As systemd's hybrid hierarchy: version 2 is mounted, too, without controllers."""
    mounts = f"""\
34 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
35 31 0:33 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
    groups = f"9:name=systemd:/\n5:cpu,cpuacct:/\n4:memory:{own}\n0::/elsewhere\n"
    write(root, {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})


def test_the_machine_alone(root: Path) -> None:
    assert memory_budgets(root) == [MACHINE]
    assert scarcest_budget(root) == MACHINE


@pytest.mark.parametrize("meminfo", [None, "", "MemTotal: 1 kB\n", "MemAvailable: 1 kB\n", "MemTotal: x kB\nodd\n"])
def test_a_kernel_that_does_not_say(tmp_path: Path, meminfo: str | None) -> None:
    if meminfo is not None:
        write(tmp_path, {"proc/meminfo": meminfo})
    assert memory_budgets(tmp_path) == []
    assert scarcest_budget(tmp_path) is None


def test_version_2_counts_what_the_kernel_drops_as_free(root: Path) -> None:
    version_2(root, "/system.slice/rockpage.service")
    write(
        root / "sys/fs/cgroup/system.slice",
        {
            "memory.max": "max\n",
            "memory.high": "max\n",
            "memory.current": "99\n",
            "rockpage.service/memory.max": f"{10 * MIB}\n",
            "rockpage.service/memory.high": "max\n",
            "rockpage.service/memory.current": f"{9 * MIB}\n",
            "rockpage.service/memory.stat": STAT_OF_VERSION_2,
        },
    )
    # 10 less the 9 that are used, of which 3.5 can be dropped.
    assert memory_budgets(root) == [MACHINE, MemoryBudget("/system.slice/rockpage.service", 10 * MIB, 9 * MIB // 2)]
    assert scarcest_budget(root) == MACHINE


def test_the_lower_of_two_limits_holds(root: Path) -> None:
    version_2(root, "/a")
    limits = {"memory.max": str(9 * MIB), "memory.high": str(3 * MIB), "memory.current": str(2 * MIB)}
    write(root / "sys/fs/cgroup/a", limits)
    assert scarcest_budget(root) == MemoryBudget("/a", 3 * MIB, MIB)


def test_a_parent_holds_for_all_below_it(root: Path) -> None:
    version_2(root, "/a/b/c")
    write(
        root / "sys/fs/cgroup/a",
        {
            "memory.max": str(5 * MIB),
            "memory.current": str(5 * MIB - 7),
            "b/memory.max": "max",
            "b/memory.current": "4",
            "b/c/memory.max": str(4 * MIB),
            "b/c/memory.current": str(MIB),
        },
    )
    own, parent = MemoryBudget("/a/b/c", 4 * MIB, 3 * MIB), MemoryBudget("/a", 5 * MIB, 7)
    assert memory_budgets(root) == [MACHINE, own, parent]
    assert scarcest_budget(root) == parent


def test_version_1_reads_what_lies_below_as_well(root: Path) -> None:
    version_1(root, "/board")
    write(
        root / "sys/fs/cgroup",
        {
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.usage_in_bytes": "5",
            "memory/board/memory.limit_in_bytes": str(8 * MIB),
            "memory/board/memory.usage_in_bytes": str(7 * MIB),
            # Its own pages, and under total_ those of its children, too: usage counts them.
            "memory/board/memory.stat": f"active_file 0\ninactive_file 0\ntotal_active_file 4096\n"
            f"total_inactive_file {2 * MIB}\n",
            "unified/elsewhere/memory.max": "1",
            "unified/elsewhere/memory.current": "1",
        },
    )
    assert memory_budgets(root) == [MACHINE, MemoryBudget("/board", 8 * MIB, 3 * MIB + 4096)]


@pytest.mark.parametrize("own", ["/docker/123", "/docker/123/../../outside", "/outside"])
def test_a_container_sees_its_own_cgroup_at_the_mount(root: Path, own: str) -> None:
    version_2(root, own, mounted="/docker/123")
    write(root / "sys/fs/cgroup", {"memory.max": str(3 * MIB), "memory.current": str(MIB)})
    for other in ("docker/123", "outside"):  # a container in this one, whose path there is what ours is on the host
        write(root / "sys/fs/cgroup" / other, {"memory.max": "1", "memory.current": "1"})
    assert memory_budgets(root) == [MACHINE, MemoryBudget("/", 3 * MIB, 2 * MIB)]


def test_more_used_than_allowed_leaves_nothing(root: Path) -> None:
    version_2(root, "/a")  # the limit was lowered, and the kernel has not yet come down to it
    write(root / "sys/fs/cgroup/a", {"memory.max": "100", "memory.current": "200", "memory.stat": "active_file 50"})
    assert scarcest_budget(root) == MemoryBudget("/a", 100, 0)


def test_no_more_is_left_than_the_limit(root: Path) -> None:
    version_2(root, "/a")  # counters of different files are not read at the same moment
    write(root / "sys/fs/cgroup/a", {"memory.max": "100", "memory.current": "20", "memory.stat": "active_file 50"})
    assert scarcest_budget(root) == MemoryBudget("/a", 100, 100)


def test_a_controller_that_is_off_limits_nothing(root: Path) -> None:
    version_2(root, "/a")
    write(root / "sys/fs/cgroup/a", {"cgroup.procs": "1\n"})
    assert memory_budgets(root) == [MACHINE]


def test_a_mount_that_is_not_there_limits_nothing(root: Path) -> None:
    write(
        root,
        {"proc/self/cgroup": "4:memory:/a\n0::/\n", "proc/self/mountinfo": "20 1 0:20 / /proc rw - proc proc rw\n"},
    )
    assert memory_budgets(root) == [MACHINE]


@pytest.mark.parametrize("name", [b"M\xfcller", b"form\x0cfeed", "a\u2028b\u00a0c".encode()])
def test_a_disk_of_any_name_is_no_obstacle(root: Path, name: bytes) -> None:
    """The kernel escapes spaces, tabs and newlines in a mount's place, and nothing else."""
    version_2(root, "/a")
    mounts = root / "proc/self/mountinfo"
    mounts.write_bytes(b"29 25 0:25 / /media/" + name + b" rw - vfat /dev/sda1 rw\n" + mounts.read_bytes())
    write(root / "sys/fs/cgroup/a", {"memory.max": "100", "memory.current": "20"})
    assert scarcest_budget(root) == MemoryBudget("/a", 100, 80)


def test_this_machine_says() -> None:
    machine, *_ = memory_budgets()
    assert machine.cgroup is None
    assert 0 < machine.available < machine.limit

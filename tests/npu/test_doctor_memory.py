"""What the doctor says about memory: against a plan, under a limit, and where devices get theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hostcache.geometry import KVGeometry
from npu.doctor import examine
from npu.memory_plan import MemoryPlan
from tests.npu.doctor_cases import HEALTHY, Files, answer, case
from tests.npu.fake_machine import FakeDevice, FakeNode

PLAN = MemoryPlan(
    geometry=KVGeometry(layers=24, kv_heads=2, head_dim=128),
    ram_bytes=4 << 30,
    reserve_bytes=512 << 20,
    weights_bytes=1100 << 20,
    runtime_bytes=100 << 20,
    staging_bytes=48 << 20,
    device_bytes=0,
    pool_asked=192 << 20,
)
"""1100 + 100 + 48 + 192 = 1440 MiB for the process."""


MEMINFO = "MemTotal: 4000000 kB\nMemAvailable: {} kB\nCmaTotal: {} kB\nCmaFree: {} kB\n"


@pytest.mark.parametrize(
    ("available_mib", "plan", "status", "words"),
    [
        (1440, PLAN, "ok", "1440.0 MiB available of 3906.2 MiB, 1440.0 MiB needed"),
        (1439, PLAN, "fail", "1439.0 MiB available"),
        (2000, None, "info", "2000.0 MiB available"),
        (300, None, "warn", "a pool of 192.0 MiB alone take"),
    ],
)
def test_memory_against_a_plan(
    tmp_path: Path, available_mib: int, plan: MemoryPlan | None, status: str, words: str
) -> None:
    meminfo = MEMINFO.format(available_mib * 1024, 0, 0).encode()
    check = answer("memory", tmp_path, files={"/proc/meminfo": meminfo}, plan=plan)
    assert (check.status, words in check.found) == (status, True), check


@pytest.mark.parametrize(("free_kib", "status"), [(0, "fail"), (128 * 1024 - 4, "warn"), (128 * 1024, "ok")])
def test_contiguous_memory_matters_without_an_iommu(tmp_path: Path, free_kib: int, status: str) -> None:
    npu = "/devices/platform/fdab0000.npu"
    bare = replace(HEALTHY, devices=tuple(replace(d, attributes={}) if d.path == npu else d for d in HEALTHY.devices))
    checks = {
        c.name: c
        for c in examine(
            case(tmp_path, bare, files={"/proc/meminfo": MEMINFO.format(4000000, 200000, free_kib).encode()})
        ).checks
    }
    assert checks["iommu"].status == "warn"
    assert checks["cma"].status == status
    assert ("cma=128M" in checks["cma"].fix) == (status != "ok")


def test_and_does_not_with_one(tmp_path: Path) -> None:
    checks = {c.name: c for c in examine(case(tmp_path)).checks}
    assert (checks["iommu"].status, checks["cma"].status) == ("ok", "info")
    assert checks["cma"].found == "CmaTotal 8.0 MiB, CmaFree 0.0 MiB"


CGROUP = "/sys/fs/cgroup"
CGROUP_V1 = f"{CGROUP}/memory"
V1 = {"/proc/self/mountinfo": b"33 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"}
GIB = b"1073741824\n"


@pytest.mark.parametrize(
    ("files", "plan", "status", "words"),
    [
        (
            {f"{CGROUP}/user.slice/memory.max": GIB},
            None,
            "info",
            "cgroup /user.slice is limited to 1024.0 MiB, and has 1024.0 MiB left",
        ),
        ({f"{CGROUP}/user.slice/memory.max": GIB}, PLAN, "fail", "1440.0 MiB needed"),
        (
            {f"{CGROUP}/user.slice/memory.max": b"2147483648\n", f"{CGROUP}/user.slice/memory.current": GIB},
            PLAN,
            "fail",
            "limited to 2048.0 MiB, and has 1024.0 MiB left; 1440.0 MiB needed",
        ),
        ({f"{CGROUP}/user.slice/memory.max": b"2147483648\n"}, PLAN, "info", "limited to 2048.0 MiB"),
        ({f"{CGROUP}/memory.max": GIB, "/proc/self/cgroup": b"0::/\n"}, None, "info", "cgroup / is limited to 1024.0"),
        (
            {
                f"{CGROUP}/a/b/memory.max": b"2147483648\n",
                f"{CGROUP}/a/memory.max": GIB,
                "/proc/self/cgroup": b"0::/a/b\n",
            },
            None,
            "info",
            "cgroup /a is limited to 1024.0 MiB",
        ),
        (
            {**V1, "/proc/self/cgroup": b"4:memory:/x\n0::/\n", f"{CGROUP_V1}/x/memory.limit_in_bytes": GIB},
            None,
            "info",
            "cgroup /x is limited to 1024.0",
        ),
        (
            {
                **V1,
                "/proc/self/cgroup": b"4:cpu,memory:/gone\n",
                f"{CGROUP_V1}/memory.limit_in_bytes": b"9223372036854771712\n",
            },
            PLAN,
            "ok",
            "no limit",
        ),
        ({"/proc/self/cgroup": None}, PLAN, "ok", "no limit"),
        ({"/proc/self/cgroup": b"strange"}, PLAN, "ok", "no limit"),
    ],
)
def test_a_control_group_s_limit(
    tmp_path: Path, files: Files, plan: MemoryPlan | None, status: str, words: str
) -> None:
    check = answer("cgroup_memory", tmp_path, files=files, plan=plan)
    assert (check.status, words in check.found) == (status, True), check


def test_a_kernel_without_stall_information_is_named(tmp_path: Path) -> None:
    assert answer("memory_pressure", tmp_path, files={"/proc/pressure/memory": b"some avg10=0.00"}).status == "ok"
    check = answer("memory_pressure", tmp_path / "without")
    assert (check.status, check.fix) == ("info", "a kernel with CONFIG_PSI tells, if need be after booting with psi=1")
    assert "only what is left is watched" in check.found


def test_closed_heaps_are_named_with_a_rule(tmp_path: Path) -> None:
    shut = tuple(
        replace(d, node=replace(d.node, usable=False)) if d.node and d.subsystem == "dma_heap" else d
        for d in HEALTHY.devices
    )
    check = answer("dma_heaps", tmp_path, replace(HEALTHY, devices=shut))
    assert check.status == "info"
    assert check.found == "cma (closed), system (closed), system-uncached (closed)"
    assert 'SUBSYSTEM=="dma_heap"' in check.fix


def test_an_uncached_heap_alone_is_none(tmp_path: Path) -> None:
    bed = HEALTHY.without("dma_heap/cma").without("dma_heap/system")
    uncached = FakeDevice(
        "/devices/virtual/dma_heap/system-uncached",
        "dma_heap",
        node=FakeNode("/dev/dma_heap/system-uncached", (251, 2)),
    )
    assert answer("dma_heaps", tmp_path, replace(bed, devices=(*bed.devices, uncached))).status == "info"

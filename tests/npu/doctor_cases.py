"""A board in good health, for the doctor's tests to take something away from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from npu.discovery import discover
from npu.doctor import examine
from npu.doctor_check import Case, Check
from npu.memory_plan import MemoryPlan
from npu.process_facts import ProcessFacts
from tests.npu.beds import BEDS
from tests.npu.fake_machine import Bed

__all__ = ["HEALTHY", "PROCESS", "Files", "answer", "case", "elf"]

Files = Mapping[str, bytes | None]
"""Files by name; None is no file."""


def elf(text: bytes, machine: int = 183) -> bytes:
    """The head of a 64-bit little-endian ELF file for a kind of processor (183: aarch64), and some text in it."""
    return (
        b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + machine.to_bytes(2, "little") + bytes(44) + text + bytes(99)
    )


FILES = {
    "/usr/lib/librknnrt.so": elf(b"...\0librknnrt version: 2.5.0 (0123456789@2026-01-01T00:00:00)\0"),
    "/proc/cpuinfo": b"processor\t: 0\nFeatures\t: fp asimd fphp asimdhp asimdrdm asimddp\n\n",
    "/proc/meminfo": b"MemTotal:        4000000 kB\nMemAvailable:    3000000 kB\nCmaTotal:  8192 kB\nCmaFree:  0 kB\n",
    "/proc/self/cgroup": b"0::/user.slice\n",
    "/proc/self/mountinfo": b"31 25 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
    "/sys/fs/cgroup/user.slice/memory.max": b"max\n",
    "/sys/kernel/debug/rknpu/load": b"NPU load:  Core0:  0%, Core1: 11%, Core2:  0%,\n",
    "/sys/kernel/debug/rknpu/mm": b"SRAM bitmap: ...\nSRAM total size: 978944, used: 0, free: 978944\n",
    "/dev/kmsg": b"6,812,2183945,-;RKNPU fdab0000.npu: RKNPU: rknpu iommu is enabled, using iommu mode\n",
    "/boot/config-6.1.99-rockchip": b"".join(
        b"CONFIG_%s=y\n" % name
        for name in (b"CMA", b"DMABUF_HEAPS", b"DMABUF_HEAPS_SYSTEM", b"DMABUF_HEAPS_CMA", b"UDMABUF")
    ),
}

HEALTHY = replace(BEDS["vendor"], files={**BEDS["vendor"].files, **FILES})

PROCESS = ProcessFacts(
    architecture="aarch64",
    release="6.1.99-rockchip",
    user="ada",
    is_root=False,
    groups=frozenset({"ada", "video", "render"}),
    future_groups=frozenset(),
    open_files=(65536, 1 << 20),
    page_bytes=4096,
    python=(3, 11),
    lite="2.5.0",
)


def case(
    folder: Path,
    bed: Bed = HEALTHY,
    process: ProcessFacts = PROCESS,
    *,
    files: Files | None = None,
    closed: tuple[str, ...] = (),
    plan: MemoryPlan | None = None,
) -> Case:
    """A case; `files` replaces some of the bed's, or takes them away where it says None; `closed` may not be read."""
    content = {**bed.files, **(files or {})}
    machine = replace(bed, files={name: text for name, text in content.items() if text is not None}).write(folder)
    machine.closed = closed
    return Case(machine, discover(machine), process, toolkit="2.5.0", plan=plan)


def answer(name: str, *args: object, **kwargs: object) -> Check:
    """One check's answer for a case."""
    checks = examine(case(*args, **kwargs)).checks  # type: ignore[arg-type] # as they are given
    return next(check for check in checks if check.name == name)

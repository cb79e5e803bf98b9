"""Memory: what is left of it, what a container may take, and what devices can have."""

from __future__ import annotations

from hostcache.dma_heap import PREFERRED_HEAPS
from hostcache.memory_budget import meminfo_bytes, memory_budgets

from .doctor_check import AS_ROOT, Case, Check
from .memory_plan import runtime_bytes

__all__ = ["cgroup_memory", "cma", "dma_heaps", "iommu", "memory", "memory_pressure", "sram"]

USUAL_POOL = 192 << 20
"""Bytes of the KV pool that `rockpage plan` asks for by default."""

USUAL_LAYERS = 24
"""Of the reference model with 1.1B weights."""

CMA_BYTES = 128 << 20
"""Contiguous memory that an NPU without an IOMMU should find free: pool or arena, and graphs."""


def memory(case: Case) -> Check:
    """Does what is to run fit into what is available?"""
    name = "memory"
    available, total = (meminfo_bytes(field, case.machine.root) for field in ("MemAvailable", "MemTotal"))
    why = "weights, pool and staging are taken at start and stay; when memory runs out the kernel ends processes"
    if available is None or total is None:
        return Check(name, "unknown", "the kernel does not tell", why)
    found = f"{_mib(available)} available of {_mib(total)}"
    if case.plan is None:
        needed = USUAL_POOL + runtime_bytes(USUAL_LAYERS)
        if available < needed:
            found += f"; libraries and a pool of {_mib(USUAL_POOL)} alone take {_mib(needed)}"
            return Check(name, "warn", found, why, "end other programs, or give rockpage a smaller pool")
        return Check(name, "info", found, why, "name a model to see whether it fits: rockpage doctor MODEL")
    found += f", {_mib(case.plan.process_bytes)} needed"
    if available < case.plan.process_bytes:
        return Check(name, "fail", found, why, "end other programs, or take a smaller pool or model: see rockpage plan")
    return Check(name, "ok", found, why)


def cgroup_memory(case: Case) -> Check:
    """Does a container or a service get less memory than the machine has?"""
    name, total = "cgroup_memory", meminfo_bytes("MemTotal", case.machine.root)
    why = "a process beyond its control group's limit is ended by the kernel, however much the machine has left"
    budgets = [budget for budget in memory_budgets(case.machine.root) if budget.cgroup is not None]
    limited = [budget for budget in budgets if total is None or budget.limit < total]
    if not limited:
        return Check(name, "ok", "no limit below the machine's memory", why)
    scarcest = min(limited, key=lambda budget: budget.available)
    found = f"{scarcest.owner} is limited to {_mib(scarcest.limit)}, and has {_mib(scarcest.available)} left"
    if case.plan is not None and scarcest.available < case.plan.process_bytes:
        found += f"; {_mib(case.plan.process_bytes)} needed"
        return Check(
            name, "fail", found, why, "raise it (docker run --memory, systemd MemoryMax=), or take a smaller pool"
        )
    return Check(name, "info", found, why)


def memory_pressure(case: Case) -> Check:
    """Does the kernel say when tasks wait for memory?"""
    name, why = "memory_pressure", "when others need memory, rockpage gives that of unused blocks back in time"
    if case.machine.exists("/proc/pressure/memory"):
        return Check(name, "ok", "the kernel tells of stalls (PSI)", why)
    fix = "a kernel with CONFIG_PSI tells, if need be after booting with psi=1"
    return Check(name, "info", "no stalls are told of (PSI): only what is left is watched", why, fix)


def iommu(case: Case) -> Check:
    """Does the NPU see scattered memory as one piece?"""
    name, npu = "iommu", case.board.npu
    why = "behind an IOMMU the NPU uses ordinary memory, up to 4 GB; without one all it uses must be contiguous"
    if npu is None:
        return Check(name, "info", "there is no NPU", why)
    if npu.iommu:
        return Check(name, "ok", f"{npu.name} is behind an IOMMU", why)
    fix = "enable the node iommu@fdab9000 (rknpu_mmu) in the device tree"
    return Check(name, "warn", f"{npu.name} has no IOMMU", why, fix)


def cma(case: Case) -> Check:
    """Is there contiguous memory, where it is needed?"""
    name, npu = "cma", case.board.npu
    total, free = (meminfo_bytes(field, case.machine.root) or 0 for field in ("CmaTotal", "CmaFree"))
    found = f"CmaTotal {_mib(total)}, CmaFree {_mib(free)}"
    if npu is None or npu.iommu:
        return Check(
            name, "info", found, "the NPU needs none behind an IOMMU; DMA heaps of contiguous memory take theirs here"
        )
    why = "without an IOMMU all of the NPU's memory is contiguous, and comes from here"
    if free < CMA_BYTES:
        return Check(name, "fail" if not free else "warn", found, why, f"boot with cma={CMA_BYTES >> 20}M or more")
    return Check(name, "ok", found, why)


def dma_heaps(case: Case) -> Check:
    """Could memory be taken that devices share?"""
    name, heaps = "dma_heaps", case.board.heaps
    why = "runtimes that hand their own memory to the NPU take it here; rknnlite copies, and needs no heap"
    if not heaps:
        return Check(name, "info", "the kernel has none", why, "a kernel with CONFIG_DMABUF_HEAPS has them")
    words = {"missing": "not in /dev", "link": "a link", "file": "no device"}
    found = ", ".join(f"{h.name} ({'open' if h.node.usable else words.get(h.node.kind, 'closed')})" for h in heaps)
    if any(heap.node.usable and heap.name in PREFERRED_HEAPS for heap in heaps):
        return Check(name, "ok", found, why)
    if any(heap.node.kind == "device" for heap in heaps):
        return Check(name, "info", found, why, 'udev rule: SUBSYSTEM=="dma_heap", GROUP="video", MODE="0660"')
    return Check(name, "info", found, why, "hand them in: docker run --device /dev/dma_heap/system")


def sram(case: Case) -> Check:
    """Does the NPU have memory on the chip?"""
    name, why = (
        "sram",
        "a device tree may lend the NPU up to 956 KiB on the chip; none is normal, and rockpage asks for none",
    )
    try:
        lines = case.machine.read("/sys/kernel/debug/rknpu/mm").decode(errors="replace").splitlines()
    except PermissionError:
        return Check(name, "unknown", "the kernel tells root alone", why, AS_ROOT)
    except OSError:
        return Check(name, "info", "none", why)
    return Check(name, "info", next((line for line in reversed(lines) if "total" in line), "none"), why)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

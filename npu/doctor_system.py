"""The machine as a whole: which board, which processor, which kernel, and what that kernel has logged."""

from __future__ import annotations

import gzip
import re
import zlib

from .doctor_check import AS_ROOT, Case, Check

__all__ = ["board", "cpu_features", "kernel_config", "kernel_log", "open_files", "page_size", "udev"]

FEATURES = {"aarch64": ("fphp", "asimdhp", "asimddp"), "x86_64": ("avx2", "f16c")}
"""Of /proc/cpuinfo, by architecture: half precision and dot products, which the fast kernels use."""

OPEN_FILES = 4096
"""Descriptors that are enough for every graph on every core; at 1024 the vendor's runtime was seen to run out."""

OPTIONS = ("CMA", "DMABUF_HEAPS", "DMABUF_HEAPS_SYSTEM", "DMABUF_HEAPS_CMA", "UDMABUF")
"""What a kernel should have for memory that devices share; that it has the NPU's driver is seen from the NPU."""

NPU_TROUBLE = re.compile(r"RKNPU.*(failed to wait job|job timeout|job abort|failed to allocate|dma map \d+ fail)")
"""The vendor's driver's words for a job or a buffer that failed (driver 0.9.8)."""


def board(case: Case) -> Check:
    """Which board is this, and has rockpage graphs for its NPU?"""
    name, found = "board", case.board
    why = "rockpage's graphs are for the NPU of the RK3588, RK3588S and RK3583; elsewhere it does without"
    cores = f", {found.npu.cores} NPU cores" if found.npu and found.npu.cores else ""
    if found.soc is not None:
        text = f"{found.model or 'unnamed'} ({found.soc.name}{cores})"
        return Check(name, "ok" if found.runs_graphs else "warn", text, why)
    machine = f"Linux on {case.process.architecture}"
    if found.npu is not None:
        return Check(name, "warn", f"{machine}, with another NPU ({found.npu.compatible or found.npu.name})", why)
    if found.container is not None and case.process.architecture == "aarch64":
        fix = "if this is a board, show the container /proc/device-tree and /dev/dri"
        return Check(name, "warn", f"{machine}, no board with an NPU, or a container that hides it", why, fix)
    return Check(name, "warn", f"{machine}, no board with an NPU: attention runs on the CPU, or is emulated", why)


def cpu_features(case: Case) -> Check:
    """Has the processor what the fast kernels use?"""
    why = "without them attention takes a plain way, several times slower and as right"
    wanted = FEATURES.get(case.process.architecture)
    found = re.search(r"^(?:Features|flags)\s*:\s*(.*)$", case.machine.text("/proc/cpuinfo") or "", re.MULTILINE)
    if wanted is None or found is None:
        return Check("cpu_features", "unknown", f"{case.process.architecture} does not tell", why)
    missing = [feature for feature in wanted if feature not in found[1].split()]
    if missing:
        return Check("cpu_features", "warn", f"{', '.join(missing)} missing", why, "a newer processor has them")
    return Check("cpu_features", "ok", ", ".join(wanted), why)


def page_size(case: Case) -> Check:
    """Are pages of memory of the usual size?"""
    size = case.process.page_bytes
    why = "blocks presented as one dma-buf are rows of whole pages, which 16 tokens of a head fill if a page is 4 KiB"
    return Check("page_size", "ok" if size == 4096 else "info", f"{size} bytes", why)


def open_files(case: Case) -> Check:
    """May the process open enough files?"""
    soft, hard = case.process.open_files
    why = "the vendor's runtime takes a descriptor for each buffer: 'failed to convert handle(1020) to fd, errno 24'"
    found = "no limit" if soft < 0 else f"{soft} at once"
    if 0 <= soft < OPEN_FILES:
        way = (
            f"ulimit -n {OPEN_FILES}" if hard < 0 or hard >= OPEN_FILES else f"LimitNOFILE={OPEN_FILES} for its service"
        )
        return Check("open_files", "warn", found, why, f"{way}, before rockpage starts")
    return Check("open_files", "ok", found, why)


def kernel_config(case: Case) -> Check:
    """Was the kernel built with what is used?"""
    name, why = (
        "kernel_config",
        "runtimes that hand the NPU memory of their own need these; rknnlite needs none of them",
    )
    text = _config(case)
    if text is None:
        return Check(name, "unknown", "the kernel does not show how it was built", why)
    options = dict(line.split("=", 1) for line in text.splitlines() if line.startswith("CONFIG_") and "=" in line)
    off = [option for option in OPTIONS if options.get(f"CONFIG_{option}") not in ("y", "m")]
    return Check(name, "info" if off else "ok", f"off: {', '.join(off)}" if off else "all that is used", why)


def kernel_log(case: Case) -> Check:
    """Has the NPU's driver complained?"""
    name, why = (
        "kernel_log",
        "a job that hung or a buffer that could not be had shows here, and to a program as a wrong code",
    )
    try:
        lines = case.machine.kernel_log()
    except PermissionError:
        return Check(name, "unknown", "the kernel tells root alone", why, AS_ROOT)
    except OSError:
        return Check(name, "unknown", "there is no log to read", why)
    trouble = [found.group(1) for line in lines if (found := NPU_TROUBLE.search(line))]
    if trouble:
        said = f"{len(trouble)} complaints of the NPU's driver, the last: {trouble[-1]}"
        return Check(name, "warn", said, why, "read them: dmesg | grep RKNPU")
    return Check(name, "ok", "no complaint of the NPU's driver", why)


def udev(case: Case) -> Check:
    """Where is it known from which devices there are?"""
    why = "both tell the same; udev's rules also set the nodes' groups and stable names"
    if case.board.source == "udev":
        return Check("udev", "ok", "devices listed by udev", why)
    return Check("udev", "info", "devices read from sysfs: no udev library, or no pyudev", why)


def _config(case: Case) -> str | None:
    """The kernel's build options, as far as it shows them."""
    try:
        return gzip.decompress(case.machine.read("/proc/config.gz")).decode(errors="replace")
    except (OSError, EOFError, zlib.error):  # not there, not allowed, cut short, or damaged
        return case.machine.text(f"/boot/config-{case.process.release}")

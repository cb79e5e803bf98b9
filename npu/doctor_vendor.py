"""The vendor's software: kernel driver, runtime library, Python wheel, and whether they go together."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass

from .doctor_check import AS_ROOT, Case, Check
from .machine import Machine

__all__ = ["Library", "driver_version", "find_library", "librknnrt", "rknn_toolkit_lite2", "runtime_versions"]

LIBRARY = "/usr/lib/librknnrt.so"

SEARCHED = ("/usr/lib/librknn_runtime.so", "/usr/lib64/librknn_runtime.so", LIBRARY)
"""Where rknn-toolkit-lite2 2.5.0 looks, in this order. LD_LIBRARY_PATH and the loader's cache mean nothing to it."""

STRAYS = (
    "/usr/lib/aarch64-linux-gnu/librknnrt.so",
    "/usr/lib64/librknnrt.so",
    "/usr/local/lib/librknnrt.so",
)
"""Where packages put the library, and the wheel does not look."""

AARCH64 = 183
"""e_machine of an ELF file (elf.h)."""

OLDEST_DRIVER = (0, 9, 6)
"""From here on the driver has IOMMU domains; the vendor's runtimes ask for 0.8.8 and, for language models, 0.9.7."""

CORE_TROUBLE = {(0, 9, 2), (0, 9, 3)}
"""Drivers on which jobs for cores 1 and 2 failed (airockchip/rknn-toolkit2#294, rockchip-linux/rknn-toolkit2#320)."""

NEWEST_PYTHON = (3, 12)
"""Of rknn-toolkit-lite2 2.5.0's wheels on PyPI."""


@dataclass(frozen=True)
class Library:
    """A library file of the vendor's.

    Attributes:
        path: of the file.
        version: such as `2.3.2`; None if it does not say.
        is_aarch64: whether it is for this kind of processor.
    """

    path: str
    version: str | None
    is_aarch64: bool


def find_library(machine: Machine) -> Library | None:
    """The library that the vendor's Python runtime would load; None if it would find none.

    The file is read, not loaded: loading would run its code.
    """
    path = next(filter(machine.exists, SEARCHED), None)
    if path is None:
        return None
    try:
        with machine.path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(rb"librknnrt version: (\d+\.\d+\.\d+)", content)
            is_aarch64 = content[:4] == b"\x7fELF" and int.from_bytes(content[18:20], "little") == AARCH64
            return Library(path, found[1].decode() if found else None, is_aarch64)
    except (OSError, ValueError):  # closed to this user, or empty
        return Library(path, None, is_aarch64=False)


def driver_version(case: Case) -> Check:
    """Is the kernel's driver new enough?"""
    name, npu = "driver_version", case.board.npu
    why = "older drivers know no IOMMU domains, and some fail jobs on all cores but the first"
    if npu is None or npu.driver != "rknpu":
        return Check(name, "info", "there is no driver of the vendor's", why)
    if npu.version is None:
        return Check(name, "unknown", "the kernel tells root alone", why, AS_ROOT)
    fix = "install the vendor's newer kernel image, the driver comes with it"
    if _numbers(npu.version) in CORE_TROUBLE:
        return Check(name, "warn", f"RKNPU {npu.version}, on which jobs for cores 1 and 2 were seen to fail", why, fix)
    if _numbers(npu.version) < OLDEST_DRIVER:
        return Check(name, "warn", f"RKNPU {npu.version}, older than {_dotted(OLDEST_DRIVER)}", why, fix)
    return Check(name, "ok", f"RKNPU {npu.version}", why)


def librknnrt(case: Case) -> Check:
    """Is the vendor's library where it is looked for?"""
    name, library = "librknnrt", find_library(case.machine)
    why = f"the vendor's Python runtime loads {LIBRARY}, and asks neither other folders nor LD_LIBRARY_PATH"
    fix = (
        f"put librknnrt.so {case.toolkit} for aarch64 there, from github.com/airockchip/rknn-toolkit2 (rknpu2/runtime)"
    )
    if library is None:
        stray = next((path for path in STRAYS if case.machine.exists(path)), None)
        if stray is not None:
            return Check(
                name, "fail", f"{stray} is not where it is looked for", why, f"ln -s {stray} {LIBRARY} as root"
            )
        return Check(name, "fail", f"{LIBRARY} is missing", why, fix)
    if not library.is_aarch64:
        return Check(name, "fail", f"{library.path} cannot be read, or is no library for aarch64", why, fix)
    if library.path != LIBRARY:
        return Check(
            name, "warn", f"{library.path} is taken in its place", why, f"remove {library.path}: it is obsolete"
        )
    return Check(name, "ok", f"{library.path}, version {library.version or 'unknown'}", why)


def rknn_toolkit_lite2(case: Case) -> Check:
    """Is the vendor's Python runtime installed?"""
    name, lite, python = "rknn_toolkit_lite2", case.process.lite, case.process.python
    why = "the rknnlite runtime is the vendor's wheel rknn-toolkit-lite2"
    if lite is not None:
        return Check(name, "ok", f"rknn-toolkit-lite2 {lite}", why)
    found = f"not installed for Python {_dotted(python)}"
    if python > NEWEST_PYTHON:
        return Check(name, "fail", f"{found}, and there is none", why, f"use Python {_dotted(NEWEST_PYTHON)} or older")
    return Check(name, "fail", found, why, "pip install 'rockpage[board]'")


def runtime_versions(case: Case) -> Check:
    """Do compiler, library and wheel go together?"""
    name, library, lite = "runtime_versions", find_library(case.machine), case.process.lite
    why = "rockpage refuses graphs that were compiled by another version than the library's"
    if library is None or library.version is None:
        return Check(name, "unknown", "no librknnrt.so that says its version", why)
    found = f"graphs {case.toolkit}, librknnrt.so {library.version}" + (f", rknn-toolkit-lite2 {lite}" if lite else "")
    if _numbers(library.version) != _numbers(case.toolkit):
        fix = f"put librknnrt.so {case.toolkit} there, or export the graphs by rknn-toolkit2 {library.version}"
        return Check(name, "fail" if case.has_graphs else "warn", found, why, fix)
    if lite and _numbers(lite) != _numbers(library.version):
        why = "wheel and library speak to each other by structures that changed between versions"
        return Check(name, "warn", found, why, f"pip install rknn-toolkit-lite2=={library.version}")
    return Check(name, "ok", found, why)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.3.2` as (2, 3, 2); what follows the numbers does not count."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

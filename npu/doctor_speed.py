"""What costs speed: clocks that are held low, heat, and other users of the NPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .board import Clock, ThermalZone
from .doctor_check import AS_ROOT, Case, Check

__all__ = ["cpu_clock", "ddr_clock", "npu_clock", "npu_load", "thermal"]

STUCK = frozenset({"powersave", "userspace", "rknpu_ondemand"})
"""Governors that do not raise a clock by themselves: the vendor's for the NPU, whatever its name, hands on what was set
before (rknpu_devfreq.c of driver 0.9.8)."""

NEAR = 5
"""Degrees Celsius below the point at which the kernel slows down."""

NEAR_CRITICAL = 15
"""Degrees Celsius below the point at which the kernel shuts down, where nothing slows down before."""


def npu_clock(case: Case) -> Check:
    """Does the NPU run at full speed?"""
    clock = case.board.npu_clock
    why = "the vendor's governor rknpu_ondemand never raises the clock; some boards start at the lowest, 300 MHz of 950"
    return _clocks("npu_clock", [clock] if clock else [], why, _caution(case.process.release))


def ddr_clock(case: Case) -> Check:
    """Does the memory run at full speed?"""
    clock = case.board.ddr_clock
    # At 1068 MHz in place of 2112, on three cores: happyme531/rknpu2_matmul_open, docs/ATTENTION.md.
    why = "attention and decoding wait for memory: at half its clock, attention over long contexts took 73 % longer"
    if clock is None:
        why += "; firmware without the call to scale it leaves it where it was at start"
    return _clocks("ddr_clock", [clock] if clock else [], why)


def cpu_clock(case: Case) -> Check:
    """Do the CPU's cores run at full speed?"""
    return _clocks("cpu_clock", case.board.cpu_clocks, "the dense parts of a model, and short contexts, run on the CPU")


def thermal(case: Case) -> Check:
    """Is it so hot that the kernel slows down?"""
    name, zones = "thermal", case.board.thermal
    why = "where a zone gets hot, the kernel lowers clocks: the NPU's, the CPU's or the memory's"
    if not zones:
        return Check(name, "unknown", "no zone answers", why)
    hottest = ", ".join(f"{zone.name} {zone.celsius:.0f} °C" for zone in sorted(zones, key=lambda z: -z.celsius)[:3])
    hot = [zone for zone in zones if _is_hot(zone)]
    if hot:
        found = ", ".join(f"{zone.name} {zone.celsius:.0f} °C of {zone.passive or zone.critical:.0f}" for zone in hot)
        return Check(name, "warn", found, why, "cool the board: a heat sink, a fan, less at once")
    return Check(name, "ok", hottest, why)


def npu_load(case: Case) -> Check:
    """Does somebody else use the NPU?"""
    name, why = (
        "npu_load",
        "launches of several programs queue up behind each other; RKLLM beside RKNN was seen to hang",
    )
    text = None
    for file in ("/proc/rknpu/load", "/sys/kernel/debug/rknpu/load"):
        try:
            text = case.machine.read(file).decode(errors="replace")
            break
        except PermissionError:
            return Check(name, "unknown", "the kernel tells root alone", why, AS_ROOT)
        except OSError:
            continue
    loads = re.findall(r"(\d+)%", text or "")
    if not loads:
        return Check(name, "unknown", "the kernel does not tell", why)
    return Check(name, "info", "cores at " + ", ".join(f"{load} %" for load in loads), why)


def _clocks(name: str, clocks: Sequence[Clock], why: str, warning: str = "") -> Check:
    """One answer for clocks that belong together; the first that is held low decides."""
    if not clocks:
        return Check(name, "unknown", "the kernel does not scale it", why)
    for clock in clocks:
        if clock.limit and clock.highest and clock.limit < clock.highest:
            found = f"{clock.name} may not go above {_mhz(clock.limit)} of {_mhz(clock.highest)}"
            return Check(name, "warn", found, why, f"look for what lowers it below {clock.path}: heat, or a setting")
        if clock.governor in STUCK and clock.current and clock.highest and clock.current < clock.highest:
            found = f"{clock.name} stays at {_mhz(clock.current)} of {_mhz(clock.highest)}, governor {clock.governor}"
            return Check(name, "warn", found, why, f"echo performance > {clock.governor_file} as root{warning}")
    return Check(name, "ok", ", ".join(map(_described, clocks)), why)


def _described(clock: Clock) -> str:
    return f"{clock.name} {_mhz(clock.current) if clock.current else 'at an unknown clock'}, governor {clock.governor}"


def _mhz(hertz: int) -> str:
    return f"{hertz / 1e6:.0f} MHz"


def _is_hot(zone: ThermalZone) -> bool:
    if zone.passive is not None:
        return zone.celsius >= zone.passive - NEAR
    return zone.critical is not None and zone.celsius >= zone.critical - NEAR_CRITICAL


def _caution(release: str) -> str:
    """What to say to somebody whose kernel is not one that the vendor's driver comes with."""
    if re.match(r"(5\.10|6\.1)\.", release):
        return ""
    return "; not with the driver built as a module for a newer kernel, where that was seen to hang the board"

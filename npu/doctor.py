"""Looks a machine over: what keeps rockpage from its NPU, what costs speed or memory, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import doctor_access, doctor_memory, doctor_speed, doctor_system, doctor_vendor
from .board import Board
from .discovery import discover
from .doctor_check import Case, Check
from .machine import Machine
from .memory_plan import MemoryPlan
from .process_facts import ProcessFacts
from .rknn_toolkit import REQUIREMENTS

__all__ = ["ANYWHERE", "FOR_ITS_NPU", "ON_A_BOARD", "Diagnosis", "Verdict", "diagnose", "examine"]

Verdict = Literal["healthy", "degraded", "unusable"]
"""Of all checks together."""

ANYWHERE: tuple[Callable[[Case], Check], ...] = (
    doctor_system.board,
    doctor_system.cpu_features,
    doctor_system.page_size,
    doctor_memory.memory,
    doctor_memory.cgroup_memory,
    doctor_memory.memory_pressure,
)
"""Checks that make sense on any machine."""

ON_A_BOARD: tuple[Callable[[Case], Check], ...] = (
    doctor_speed.ddr_clock,
    doctor_speed.cpu_clock,
    doctor_speed.thermal,
    doctor_system.udev,
)
"""Checks for any of Rockchip's boards: rockpage runs on their CPU."""

FOR_ITS_NPU: tuple[Callable[[Case], Check], ...] = (
    doctor_access.npu_driver,
    doctor_access.npu_node,
    doctor_access.rknpu_path,
    doctor_access.device_tree,
    doctor_access.container,
    doctor_vendor.driver_version,
    doctor_vendor.librknnrt,
    doctor_vendor.rknn_toolkit_lite2,
    doctor_vendor.runtime_versions,
    doctor_system.open_files,
    doctor_memory.iommu,
    doctor_memory.cma,
    doctor_memory.dma_heaps,
    doctor_memory.sram,
    doctor_speed.npu_clock,
    doctor_speed.npu_load,
    doctor_system.kernel_config,
    doctor_system.kernel_log,
)
"""Checks for boards whose NPU rockpage has graphs for: the way to it, and the vendor's software."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        board: the machine.
        checks: the answers, in the order of the checks.
    """

    board: Board
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        """`unusable` if a check failed, `degraded` if one warned, `healthy` otherwise.

        A machine whose NPU rockpage has no graphs for, or that has none, is `degraded`: rockpage runs on its CPU.
        """
        statuses = {check.status for check in self.checks}
        return "unusable" if "fail" in statuses else "degraded" if "warn" in statuses else "healthy"

    @property
    def exit_status(self) -> int:
        """Of a command: 0 healthy, 1 degraded, 2 unusable."""
        return {"healthy": 0, "degraded": 1, "unusable": 2}[self.verdict]


def diagnose(plan: MemoryPlan | None = None, toolkit: str | None = None, machine: Machine | None = None) -> Diagnosis:
    """Look at a machine, and check it; only reads.

    Args:
        plan: what is to run there.
        toolkit: version of rknn-toolkit2 that the graphs were compiled by; by default that which rockpage compiles by.
        machine: this one by default.
    """
    machine = machine or Machine()
    known = toolkit or _own_toolkit()
    return examine(Case(machine, discover(machine), ProcessFacts.here(), known, toolkit is not None, plan))


def examine(case: Case) -> Diagnosis:
    """Run the checks that apply."""
    checks = ANYWHERE
    if case.board.is_board:
        checks += ON_A_BOARD
    if case.board.runs_graphs:
        checks += FOR_ITS_NPU
    return Diagnosis(case.board, tuple(check(case) for check in checks))


def _own_toolkit() -> str:
    """Version of rknn-toolkit2 that rockpage was tried with."""
    found = re.search(r"^rknn-toolkit2==(\S+)$", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""

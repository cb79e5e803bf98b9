"""What one of the doctor's checks is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .board import Board
from .machine import Machine
from .memory_plan import MemoryPlan
from .process_facts import ProcessFacts

__all__ = ["AS_ROOT", "Case", "Check", "Status"]

Status = Literal["ok", "info", "warn", "fail", "unknown"]
"""`info` is worth knowing and nothing to mend, `warn` costs something, `fail` keeps what was asked for from running,
`unknown` could not be found out."""

AS_ROOT = "run rockpage doctor as root to see it"
"""The way out where only root may look."""


@dataclass(frozen=True)
class Check:
    """An answer.

    Attributes:
        name: of the check; stays the same from version to version.
        status: see `Status`.
        found: what is there.
        why: why that matters.
        fix: what to do; empty if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    why: str
    fix: str = ""


@dataclass(frozen=True)
class Case:
    """A machine, as the checks see it.

    Attributes:
        machine: its files.
        board: what was discovered on it.
        process: the process that is to run there.
        toolkit: version of rknn-toolkit2 that the graphs are compiled by.
        has_graphs: whether there are graphs already; else they can still be compiled by another.
        plan: what is to run there; None if that was not said.
    """

    machine: Machine
    board: Board
    process: ProcessFacts
    toolkit: str
    has_graphs: bool = False
    plan: MemoryPlan | None = None

"""What a self-test found, in a form to send back: it names no host, no user and no folder of his."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from .account_names import user_name

__all__ = ["Report", "Step", "StepStatus", "Verdict", "anonymous"]

StepStatus = Literal["proved", "failed", "not run"]
"""`not run` says nothing about the machine but that this could not be tried there."""

Verdict = Literal["proved", "failed", "incomplete"]
"""Of all steps together; `incomplete` where nothing failed and something that is needed did not run."""


@dataclass(frozen=True)
class Step:
    """What one step found.

    Attributes:
        name: of the step; stays the same from version to version.
        status: see `StepStatus`.
        found: in words; where the step did not run, why.
        figures: what was measured, as JSON takes it.
        details: lines for people, of what the figures hold.
        needed: whether the whole is incomplete if this does not run.
    """

    name: str
    status: StepStatus
    found: str
    figures: Mapping[str, object] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    needed: bool = True

    def without_names(self) -> Step:
        """The same, with words that can be shown to anybody. Figures must hold no text that tells."""
        return replace(self, found=anonymous(self.found), details=tuple(map(anonymous, self.details)))


@dataclass(frozen=True)
class Report:
    """What all steps found, and on what.

    Attributes:
        emulated: whether the NPU was the emulated one.
        chip: the board, as its device tree calls it, the chip, and the NPU's cores.
        versions: of everything that has a say; None where it is not there, or does not tell.
        steps: in the order in which they ran.
    """

    emulated: bool
    chip: Mapping[str, object]
    versions: Mapping[str, str | None]
    steps: tuple[Step, ...]

    @property
    def verdict(self) -> Verdict:
        """See `Verdict`."""
        if any(step.status == "failed" for step in self.steps):
            return "failed"
        return "incomplete" if any(step.status == "not run" and step.needed for step in self.steps) else "proved"

    @property
    def exit_status(self) -> int:
        """Of a command: 0 if all was proved that is needed, else 1."""
        return 0 if self.verdict == "proved" else 1

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "emulated": self.emulated,
            "chip": dict(self.chip),
            "versions": dict(self.versions),
            "steps": [
                {
                    "name": step.name,
                    "status": step.status,
                    "found": step.found,
                    "details": list(step.details),
                    "figures": dict(step.figures),
                }
                for step in self.steps
            ],
        }


def anonymous(text: str) -> str:
    """A text without the names of this user, his folder and this host.

    Root's name stays: it says nothing, and stands in the permissions of nodes.
    """
    user, host, home = user_name(os.geteuid()), os.uname().nodename, str(Path.home())
    if home != "/":
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    for name, placeholder in ((host, "HOST"), (user, "USER")):
        if name not in ("root", "localhost") and not name.isdecimal():
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text

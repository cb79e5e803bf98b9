"""Where attention runs: on a device, or straight through the block table on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .cost_model import CostModel
from .launch import Cut

__all__ = ["ByCost", "Everything", "Placed", "Placement", "PlacementLog"]


class Placement(Protocol):
    """Decides for each launch of a step, the same way for the same step."""

    def on_device(self, cuts: Sequence[Cut]) -> list[bool]:
        """Whether each of a step's launches goes to the device; the host takes the others."""

    def reason(self, cut: Cut, launches: int) -> str:
        """Why a launch went where it went, in a few words."""


class Everything:
    """Whatever fits a bucket goes to the device."""

    def on_device(self, cuts: Sequence[Cut]) -> list[bool]:
        """All of them."""
        return [True] * len(cuts)

    def reason(self, cut: Cut, launches: int) -> str:  # noqa: ARG002 - it is always the same
        """It was asked for."""
        return "asked for"


class ByCost:
    """Each launch goes where it takes less time.

    Decode rows with short contexts stay on the host, where reading K and V costs little more than gathering them would;
    tiles of a prompt go to a device, which has the arithmetic.

    Args:
        model: of the machine.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def on_device(self, cuts: Sequence[Cut]) -> list[bool]:
        """Those that the device finishes sooner, counted as if all of them went there."""
        return [self.model.on_device(cut.work, len(cuts)) < self.model.on_host(cut.work) for cut in cuts]

    def reason(self, cut: Cut, launches: int) -> str:
        """Both costs."""
        host, device = self.model.on_host(cut.work), self.model.on_device(cut.work, launches)
        return f"device {device * 1e3:.2f} ms, host {host * 1e3:.2f} ms a layer"


@dataclass(frozen=True)
class Placed:
    """Launches of one kind that went the same way.

    Attributes:
        kind: `decode`, `tile` of a prompt, or `beyond` the largest bucket.
        bucket: tokens; 0 beyond the largest.
        device: whether the device had them.
    """

    kind: str
    bucket: int
    device: bool


@dataclass
class PlacementLog:
    """What went where, and why: for people.

    Attributes:
        counts: launches, or sequences beyond the largest bucket, of each kind; per step, not per layer.
        reasons: why the latest of each kind went there.
    """

    counts: dict[Placed, int] = field(default_factory=dict)
    reasons: dict[Placed, str] = field(default_factory=dict)

    def add(self, placed: Placed, reason: str) -> None:
        """Count one."""
        self.counts[placed] = self.counts.get(placed, 0) + 1
        self.reasons[placed] = reason

    def lines(self) -> list[str]:
        """One line for each kind, in order of kind, bucket and place."""
        ordered = sorted(self.counts, key=lambda placed: (placed.kind, placed.bucket, placed.device))
        return [
            f"{self.counts[placed]:6} x {placed.kind}"
            + (f" in {placed.bucket} tokens" if placed.bucket else "")
            + f": {'NPU' if placed.device else 'CPU'} ({self.reasons[placed]})"
            for placed in ordered
        ]

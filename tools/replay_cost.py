"""How long a machine takes for a step: the clock of a replay."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hostcache import StepPlan
from hostcache.errors import UsageError

__all__ = ["PUBLISHED", "PUBLISHED_GEOMETRY", "MachineCost"]


@dataclass(frozen=True)
class MachineCost:
    """`seconds = step + row * rows + token * tokens`, `tokens` being what all sequences of the step hold together.

    A step reads the weights once, computes its rows, and reads each sequence's KV once.

    Attributes:
        step: seconds of a step as such.
        row: seconds for each token computed.
        token: seconds for each token of KV read.

    Raises:
        UsageError: a figure is negative or not finite, or a step would cost nothing.
    """

    step: float
    row: float
    token: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:  # false for NaN, too
                raise UsageError(f"the cost {field.name} is {value}; it must be seconds, 0 or more", name=field.name)
        if self.step + self.row <= 0:
            raise UsageError("a step that costs nothing moves no clock: give step or row more than 0 seconds")

    def seconds(self, plan: StepPlan) -> float:
        """What a step takes."""
        return self.step + self.row * plan.rows + self.token * int(plan.context_lens.sum())


PUBLISHED = MachineCost(step=0.0819, row=0.00742, token=5.2e-6)
"""Qwen3-1.7B with 8-bit weights on an RK3588 (ROCK 5B), by the vendor's runtime, from published figures.

It decodes 11.2 tokens a second and prefills 134.7 (ork-driver, docs/FEASIBILITY-LOG.md, M15 to M16): a row takes
1/134.7 s, a step 1/11.2 s less one row. Attention over 4096 cached tokens of 8 KV heads of 128 takes 0.763 ms a layer
on three cores (happyme531/rknpu2_matmul_open, docs/ATTENTION.md), and there are 28 layers. Not measured together, and
not by us; that rows of several sequences cost what rows of one prompt cost is an assumption.
"""

PUBLISHED_GEOMETRY = {"layers": 28, "kv_heads": 8, "head_dim": 128}
"""Of Qwen3-1.7B (its config.json): 112 KiB of KV a token."""

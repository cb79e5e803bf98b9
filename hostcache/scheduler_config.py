"""How much a step may hold, and who goes first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import UsageError

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, and the rules by which requests wait and give way.

    Attributes:
        context_length: most tokens a sequence may hold: the model's limit.
        max_rows: most tokens one step computes, over all sequences.
        max_sequences: most sequences that run at once.
        prefill_chunk: most prompt tokens of one sequence in one step.
        watermark: share of the pool that admission leaves free while others run, so that they can grow; below 1.
        step_seconds: how long those that decode may wait for their next token. Prompts get what is left of it, and a
            tile of 16 rows in any case; None: they get all the rows there are.
        max_waiting: most requests that wait; more are refused. Of a named client, no more than eight for each place
            that is free, so that others find one.
        ageing_seconds: waiting that is worth one priority.
        max_skips: how many later requests may be admitted before one that does not fit.
        max_preemptions: how often a request may lose its blocks to others. Then it is admitted only when all that it
            may come to fits, and that is kept for it.
        max_dedup_steps: how many steps a request waits for another one to compute what both begin with.
        client_weights: shares of clients that are not to count as 1.
        model_window: newest tokens that a token sees in the layer that sees most, itself included; 0: all. What no
            layer sees any more is let go of, for every request.

    Raises:
        UsageError: a limit is out of range.
    """

    context_length: int
    max_rows: int = 256
    max_sequences: int = 64
    prefill_chunk: int = 64
    watermark: float = 0.01
    step_seconds: float | None = None
    max_waiting: int = 1024
    ageing_seconds: float = 30.0
    max_skips: int = 4
    max_preemptions: int = 8
    max_dedup_steps: int = 128
    client_weights: Mapping[str, float] = field(default_factory=dict)
    model_window: int = 0

    def __post_init__(self) -> None:
        for name in ("context_length", "max_rows", "max_sequences", "prefill_chunk", "max_waiting"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}", name=name)
        for name in ("max_skips", "max_preemptions", "max_dedup_steps", "model_window"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}", name=name)
        for name in ("step_seconds", "ageing_seconds"):
            _require_positive(name, getattr(self, name))
        for client, weight in self.client_weights.items():
            _require_positive(f"the weight of client {client!r}", weight)
        if not 0 <= self.watermark < 1:  # false for NaN, too
            raise UsageError(f"watermark is a share of the pool, 0 to below 1, got {self.watermark}", name="watermark")
        if self.max_sequences > self.max_rows:
            raise UsageError(
                f"max_sequences {self.max_sequences} exceeds max_rows {self.max_rows}: every running sequence "
                "needs a row to decode",
                max_sequences=self.max_sequences,
            )


def _require_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:  # false for NaN, too
        raise UsageError(f"{name} must be positive and finite, got {value}", name=name)

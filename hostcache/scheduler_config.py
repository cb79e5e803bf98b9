"""How much a step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        context_length: most tokens a sequence may hold: the model's limit.
        max_rows: most tokens one step computes, over all sequences.
        max_sequences: most sequences that run at once.
        prefill_chunk: most prompt tokens of one sequence in one step.
        watermark: share of the pool that admission leaves free while others run, so that they can grow; below 1.

    Raises:
        UsageError: a limit is out of range.
    """

    context_length: int
    max_rows: int = 256
    max_sequences: int = 64
    prefill_chunk: int = 64
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("context_length", "max_rows", "max_sequences", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}", name=name)
        if not 0 <= self.watermark < 1:  # false for NaN, too
            raise UsageError(f"watermark is a share of the pool, 0 to below 1, got {self.watermark}", name="watermark")
        if self.max_sequences > self.max_rows:
            raise UsageError(
                f"max_sequences {self.max_sequences} exceeds max_rows {self.max_rows}: every running sequence "
                "needs a row to decode",
                max_sequences=self.max_sequences,
            )

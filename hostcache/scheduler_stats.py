"""What a scheduler has done so far."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerStats"]


@dataclass
class SchedulerStats:
    """Counters since start.

    Attributes:
        steps: steps committed.
        prompt_tokens: tokens of admitted requests, counted at each admission.
        hit_tokens: of those, tokens the prefix cache had.
        computed_tokens: tokens whose KV was computed.
        preemptions: times a running request lost its blocks.
    """

    steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0

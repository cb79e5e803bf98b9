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
        swapped_in_tokens: of those, tokens that came back from the swap space.
        computed_tokens: tokens whose KV was computed.
        drafted_tokens: of those, tokens that had only been proposed.
        accepted_tokens: of those, tokens that proved right.
        preemptions: times a running request lost its blocks.
        swapped_out: of those, times its KV went to the swap space.
        skips: times a request was admitted before one that did not fit.
        dedup_waits: times admission waited for another request's blocks.
        refused: requests refused because too many waited.
        finished: requests that ended, for whatever reason.
        expired: of those, requests whose time was up.
    """

    steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    swapped_in_tokens: int = 0
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    swapped_out: int = 0
    skips: int = 0
    dedup_waits: int = 0
    refused: int = 0
    finished: int = 0
    expired: int = 0

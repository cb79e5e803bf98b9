"""Random traffic with windows against the shadow."""

from __future__ import annotations

from collections import Counter

import pytest

from .test_shadow_oracle import SHAPES
from .windowed_shadow import WindowedShadow


@pytest.mark.parametrize("runs", [60, pytest.param(500, marks=pytest.mark.long)])
def test_whoever_sees_little_reads_what_it_would_have_read_with_all_blocks(runs: int) -> None:
    """200 steps each: forked, preempted, swapped, rolled back, with guesses; and each kind of event did happen."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        tokens, blocks = SHAPES[seed % len(SHAPES)]
        engine = WindowedShadow(seed, tokens, blocks)
        engine.run(200)
        seen += engine.seen
        for name in ("preemptions", "swapped_in_tokens", "accepted_tokens", "hit_tokens"):
            seen[name] += getattr(engine.scheduler.stats, name)
    for event in (
        "let go", "let go behind sinks", "turned", "slid twice", "outgrew the pool", "forked, running", "rolled back",
        "preemptions", "swapped_in_tokens", "accepted_tokens", "hit_tokens", "guaranteed", "shed", "refused",
        "finished stop", "finished length", "finished failed",
    ):  # fmt: skip
        assert seen[event] >= 30, (event, seen)

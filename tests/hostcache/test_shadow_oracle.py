"""Random traffic against the shadow, and seeded faults that the shadow must see."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.hostcache.faults import FAULTS
from tests.hostcache.shadow import ShadowEngine

SHAPES = [(tokens, blocks) for blocks in (3, 6, 16, 40) for tokens in (4, 16)]


def shadow(seed: int) -> ShadowEngine:
    block_tokens, blocks = SHAPES[seed % len(SHAPES)]
    return ShadowEngine(seed, block_tokens, blocks)


@pytest.mark.parametrize("runs", [100, pytest.param(500, marks=pytest.mark.long)])
def test_random_traffic_never_reads_foreign_kv(runs: int) -> None:
    """200 steps each over pools of different shapes; and every kind of event did happen."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        engine = shadow(seed)
        engine.run(200)
        seen += engine.seen
        for name in (
            "preemptions",
            "swapped_out",
            "swapped_in_tokens",
            "skips",
            "dedup_waits",
            "expired",
            "drafted_tokens",
            "accepted_tokens",
        ):
            seen[name] += getattr(engine.scheduler.stats, name)
    for when in ("between steps", "in flight"):
        for state in ("waiting", "running", "preempted", "swapped"):
            assert seen[f"aborted {state} {when}"] >= 5, (state, when, seen)
    for reason in ("stop", "length", "aborted", "failed"):
        assert seen[f"finished {reason}"] >= 50, (reason, seen)
    for event in (
        "forked, running", "forked, waiting", "hit", "refused", "refused, queue full", "rolled back", "invalidated",
        "refused, a branch", "refused, a fork",
        "preemptions", "swapped_out", "swapped_in_tokens", "guaranteed", "skips",
        "dedup_waits", "expired", "shed", "paused", "aborted before it was branched off", "aborted before its branches",
        "drafted_tokens", "accepted_tokens",
    ):  # fmt: skip
        assert seen[event] >= 30, (event, seen)


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS.keys())
def test_a_seeded_fault_is_caught(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(plant)
    plant(monkeypatch)
    for seed in range(40):
        try:
            shadow(seed).run(200)
        except Exception:  # whatever the fault breaks: the shadow, an invariant, or an error of the code itself
            return
    pytest.fail("40 runs of 200 steps did not notice the fault")

"""Random traffic of several codecs against the shadow."""

from __future__ import annotations

from collections import Counter

import pytest

from .codec_shadow import CodecShadow, WindowedCodecShadow
from .test_shadow_oracle import SHAPES


def run(engine: CodecShadow) -> Counter[str]:
    engine.run(200)
    seen = engine.seen
    for name in ("preemptions", "swapped_out", "swapped_in_tokens", "accepted_tokens", "hit_tokens"):
        seen[name] += getattr(engine.scheduler.stats, name)
    return seen


@pytest.mark.parametrize("runs", [60, pytest.param(500, marks=pytest.mark.long)])
def test_codecs_that_share_a_pool_never_read_each_others_kv(runs: int) -> None:
    """200 steps each; and every kind of event did happen."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        tokens, blocks = SHAPES[seed % len(SHAPES)]
        seen += run(CodecShadow(seed, tokens, blocks))
    for event in (
        "written fp16", "written int8", "written int4", "codecs together", "codecs run together",
        "taken from another codec", "guaranteed beside other codecs",
        "preemptions", "swapped_out", "swapped_in_tokens", "accepted_tokens", "hit_tokens",
        "forked, running", "rolled back", "shed", "finished stop", "finished length", "finished failed",
    ):  # fmt: skip
        assert seen[event] >= 30, (event, seen)


@pytest.mark.parametrize("runs", [40, pytest.param(500, marks=pytest.mark.long)])
def test_windows_of_several_codecs_let_go_and_slide(runs: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(runs):
        tokens, blocks = SHAPES[seed % len(SHAPES)]
        seen += run(WindowedCodecShadow(seed, tokens, blocks))
    for event in (
        "let go", "turned", "codecs together", "taken from another codec", "preemptions", "swapped_in_tokens",
        "forked, running", "finished stop", "finished length",
    ):  # fmt: skip
        assert seen[event] >= 30, (event, seen)

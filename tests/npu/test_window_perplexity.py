"""Sinks keep a real model sane behind its window (Xiao et al., arXiv 2309.17453, claim and explain it)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.prefix import Namespace, PrefixCache
from hostcache.scheduler import Scheduler
from hostcache.window import AttentionWindow
from npu.loading import EngineParts, load_parts
from npu.model_runner import ModelRunner
from npu.score import log_softmax_at

WINDOW = 256
ENGLISH = Path(__file__).parent / "english.txt"
"""Of this project's documents, as they once were: the figures in docs/long-contexts.md stay what they are."""


def text_of(parts: EngineParts, tokens: int) -> NDArray[np.int32]:
    """English that the model has never read."""
    ids = parts.tokenizer.encode(ENGLISH.read_text(encoding="utf-8"))[:tokens]
    assert len(ids) == tokens
    return ids


class Scorer:
    """Teacher-forces texts through a scheduler, which `Engine.score` goes around."""

    def __init__(self, parts: EngineParts) -> None:
        self._scheduler = Scheduler(parts.cache, PrefixCache(parts.cache.pool), parts.config, turn=parts.turn)
        self._runner = ModelRunner(parts.decoder, parts.cache, parts.runtime)

    def logprobs(
        self, ids: NDArray[np.int32], window: AttentionWindow | None = None, *, slide: bool = False
    ) -> NDArray[np.float64]:
        """Of each token but the first, given those before it that the window shows."""
        scheduler = self._scheduler
        own = Namespace(self._runner.numerics(), salt=f"{window} {ids[:8]}")  # what is known already brings no logits
        scheduler.submit(ids[:-1], own, 1, window=window, slide=slide)
        found: list[float] = []
        while not scheduler.idle:
            plan = scheduler.schedule()
            logits = self._runner.compute(dataclasses.replace(plan, logit_rows=np.arange(plan.rows)))
            found += log_softmax_at(logits, ids[len(found) + 1 :][: plan.rows]).tolist()
            scheduler.commit(plan, [0] * len(plan.sampling), [True] * len(plan.sampling))
        assert len(found) == len(ids) - 1
        return np.array(found)


@pytest.mark.parametrize("tokens", [768, pytest.param(3072, marks=pytest.mark.long)])
def test_a_model_stays_sane_behind_its_window_with_sinks_and_not_without(demo_model: Path, tokens: int) -> None:
    """Surprise, in nats per token, of what lies behind the first window; its exponential is the perplexity.

    A bound for a sane model is the text cut into pieces as long as the window: there, tokens see half as much on
    average. Without sinks, the softmax gives the weight that was theirs to tokens that mean something, and the model
    does worse than if it had seen nothing before the piece.
    """
    parts = load_parts(demo_model, pool_bytes=128 << 20, threads=2, watch_memory=False)
    try:
        ids, scorer = text_of(parts, tokens), Scorer(parts)
        everything, with_sinks, without = (
            -scorer.logprobs(ids, window)[WINDOW:].mean()
            for window in (None, AttentionWindow(WINDOW, sinks=4), AttentionWindow(WINDOW + 4))
        )
        starts = range(WINDOW, tokens, WINDOW)
        pieces = -np.mean([scorer.logprobs(ids[start : start + WINDOW]).mean() for start in starts])
    finally:
        parts.close()
    assert everything < with_sinks < pieces < without
    assert without - everything > 3 * (with_sinks - everything)


@pytest.mark.long
def test_a_text_longer_than_the_context_costs_no_more_than_its_window_does(demo_model: Path) -> None:
    """Turned back over and over, keys are as good as where they were first; only the sinks are nearer.

    The model was made for 8192 positions and may do as well with sinks from afar: the two agree within a tenth of a
    nat, which is a ninth of what a window without sinks costs.
    """
    surprise = []
    for context in (8192, 512):
        parts = load_parts(demo_model, pool_bytes=128 << 20, threads=2, context_length=context, watch_memory=False)
        try:
            window = AttentionWindow(WINDOW, sinks=4)
            found = Scorer(parts).logprobs(text_of(parts, 3072), window, slide=context == 512)
        finally:
            parts.close()
        surprise.append(-found[WINDOW:].mean())
    assert surprise[1] == pytest.approx(surprise[0], abs=0.1)

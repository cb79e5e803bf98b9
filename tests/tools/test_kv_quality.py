"""What int8 and int4 KV do to the demo model's predictions stays within what docs/codecs.md promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench_codec_run import Text, quality_figures, texts_of


def figures_of(model: Path, texts: dict[str, list[Text]]) -> dict[str, float]:
    found = quality_figures(model, texts, piece=2048, activations="fp32", threads=1)
    return {figure.case: figure.value for figure in found}


@pytest.fixture(scope="module")
def figures(demo_model: Path) -> dict[str, float]:
    """Of the two scored texts, some 220 tokens; `rockpage bench codec` reads a book besides."""
    texts = texts_of(None)
    return figures_of(demo_model, {name: texts[name] for name in ("the two scored texts",)})


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.002), ("int4", 0.03)])
def test_predictions_move_by_no_more_than_is_promised(figures: dict[str, float], codec: str, most: float) -> None:
    assert 0 < figures[f"{codec}, mean KL"] <= most


def test_perplexity_of_int8_is_that_of_fp16(figures: dict[str, float]) -> None:
    """Within 0.2 %. That of int4 takes more tokens to tell: it varies by a percent between pieces of two thousand."""
    assert abs(figures["int8, perplexity"]) <= 0.2


@pytest.mark.long
def test_a_book_is_as_likely_as_is_promised(demo_model: Path) -> None:
    """All texts, 6.2k tokens: the targets, which leave int4 room for what another processor's rounding does."""
    figures = figures_of(demo_model, texts_of(None))
    for codec, perplexity, divergence in (("int8", 0.2, 0.002), ("int4", 2.0, 0.03)):
        assert abs(figures[f"{codec}, perplexity"]) <= perplexity
        assert figures[f"{codec}, mean KL"] <= divergence

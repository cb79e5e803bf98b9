"""`rockpage bench codec`: figures are what they say, on a tiny model and on made-up logits."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hostcache import KVGeometry, PagedKVCache
from hostcache.codec import FP16, INT4, INT8, Codec
from npu.source import open_model
from npu.text import tokenizer_of
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tools import bench_codec_run
from tools.bench_codec_run import Drift, _scatter, scatter_rows, texts_of

from .command_line import assert_refused, run_here


def test_a_drift_is_what_the_definitions_say() -> None:
    """From even odds to 3 : 1, in two positions of a vocabulary of two."""
    exact, found = np.zeros((2, 2), np.float32), np.log(np.array([[3.0, 1.0], [3.0, 1.0]], np.float32))
    drift = Drift()
    drift.add(exact, found, np.array([0, 1], np.int32))
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert drift.mean_divergence == pytest.approx(divergence, rel=1e-6)
    assert drift.worst_change == pytest.approx(math.log(2), rel=1e-6)  # the second token: from 1/2 to 1/4
    # Of both: 3/4 * 1/4 instead of 1/2 * 1/2.
    assert drift.perplexity_change == pytest.approx(100 * (math.sqrt(0.25 / 0.1875) - 1), rel=1e-6)


def test_drifts_are_joined_by_positions_not_by_texts() -> None:
    short, long = Drift(), Drift()
    exact = np.zeros((4, 2), np.float32)
    moved = np.tile(np.log(np.array([3.0, 1.0], np.float32)), (4, 1))
    short.add(exact[:1], moved[:1], np.zeros(1, np.int32))
    long.add(exact[:3], exact[:3], np.zeros(3, np.int32))
    joined = Drift.of_all([short, long])
    assert joined.mean_divergence == pytest.approx(short.mean_divergence / 4)
    assert long.mean_divergence == 0


def test_every_codec_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(layers=3, head_dim=32, heads=6))
    text = tmp_path / "text.txt"
    text.write_text("They saw the rain and then the other rain, at one, in an old inn. " * 4, encoding="utf-8")
    arguments = ("bench", "codec", str(model), "--text", str(text), "--piece", "100", "--times", "3", "--json")
    rows = json.loads(run_here(capsys, *arguments).out)["rows"]
    assert [(row["case"], row["target"]) for row in rows[:6]] == [
        ("int8, perplexity", 0.2),
        ("int8, mean KL", 0.002),
        ("int8, worst token", None),
        ("int4, perplexity", 2.0),
        ("int4, mean KL", 0.03),
        ("int4, worst token", None),
    ]
    assert {row["peer"] for row in rows} == {"fp16"}
    figures = {row["case"]: row["ratio"] for row in rows}
    assert 0 < figures["int8, mean KL"] < figures["int4, mean KL"]
    assert 0 < figures["int8, worst token"] < figures["int4, worst token"]
    assert [row["case"] for row in rows[6:]] == [
        f"scatter {count} rows, 3 heads x 64, {codec}" for count in (8, 64) for codec in ("int8", "int4")
    ]


def test_what_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(run_here(capsys, "bench", "codec", "--piece", "1"), "--piece must be 2 or more, got 1")
    assert_refused(run_here(capsys, "bench", "codec", "--times", "0"), "--times must be 1 or more, got 0")
    monkeypatch.setattr(bench_codec_run, "GOLDENS", Path("/nowhere"))
    assert_refused(run_here(capsys, "bench", "codec", "model.gguf"), "name one by --text FILE")


def test_the_texts_of_the_tests_are_long_enough(demo_model: Path) -> None:
    """4,000 tokens and more beside the two scored texts."""
    texts = texts_of(None)
    with open_model(demo_model) as source:
        tokenizer = tokenizer_of(source)
    (book,) = texts["Alice, I and II"]
    assert isinstance(book, str)
    assert len(tokenizer.encode(book)) >= 4000
    assert len(texts["the two scored texts"]) == 2


def test_scatters_are_timed_beside_fp16() -> None:
    rows = scatter_rows(3)
    assert [(row.case, row.peer, row.theirs is None) for row in rows] == [
        (f"scatter {count} rows, 3 heads x 64, {codec}", "fp16", False)
        for count in (8, 64)
        for codec in ("int8", "int4")
    ]


@pytest.mark.parametrize(("codec", "error"), [(FP16, 1e-3), (INT8, 0.02), (INT4, 0.4)], ids=["fp16", "int8", "int4"])
def test_what_is_scattered_lies_in_the_codecs_blocks(codec: Codec, error: float) -> None:
    """Values of a normal distribution: half a step of fp16 below 4, of 127 levels, of 16 levels and then some."""
    geometry = KVGeometry(layers=1, kv_heads=3, head_dim=64)
    keys, values = np.random.default_rng(1).standard_normal((2, 20, 3, 64)).astype(np.float32)
    with closing(PagedKVCache.create(geometry, 1 << 18, INT4)) as cache:
        _scatter(cache, codec, keys, values)()
        blocks = [block for block, count in enumerate(cache.pool_of(codec).refs) if count]
        for found, given in zip(cache.read(0, blocks, 20, codec), (keys, values), strict=True):
            assert np.sqrt(np.mean((found - given) ** 2)) < error

"""`rockpage bench attention`: every side attends over what it says."""

from __future__ import annotations

import json
import platform
import sys

import numpy as np
import pytest

from hostcache import KVGeometry
from hostcache.codec import INT4, INT8, Codec
from hostcache.errors import UsageError
from tools import bench_attention_run, bench_attention_sweep
from tools.bench_attention_run import isas
from tools.bench_attention_sweep import Shape, Sweep

from .command_line import assert_refused, run_here

SMALL = KVGeometry(layers=2, kv_heads=2, head_dim=64), 6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that take no time."""
    monkeypatch.setattr(bench_attention_sweep, "SWEPT", 1 << 16)
    monkeypatch.setattr(bench_attention_run, "MODELS", (SMALL,))
    monkeypatch.setattr(bench_attention_run, "DECODE", ((2, 32), (1, 64)))
    monkeypatch.setattr(bench_attention_run, "THREADED", ((2, 48),))
    monkeypatch.setattr(bench_attention_run, "PREFILL_CONTEXT", 64)
    monkeypatch.setattr(bench_attention_run, "GROWING", SMALL)
    monkeypatch.setattr(bench_attention_run, "LONG", 128)
    monkeypatch.setattr(bench_attention_run, "MOST_SEQUENCES", 2)


@pytest.mark.usefixtures("small")
def test_every_target_has_its_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("torch", "onnxruntime"):
        monkeypatch.setitem(sys.modules, missing, None)  # as where it is not installed
    outcome = run_here(capsys, "bench", "attention", "--times", "2", "--isa", "plain", "--json")
    answer = json.loads(outcome.out)
    assert answer["note"].startswith("torch is not installed")
    assert "onnxruntime or onnx is not installed" in answer["note"]
    rows = [row for row in answer["rows"] if row["target"] is not None]
    heads = "2 heads x 64, plain"
    assert [(row["case"], row["peer"], row["target"], row["stretch"], row["better"]) for row in rows] == [
        *(
            (f"decode fp16, {size} tokens, {heads}", *more)
            for size in ("2 x 32", "1 x 64")
            for more in (
                ("torch", 3.0, 4.0, "higher"),
                ("read limit", 0.42, 0.55, "higher"),
                ("one piece", 1.1, 1.03, "lower"),
            )
        ),
        (f"decode int8, 1 x 64 tokens, {heads}", "fp16", 1.1, 1.4, "higher"),
        (f"decode int8, 1 x 64 tokens, {heads}", "read limit", 0.28, None, "higher"),
        (f"64 rows fp16, 1 x 64 tokens, {heads}", "torch", 1.5, 2.5, "higher"),
        (f"decode fp16, 2 x 48 tokens, {heads}, 2 threads", "1 thread", 1.5, 1.8, "higher"),
    ]
    for row in answer["rows"]:
        assert 0 < row["ours_s"] <= row["ours_median_s"]
        assert (row["peer_s"] is None) == row["peer"].startswith(("torch", "ONNX Runtime"))
    onnx = [row for row in answer["rows"] if row["peer"].startswith("ONNX")]
    assert [row["peer"] for row in onnx] == ["ONNX Runtime fp32", "ONNX Runtime fp16"] * 2


def test_times_are_positive_and_the_isa_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "bench", "attention", "--times", "0"), "--times must be 1 or more, got 0")
    assert_refused(run_here(capsys, "bench", "attention", "--isa", "mmx"), "invalid choice: 'mmx'")
    elsewhere = "avx2" if platform.machine() == "aarch64" else "neon"
    refused = run_here(capsys, "bench", "attention", "--isa", elsewhere)
    assert_refused(refused, f'isa "{elsewhere}" does not run on this machine')


def test_the_best_isa_is_measured_and_the_usual_one() -> None:
    best, *usual = isas(None)
    assert best != "plain" or not usual
    assert usual == (["avx2"] if best == "avx512" else [])
    assert isas("plain") == ["plain"]


@pytest.mark.parametrize(("codec", "nbytes"), [(INT8, 4 * 3 * (16 * 64 + 32)), (INT4, 4 * 3 * (16 * 32 + 64))])
def test_what_is_read_is_what_is_attended(codec: Codec, nbytes: int) -> None:
    """K and V of 2 heads of a layer, in 3 blocks of 16 tokens, with a scale of 2 bytes for 64 or 32 elements."""
    with Sweep(Shape(*SMALL, 1, 48, codec=codec), "plain") as sweep:
        assert sweep.layer_bytes == nbytes
        assert sweep.attend() > 0
        assert sweep.read() > 0
    with pytest.raises(UsageError, match="closed"):
        sweep.attend()


def test_all_sides_attend_over_the_same_tokens() -> None:
    """In one piece as in random blocks alike; V is the same everywhere, so is the result."""
    for contiguous in (False, True):
        with Sweep(Shape(*SMALL, 2, 48, rows=3), "plain", contiguous=contiguous) as sweep:
            sweep.attend()
        filler = np.frombuffer(b"\x24\x24", np.float16)[0]
        np.testing.assert_allclose(sweep.out, np.full((6, 6, 64), filler, np.float32), rtol=1e-6)

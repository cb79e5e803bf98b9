"""`rockpage bench gather`: what is timed does what it says, on both sides."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hostcache import KVGeometry, PagedKVCache
from hostcache.codec import INT4
from tools import bench_gather_run
from tools.bench_chart import lines
from tools.bench_gather_convert import copying, scattering
from tools.bench_gather_run import Growing, Launches, Shape

from .command_line import assert_refused, run_here

SMALL = KVGeometry(layers=2, kv_heads=2, head_dim=64)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that take no time."""
    monkeypatch.setattr(bench_gather_run, "SWEPT", 1 << 20)
    monkeypatch.setattr(bench_gather_run, "GATHERS", (Shape(SMALL, 2, 64), Shape(SMALL, 1, 64, run=4)))
    monkeypatch.setattr(bench_gather_run, "CODECS", (Shape(SMALL, 1, 64, codec=INT4),))
    monkeypatch.setattr(bench_gather_run, "APPENDS", (Shape(SMALL, 2, 50),))
    monkeypatch.setattr(bench_gather_run, "SMOLLM2", SMALL)
    monkeypatch.setattr(bench_gather_run, "REFERENCE", SMALL)
    monkeypatch.setattr(bench_gather_run, "GROWING", SMALL)
    monkeypatch.setattr(bench_gather_run, "CONTEXTS", (32, 64))
    monkeypatch.setattr(bench_gather_run, "SEQUENCES", (1, 2))
    monkeypatch.setattr(bench_gather_run, "EACH", 48)


@pytest.mark.usefixtures("small")
def test_every_shape_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "bench", "gather", "--times", "3", "--json")
    rows = json.loads(outcome.out)["rows"]
    assert [(row["case"], row["target"], row["stretch"], row["better"]) for row in rows] == [
        ("random blocks, 2 x 64 tokens, 2 heads x 64", 0.6, 0.75, "higher"),
        ("runs of 4 blocks, 1 x 64 tokens, 2 heads x 64", None, None, "higher"),
        ("random blocks, 1 x 64 tokens, 2 heads x 64, int4", None, None, "higher"),
        ("append a token, 2 x 50 tokens, 2 heads x 64", 4.0, 2.0, "lower"),
        *[
            (f"{what}, 256 tokens, 2 heads x 64", None, None, "higher")
            for what in ("write fp32 as fp16", "widen fp16 to fp32")
        ]
        * 2,
        *(
            (f"random blocks, {size} tokens, 2 heads x 64", None, None, "higher")
            for size in ("1 x 32", "1 x 64", "1 x 48", "2 x 48")
        ),
    ]
    for row in rows:
        assert row["peer"] == "memcpy"
        assert 0 < row["ours_s"] <= row["ours_median_s"]
        assert 0 < row["peer_s"] <= row["peer_median_s"]


@pytest.mark.usefixtures("small")
def test_who_watches_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    run_here(capsys, "bench", "gather", "--times", "1")
    assert terminal.getvalue().startswith("random blocks, 2 x 64 tokens, 2 heads x 64 ...\n")


def test_times_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "bench", "gather", "--times", "0"), "--times must be 1 or more, got 0")


def test_the_targets_are_for_half_a_megabyte_or_more() -> None:
    assert all(shape.layer_bytes >= 1 << 19 for shape in bench_gather_run.GATHERS)


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.usefixtures("small")
def test_launches_share_no_block_and_neighbours_come_in_runs(run: int) -> None:
    launches = Launches(Shape(SMALL, 2, 64, run))
    tables = launches.tables
    assert sorted(tables.ravel().tolist()) == list(range(tables.size))
    steps = np.diff(tables.reshape(-1, 4)[:, :run], axis=1)
    assert (steps == 1).all()
    assert tables.shape == (len(launches.plans()), 2, 4)


def test_an_append_and_the_limit_write_the_same_bytes() -> None:
    """Both have sequences of their own that grow alike; the marks of K are ours alone."""
    ours, limit = Growing(Shape(SMALL, 2, 50), steps=4), Growing(Shape(SMALL, 2, 50), steps=4)
    for side in (ours, limit):
        content = np.random.default_rng(5).integers(1, 100, len(side.cache.buffer), dtype=np.uint8)
        side.cache.buffer[:] = content
    limit.staged.buffer[:] = 0
    for _ in range(SMALL.layers):
        ours.append()
        limit.copy()
    written = np.flatnonzero(limit.staged.buffer)
    assert len(written) == SMALL.layers * 2 * 2 * 2 * 64 * 2  # layers, K and V, sequences, heads, bytes of a row
    np.testing.assert_array_equal(ours.staged.buffer[written], limit.staged.buffer[written])


def test_the_chart_shows_contexts_and_sequences() -> None:
    assert (min(bench_gather_run.CONTEXTS), max(bench_gather_run.CONTEXTS)) == (128, 8192)
    assert (min(bench_gather_run.SEQUENCES), max(bench_gather_run.SEQUENCES)) == (1, 64)


@pytest.mark.usefixtures("small")
def test_what_grows_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "growth.png"
    assert run_here(capsys, "bench", "gather", "--times", "1", "--chart", str(chart)).err == ""
    assert chart.read_bytes().startswith(b"\x89PNG")
    found = lines(bench_gather_run.rows(1))
    assert {
        axis: {line: [at for at, _ in points] for line, points in drawn.items()} for axis, drawn in found.items()
    } == {
        "context": {"gather": [32, 64], "memcpy, gather": [32, 64]},
        "sequences": {"gather": [1, 2], "memcpy, gather": [1, 2]},
    }


def test_what_is_converted_is_as_numpy_does_it() -> None:
    """All layers of the table are written in turn, by rounding to the nearest; the limit copies everything."""
    keys, values = both = np.random.default_rng(1).standard_normal((2, 20, 2, 64)).astype(np.float32)
    with closing(PagedKVCache.create(SMALL, 2 * SMALL.block_bytes)) as cache:
        scatter = scattering(cache, keys, values)
        scatter()
        scatter()
        for layer in range(SMALL.layers):
            found = cache.read(layer, [0, 1], 20)
            np.testing.assert_array_equal(found[0], keys.astype(np.float16))
            np.testing.assert_array_equal(found[1], values.astype(np.float16))
    target = np.zeros_like(both)
    copying(both, target)()
    np.testing.assert_array_equal(target, both)

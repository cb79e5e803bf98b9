"""The benchmark of staged copies runs, and finds that appending is the cheaper way."""

from __future__ import annotations

import re

import pytest

from tools.bench_residency import SHAPES, main, measure


def test_appending_a_token_to_a_thousand_is_cheaper_than_gathering_them() -> None:
    result = measure(sequences=2, tokens=1000, steps=8)
    keys, values, query, out = (4 * elements * 2 for elements in (1024 * 136, 1024 * 128, 8 * 136, 8 * 128))
    assert result.staged_bytes == keys + values + query + out
    assert result.grown < result.whole


def test_every_shape_gets_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench_residency.SHAPES", SHAPES[:2])
    assert main(["--steps", "3"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["sequences", "tokens", "staged", "whole", "appended", "ratio"]
    for line, (sequences, tokens) in zip(lines, SHAPES[:2], strict=True):
        assert re.fullmatch(rf" *{sequences} +{tokens} +[\d.]+ MiB +\d+ us +[\d.]+ us +[\d.]+", line)

"""`rockpage export`: what it says, and what it refuses. The vendor's compiler is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu.attention_manifest import AttentionManifest
from npu.rknn_manifest import read_manifest
from npu.rknn_toolkit import PYTHON_VARIABLE
from tests.npu.rknn_stand_in import StandInCompiler
from tests.npu.tiny import write_tiny_llama
from tests.tools.command_line import assert_refused, run_here


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two KV heads of 16 elements with two query heads each; the cache lies beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    return write_tiny_llama(tmp_path / "model.gguf")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StandInCompiler:
    compiler = StandInCompiler()
    monkeypatch.setattr("npu.rknn_toolkit.RknnToolkit", lambda python: compiler)
    return compiler


def test_attention_says_what_each_graph_became(
    model: Path, compiler: StandInCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", "attention", str(model), "--out", str(tmp_path / "out")]
    outcome = run_here(capsys, *arguments, "--buckets", "64,128", "--batches", "1,2")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["decode", "4", "4", "2"],  # 2 * 1 + 1 rows, to the next multiple of 4
        ["prefill16", "36", "2", "1"],
        ["prefill64", "132", "2", "1"],
    ]
    assert lines[4] == f"{tmp_path / 'out'}: for rk3588, by rknn-toolkit2 2.5.0"
    manifest = read_manifest(AttentionManifest, tmp_path / "out")
    assert (manifest.kv_heads, manifest.group, manifest.head_dim) == (2, 2, 16)
    assert compiler.jobs == ["decode", "prefill16", "prefill64"]
    run_here(capsys, *arguments, "--buckets", "64,128", "--batches", "1,2")
    assert len(compiler.jobs) == 3  # all found in the cache


def test_attention_answers_in_json(
    model: Path, compiler: StandInCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, "export", "attention", str(model), "--out", str(tmp_path / "out"), "--json")
    answer = json.loads(outcome.out)
    assert {name: answer[name] for name in ("folder", "toolkit", "target")} == {
        "folder": str(tmp_path / "out"),
        "toolkit": compiler.version,
        "target": "rk3588",
    }
    decode = answer["graphs"][0]
    assert (tmp_path / "out" / decode["file"]).stat().st_size == decode["bytes"]
    assert decode["launches"][:2] == [[1, 64], [1, 128]]
    assert decode["launches"][-1][0] == 16
    assert decode["internal_bytes"] == 32 * 1024  # sixteen sequences of two heads, one KiB each


def test_without_the_toolkit_the_way_to_it_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, "export", "attention", str(model), "--out", str(tmp_path / "out"))
    assert_refused(outcome, "rknn_requirements.txt", PYTHON_VARIABLE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--buckets=128,64", "ascending"),
        ("--buckets=66", "multiples of 4"),
        ("--buckets=64,8192", "8191"),
        ("--buckets=64,,128", "'64,,128' is not a list of positive numbers"),
        ("--batches=0", "'0' is not a list of positive numbers"),
        ("--batches=-1", "'-1' is not a list of positive numbers"),
    ],
)
def test_sizes_that_cannot_be(
    model: Path, compiler: StandInCompiler, capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    out = model.with_name("out")
    assert_refused(run_here(capsys, "export", "attention", str(model), "--out", str(out), option), words)
    assert compiler.jobs == []


def test_a_graph_that_does_not_fuse_is_refused(
    model: Path, compiler: StandInCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.operator = ("exMatMul", "NPU")
    outcome = run_here(capsys, "export", "attention", str(model), "--out", str(tmp_path / "out"))
    assert_refused(outcome, "exMatMul@NPU", "does not fuse")


def test_a_kind_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "export", "--out", "x"), "KIND")
    assert_refused(run_here(capsys, "export", "weights", "--out", "x"), "weights", "attention")

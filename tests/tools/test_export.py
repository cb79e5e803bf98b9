"""`rockpage export`: what it says, and what it refuses. The vendor's compiler is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu.attention_manifest import AttentionManifest
from npu.dense_manifest import DenseManifest
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
    assert_refused(outcome, "became exMatMul", "does not fuse")


def test_dense_says_what_it_takes_of_the_npu(
    model: Path, compiler: StandInCompiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = model.with_name("out")
    arguments = ["export", "dense", str(model), "--out", str(out)]
    outcome = run_here(capsys, *arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "3 segments in fp16, for 4, 16, 64 rows: 0.0 MiB of files",
        "0.0 MiB of the NPU's memory, of the 4.00 GiB it addresses",
        f"{out}: for rk3588, by rknn-toolkit2 2.5.0",
    ]
    assert read_manifest(DenseManifest, out).precision == "fp16"
    assert compiler.jobs == ["first", "middle-0", "last"]
    monkeypatch.setattr("npu.dense_manifest.DOMAIN_BYTES", 1000)
    outcome = run_here(capsys, *arguments)
    assert outcome.status == 1
    assert "MORE than the 0.0 MiB" in outcome.out


def test_dense_answers_in_json(model: Path, compiler: StandInCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    text = model.with_name("text")
    text.write_text("Oil the spindle. " * 20)
    out = model.with_name("out")
    arguments = ["--precision", "w8a8", "--rows", "32", "--calibration", str(text), "--json"]
    outcome = run_here(capsys, "export", "dense", str(model), "--out", str(out), *arguments)
    answer = json.loads(outcome.out)
    segments = answer.pop("segments")
    assert answer == {
        "folder": str(out),
        "toolkit": "2.5.0",
        "target": "rk3588",
        "precision": "w8a8",
        "rows": [32],
        "npu_bytes": sum(segment["npu_bytes"] for segment in segments),
        "domain_bytes": 1 << 32,
    }
    assert [segment["name"] for segment in segments] == ["first", "middle-0", "last"]
    assert compiler.seen[1].dataset[0][0].shape == (1, 64, 1, 32)


def test_dense_is_calibrated_by_the_demo_unless_told(
    model: Path, compiler: StandInCompiler, capsys: pytest.CaptureFixture[str]
) -> None:
    out = model.with_name("out")
    outcome = run_here(capsys, "export", "dense", str(model), "--out", str(out), "--precision", "w8a8")
    assert outcome.status == 0
    assert len(compiler.seen[0].dataset) >= 4 * 4  # the demo's text has 256 tokens at least


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("attention", "--rows=1"), "unrecognized arguments: --rows=1"),
        (("attention", "--precision=fp16"), "unrecognized arguments: --precision=fp16"),
        (("dense", "--buckets=64"), "unrecognized arguments: --buckets=64"),
        (("dense", "--calibration=text"), "--calibration goes with --precision w8a8"),
        (("dense", "--rows=16,1"), "ascending"),
        (("dense", "--rows=4,16", "--precision=w8a8"), "one number of rows"),
        (("dense", "--precision=w8a8", "--calibration=/no/text"), "cannot read /no/text"),
        (("dense", "--precision=w4a16"), "w4a16"),
    ],
)
def test_options_that_do_not_go_together(
    model: Path,
    compiler: StandInCompiler,
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, *options = arguments
    outcome = run_here(capsys, "export", kind, str(model), "--out", str(model.with_name("out")), *options)
    assert_refused(outcome, words)
    assert compiler.jobs == []


def test_a_kind_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "export", "--out", "x"), "KIND")
    assert_refused(run_here(capsys, "export", "weights", "--out", "x"), "weights", "attention")

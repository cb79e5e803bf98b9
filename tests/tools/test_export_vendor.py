"""`rockpage export` with the vendor's compiler, from a model file to folders that a board reads: `make test-vendor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu.attention_manifest import AttentionManifest
from npu.dense_manifest import DenseManifest
from npu.rknn_manifest import MANIFEST_FILE, read_manifest
from tests.npu.tiny import write_tiny_llama
from tests.tools.command_line import run_here

pytestmark = pytest.mark.vendor


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_models_attention(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    outcome = run_here(capsys, "export", "attention", str(demo_model), "--out", str(out), "--json")
    assert (outcome.status, outcome.err) == (0, "")
    graphs = json.loads(outcome.out)["graphs"]
    assert [graph["kind"] for graph in graphs] == ["decode", "prefill16", "prefill64"]
    assert all(graph["bytes"] < 8 << 20 for graph in graphs)
    assert [graph["launches"][-1] for graph in graphs] == [[16, 256], [1, 4096], [1, 4096]]
    manifest = read_manifest(AttentionManifest, out)
    assert (manifest.kv_heads, manifest.group, manifest.head_dim) == (3, 3, 64)
    assert [file.rows for file in manifest.files] == [4, 52, 196]  # tokens times three heads, and the canary's


@pytest.mark.parametrize("precision", ["fp16", "w8a8"])
def test_a_models_dense_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    model, out = write_tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "out"
    arguments = ["export", "dense", str(model), "--precision", precision, "--out", str(out), "--json"]
    outcome = run_here(capsys, *arguments)
    assert (outcome.status, outcome.err) == (0, "")
    answer = json.loads(outcome.out)
    manifest = read_manifest(DenseManifest, out)
    assert (answer["precision"], answer["npu_bytes"]) == (precision, manifest.npu_bytes)
    files = sum((out / segment["file"]).stat().st_size for segment in answer["segments"])
    assert 0 < files < answer["npu_bytes"] < answer["domain_bytes"] == 4 << 30
    written = json.loads((out / MANIFEST_FILE).read_text())
    assert written["npu"] == {"bytes": answer["npu_bytes"], "domain_bytes": 4 << 30}

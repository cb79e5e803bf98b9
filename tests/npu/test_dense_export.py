"""Export of dense segments: what is compiled how, what is refused, and what lies in the folder afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcache.errors import BadModelFile, DeviceError, UsageError
from npu.attention_manifest import AttentionManifest
from npu.dense_export import CALIBRATION_TOKENS, Calibration, dense_rows, export_dense
from npu.dense_graph import KEPT_FP16, DenseSegments
from npu.dense_manifest import DenseManifest, Port
from npu.huggingface import HuggingFaceFolder
from npu.model import ModelConfig
from npu.rknn_cache import CompileCache
from npu.rknn_manifest import MANIFEST_FILE, read_manifest
from tests.npu.rknn_stand_in import StandInCompiler
from tests.npu.small_folder import HIDDEN, LAYERS, VOCAB, write_small_folder

NAMES = ["first", "middle-0", "middle-1", "last"]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[HuggingFaceFolder, ModelConfig]]:
    with HuggingFaceFolder.open(write_small_folder(tmp_path / "model", "qwen2")) as source:
        yield source, ModelConfig.from_gguf(source)


def export(
    model: tuple[HuggingFaceFolder, ModelConfig], folder: Path, compiler: StandInCompiler | None = None, **options: Any
) -> DenseManifest:
    cache = CompileCache(folder / "cache")
    return export_dense(
        *model, folder / "out", compiler or StandInCompiler(), cache, model_sha256="of the model", **options
    )


def tokens(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return (np.arange(count, dtype=np.int32) * 7) % VOCAB


def test_fp16_takes_several_numbers_of_rows(model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path) -> None:
    compiler = StandInCompiler()
    manifest = export(model, tmp_path, compiler)
    assert compiler.jobs == NAMES
    for index, job in enumerate(compiler.seen):
        assert job.onnx == DenseSegments(*model).onnx(index)
        assert (job.dataset, job.kept_fp16) == ((), ())
    assert compiler.seen[1].shapes == tuple(((1, 64, 1, rows), (1, HIDDEN, 1, rows)) for rows in (4, 16, 64))
    assert read_manifest(DenseManifest, tmp_path / "out") == manifest
    assert (manifest.precision, manifest.rows, manifest.model_sha256) == ("fp16", (4, 16, 64), "of the model")
    assert [segment.name for segment in manifest.segments] == NAMES
    assert manifest.segments[0].inputs == (Port("residual", HIDDEN),)
    assert manifest.segments[3].outputs == (Port("logits", VOCAB),)
    # Each file says "compiled NAME"; the stand-in's shapes need one KiB.
    assert manifest.npu_bytes == sum(len(f"compiled {name}") + 1024 for name in NAMES)


def test_w8a8_is_calibrated_but_for_the_last_segment(
    model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path
) -> None:
    compiler = StandInCompiler()
    calibration = Calibration(*model, tokens(2 * CALIBRATION_TOKENS + 9))
    manifest = export(model, tmp_path, compiler, calibration=calibration)
    assert (manifest.precision, manifest.rows) == ("w8a8", (16,))
    *quantised, last = compiler.seen
    for job in quantised:
        assert job.kept_fp16 == KEPT_FP16
        assert len(job.dataset) == 2 * CALIBRATION_TOKENS / 16
        assert {tuple(array.shape for array in sample) for sample in job.dataset} == {job.shapes[0]}
        assert len(job.shapes) == 1
    assert (last.dataset, last.kept_fp16, len(last.shapes)) == ((), (), 1)
    embedding = DenseSegments(*model).tensor("token_embd.weight")
    np.testing.assert_array_equal(quantised[0].dataset[1][0][0, :, 0], embedding[tokens(32)[16:]].T)
    assert read_manifest(DenseManifest, tmp_path / "out") == manifest


def test_another_text_is_another_compilation(model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path) -> None:
    compiler = StandInCompiler()
    for text in (tokens(64), tokens(64), tokens(65)[1:]):
        export(model, tmp_path, compiler, calibration=Calibration(*model, text))
    assert compiler.jobs == [*NAMES, *NAMES[:-1]]  # the last segment is not calibrated


def test_rows_by_default_and_by_choice() -> None:
    assert dense_rows(None, int8=False) == (4, 16, 64)
    assert dense_rows(None, int8=True) == (16,)
    assert dense_rows((8, 32), int8=False) == (8, 32)
    assert dense_rows((64,), int8=True) == (64,)


@pytest.mark.parametrize(
    ("rows", "int8", "reason"),
    [
        ((16, 1), False, "ascending"),
        ((4, 4), False, "ascending"),
        ((1, 16), False, "ascending, from 2 on"),
        ((4, 16), True, "one number of rows"),
        ((48,), True, "a divisor of 64"),
        ((128,), True, "a divisor of 64"),
    ],
)
def test_rows_that_cannot_be(rows: tuple[int, ...], int8: bool, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        dense_rows(rows, int8=int8)


def test_a_text_too_short_to_calibrate_by(model: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    with pytest.raises(UsageError, match="63 tokens is too short to calibrate by: give 64 at least"):
        Calibration(*model, tokens(63))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (StandInCompiler(operator=("Gather", "CPU")), r"first with .* has Gather on the CPU"),
        (StandInCompiler(warning="W RKNN: [0:0] it will fallback to CPU\n"), "first: the compiler complains: it will"),
        (StandInCompiler(skip=1), r"first: the compiler left out the shapes \[\(\(1, 32, 1, 4\),\)\]"),
    ],
)
def test_anything_on_the_cpu_is_refused(
    model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path, compiler: StandInCompiler, reason: str
) -> None:
    with pytest.raises(DeviceError, match=reason):
        export(model, tmp_path, compiler)
    assert compiler.jobs == ["first"]


def test_a_folder_of_attention_graphs_is_kept(model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST_FILE).write_text('{"format": 1, "holds": "attention"}')
    compiler = StandInCompiler()
    with pytest.raises(UsageError, match="holds 'attention' graphs already"):
        export(model, tmp_path, compiler)
    assert compiler.jobs == []
    export(model, tmp_path / "another")
    with pytest.raises(UsageError, match="is of 'dense' graphs, not attention"):
        read_manifest(AttentionManifest, tmp_path / "another" / "out")


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("rows",), [1, 64, 16], "rows are .*, not ascending"),
        (("rows",), [], "not ascending"),
        (("rows",), [1, 16, 32], "first does not take"),
        (("target",), "rk3576", "graphs for rk3576"),
        (("segments", 1, "name"), "middle-7", "the segments are not first, middle-0, middle-1, last"),
        (("segments", 2, "inputs", 0, "channels"), 65, "middle-1 does not take"),
        (("segments", 2, "rknn", "sha256"), "", "the manifest says ;"),
        (("precision",), 8, "precision is 8, not of type str"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path, path: tuple[Any, ...], value: Any, reason: str
) -> None:
    export(model, tmp_path)
    manifest = tmp_path / "out" / MANIFEST_FILE
    content = place = json.loads(manifest.read_text())
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    manifest.write_text(json.dumps(content))
    with pytest.raises(BadModelFile, match=reason):
        read_manifest(DenseManifest, tmp_path / "out")


def test_segments_are_told_before_they_are_compiled(
    model: tuple[HuggingFaceFolder, ModelConfig], tmp_path: Path
) -> None:
    told: list[str] = []
    export(model, tmp_path, report=told.append)
    assert told == NAMES
    assert len(told) == LAYERS + 1

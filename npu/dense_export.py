"""Compiles a model's dense parts for the NPU, in fp16 or mostly int8, and refuses what would run on the CPU there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError

from .dense_graph import KEPT_FP16, DenseSegments, as_channels
from .dense_manifest import DenseManifest, Port, SegmentFile
from .dense_probe import PROBE_ROWS
from .dense_reference import ReferenceRunner, record
from .model import ModelConfig
from .rknn_cache import CompileCache, Compiled, Compiler, require_on_npu
from .rknn_manifest import GraphFile, claim_folder, write_manifest
from .rknn_toolkit import CompileJob
from .source import ModelSource

__all__ = ["CALIBRATION_TOKENS", "Calibration", "dense_rows", "export_dense"]

_ROWS = (4, 16, 64)  # a token or three, those of more sessions, a chunk of a prompt: one row is the launch's proof
_INT8_ROWS = (16,)  # take 5 % more of the compiler's cycles than 1 (SmolLM2)

CALIBRATION_TOKENS = 64
"""Tokens of a calibration text's piece: each begins at position 0, so that what first tokens do is in it."""


def dense_rows(rows: tuple[int, ...] | None, *, int8: bool) -> tuple[int, ...]:
    """Numbers of rows to compile segments for.

    Args:
        rows: ascending, the row that `npu.dense_probe` proves a launch by included; None for 4, 16 and 64, and for
            int8, which can have one number only, 16.
        int8: whether they are for int8.

    Raises:
        UsageError: they are not ascending, or less than 2, or int8 is to have several, or one that does not divide
            `CALIBRATION_TOKENS`.
    """
    rows = rows or (_INT8_ROWS if int8 else _ROWS)
    if list(rows) != sorted(set(rows)) or rows[0] <= PROBE_ROWS:
        raise UsageError(
            f"numbers of rows must be ascending, from {PROBE_ROWS + 1} on: a token's and that of a launch's proof; "
            f"got {rows}",
            rows=rows,
        )
    if int8 and (len(rows) > 1 or CALIBRATION_TOKENS % rows[0]):
        raise UsageError(
            f"int8 segments take one number of rows, a divisor of {CALIBRATION_TOKENS}, got {rows}: "
            "rknn-toolkit2 keeps values in fp16 for one set of shapes only",
            rows=rows,
        )
    return rows


class Calibration:
    """What values int8 must be able to hold: those of a float32 run over pieces of a text.

    Args:
        source: the open model.
        config: its dimensions.
        tokens: int32; a remainder of less than `CALIBRATION_TOKENS` is left out.

    Raises:
        UsageError: fewer than `CALIBRATION_TOKENS` tokens.
        MissingExtra: onnx or onnxruntime is not installed.
    """

    def __init__(self, source: ModelSource, config: ModelConfig, tokens: NDArray[np.int32]) -> None:
        pieces = len(tokens) // CALIBRATION_TOKENS
        if not pieces:
            raise UsageError(
                f"a text of {len(tokens)} tokens is too short to calibrate by: give {CALIBRATION_TOKENS} at least, "
                "better some hundreds",
                tokens=len(tokens),
            )
        used = tokens[: pieces * CALIBRATION_TOKENS].reshape(pieces, CALIBRATION_TOKENS)
        self._reference: ReferenceRunner = record(source, config, used)

    def job(self, segments: DenseSegments, index: int, rows: int) -> CompileJob:
        """How to compile a segment in int8 for one number of rows, a divisor of `CALIBRATION_TOKENS`."""
        dataset = tuple(
            tuple(as_channels(x[start : start + rows]) for x in inputs)
            for inputs in self._reference.inputs[index]
            for start in range(0, CALIBRATION_TOKENS, rows)
        )
        graph = segments.onnx(index, smoothing=self._reference.smoothing(index))
        return CompileJob(segments.name(index), graph, _shapes(segments, index, (rows,)), dataset, KEPT_FP16)


def export_dense(
    source: ModelSource,
    config: ModelConfig,
    folder: Path,
    compiler: Compiler,
    cache: CompileCache,
    *,
    model_sha256: str,
    rows: tuple[int, ...] | None = None,
    calibration: Calibration | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> DenseManifest:
    """Compile every segment into a folder and write its manifest.

    Args:
        source: the open model.
        config: its dimensions.
        folder: made if missing; an older export of dense parts in it is replaced.
        compiler: the vendor's.
        cache: where compiled graphs are kept.
        model_sha256: of the model.
        rows: see `dense_rows`.
        calibration: for int8; None compiles in fp16.
        report: told the name of each segment before it is compiled.

    Raises:
        UsageError: the rows cannot be had, or the folder holds an export of another kind.
        MissingExtra: the `onnx` package is not installed.
        DeviceError: the compiler failed, or an operator would run on the CPU.
        OSError: the folder or the cache cannot be written.
    """
    rows = dense_rows(rows, int8=calibration is not None)
    claim_folder(folder, DenseManifest.holds)
    segments = DenseSegments(source, config)
    files, sources = [], {}
    for index in range(len(segments)):
        report(segments.name(index))
        if calibration is not None and index < config.layers:  # the head decides which token: it stays in fp16
            job = calibration.job(segments, index, rows[0])
        else:
            job = CompileJob(segments.name(index), segments.onnx(index), _shapes(segments, index, rows))
        compiled = cache.compile(compiler, job)
        require_on_npu(job, compiled)
        files.append(_entry(segments, index, job, compiled))
        sources[files[-1].rknn.file] = compiled.path
    precision = "fp16" if calibration is None else "w8a8"
    manifest = DenseManifest(compiler.version, model_sha256, precision, rows, tuple(files))
    write_manifest(folder, manifest, sources)
    return manifest


def _shapes(segments: DenseSegments, index: int, rows: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple((1, channels, 1, count) for channels in segments.inputs(index).values()) for count in rows)


def _entry(segments: DenseSegments, index: int, job: CompileJob, compiled: Compiled) -> SegmentFile:
    tables = {table.shapes: table for table in compiled.tables}
    return SegmentFile(
        segments.name(index),
        tuple(Port(*port) for port in segments.inputs(index).items()),
        tuple(Port(*port) for port in segments.outputs(index).items()),
        GraphFile.of(segments.name(index), compiled),
        tuple(tables[shapes] for shapes in job.shapes),
    )

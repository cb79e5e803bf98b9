"""Exported dense segments that a stand-in for the vendor's runtime can run: the graph itself, by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped] # it ships no types
from numpy.typing import NDArray

from npu.dense_export import Calibration, export_dense
from npu.model import ModelConfig
from npu.rknn_cache import CompileCache
from npu.rknn_toolkit import CompileJob
from npu.source import open_model
from npu.weights_cache import model_digest
from tests.npu.rknn_stand_in import StandInCompiler

__all__ = ["StubSegment", "export_stub_segments"]

_KIND = b"rockpage-segment"


@dataclass(frozen=True)
class StubSegment:
    """What a file says.

    Attributes:
        rows: numbers of rows it was compiled for.
        onnx: the graph, in fp16.
    """

    rows: tuple[int, ...]
    onnx: bytes

    @staticmethod
    def is_in(content: bytes) -> bool:
        """Whether a file is of this kind."""
        return content.startswith(_KIND)

    @classmethod
    def read(cls, content: bytes) -> StubSegment:
        """From a file's content."""
        first, onnx = content.split(b"\n", 1)
        return cls(tuple(map(int, first.split()[1:])), onnx)

    def write(self) -> bytes:
        """The file's content."""
        return b"%s %s\n%s" % (_KIND, " ".join(map(str, self.rows)).encode(), self.onnx)

    def session(self) -> Any:
        """What runs it: on x86-64 in float32, between values that are rounded to fp16."""
        return onnxruntime.InferenceSession(self.onnx, providers=["CPUExecutionProvider"])


class _SegmentCompiler(StandInCompiler):
    def compile(self, job: CompileJob, out: Path) -> str:
        log = super().compile(job, out)
        out.write_bytes(StubSegment(tuple(shapes[0][3] for shapes in job.shapes), job.onnx).write())
        return log


def export_stub_segments(
    folder: Path,
    model: Path,
    *,
    rows: Sequence[int] | None = None,
    calibrated_by: NDArray[np.int32] | None = None,
    version: str = "2.5.0",
) -> Path:
    """What `rockpage export dense` would write, into `folder / "dense"`; that folder."""
    with open_model(model) as source:
        config = ModelConfig.from_gguf(source)
        export_dense(
            source,
            config,
            folder / "dense",
            _SegmentCompiler(version),
            CompileCache(folder / "cache"),
            model_sha256=model_digest(source, folder / "cache"),
            rows=None if rows is None else tuple(rows),
            calibration=None if calibrated_by is None else Calibration(source, config, calibrated_by),
        )
    return folder / "dense"

"""What `rockpage export dense` writes of a model's segments, and a runtime reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .rknn_log import LayerTable
from .rknn_manifest import DOMAIN_BYTES, GraphFile
from .rknn_toolkit import TARGET

__all__ = ["DOMAIN_BYTES", "DenseManifest", "Port", "SegmentFile"]


@dataclass(frozen=True)
class Port:
    """An input or output of a segment, `[1, channels, 1, rows]`."""

    name: str
    channels: int


@dataclass(frozen=True)
class SegmentFile:
    """One compiled segment.

    Attributes:
        name: see `npu.dense_graph`.
        inputs: in the graph's order.
        outputs: likewise.
        rknn: the file.
        tables: what each number of rows was compiled to, in the manifest's order.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    rknn: GraphFile
    tables: tuple[LayerTable, ...]

    @property
    def npu_bytes(self) -> int:
        """NPU memory of one core that runs it: weights, commands, and what its largest shape needs in between."""
        return self.rknn.nbytes + max(table.internal_bytes for table in self.tables)


@dataclass(frozen=True)
class DenseManifest:
    """The dense parts of one model.

    Attributes:
        toolkit: version of rknn-toolkit2.
        model_sha256: of the model, as `npu.weights_cache.model_digest` has it.
        precision: `fp16`, or `w8a8`: int8 but for the values in `npu.dense_graph.KEPT_FP16` and the last segment.
        rows: numbers of rows that every segment takes, ascending.
        segments: in the order they run, attention between each two.
        target: the chip.
    """

    holds: ClassVar[str] = "dense"

    toolkit: str
    model_sha256: str
    precision: str
    rows: tuple[int, ...]
    segments: tuple[SegmentFile, ...]
    target: str = TARGET

    @property
    def npu_bytes(self) -> int:
        """NPU memory of one core that holds all segments."""
        return sum(segment.npu_bytes for segment in self.segments)

    def graph_files(self) -> Iterator[GraphFile]:
        """Every .rknn file."""
        return (segment.rknn for segment in self.segments)

    def check(self) -> None:
        """Hold the fields against each other.

        Raises:
            ValueError: shapes do not follow from rows and ports, or segments do not follow each other.
        """
        if self.target != TARGET:
            raise ValueError(f"graphs for {self.target} do not run on {TARGET}")
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"rows are {self.rows}, not ascending")
        names = ("first", *(f"middle-{layer}" for layer in range(len(self.segments) - 2)), "last")
        if tuple(segment.name for segment in self.segments) != names:
            raise ValueError(f"the segments are not {', '.join(names)}")
        for segment in self.segments:
            shapes = [tuple((1, port.channels, 1, rows) for port in segment.inputs) for rows in self.rows]
            if [table.shapes for table in segment.tables] != shapes:
                raise ValueError(f"{segment.name} does not take {shapes}")

"""What `rockpage export attention` writes of its graphs, and a runtime reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hostcache.errors import StagingError
from staging import MASKED

from .attention_graph import AttentionGraph
from .canary import CANARY_SCORE, CANARY_TOKENS, SCORE_CHANNEL, SHIFT_CHANNEL
from .launch import TILES
from .rknn_log import LayerTable
from .rknn_manifest import GraphFile
from .rknn_toolkit import TARGET

__all__ = ["AttentionFile", "AttentionManifest", "CompiledLaunch", "Marks"]


@dataclass(frozen=True)
class CompiledLaunch:
    """One set of shapes of an attention graph.

    Attributes:
        batch: sequences.
        tokens: the bucket, with the canary's slots.
        table: what it was compiled to; its shapes are those the runtime must be given, and no others.
    """

    batch: int
    tokens: int
    table: LayerTable


@dataclass(frozen=True)
class AttentionFile:
    """One compiled attention graph.

    Attributes:
        kind: `decode`, `prefill16` and so on.
        tile: query tokens of each sequence.
        rows: query rows of each KV head, with the canary's and padding.
        inputs: names, in the graph's order.
        rknn: the file.
        launches: what it can run.
    """

    kind: str
    tile: int
    rows: int
    inputs: tuple[str, ...]
    rknn: GraphFile
    launches: tuple[CompiledLaunch, ...]

    @property
    def internal_bytes(self) -> int:
        """NPU memory of the largest launch: operands, scores, and one head's K and V in another order."""
        return max(launch.table.internal_bytes for launch in self.launches)


@dataclass(frozen=True)
class Marks:
    """Constants that the host writes into operands and that graphs are used with; see `npu.canary`.

    Attributes:
        masked: added to the score of a token that is not seen.
        mask_channel: channel of K, behind the head's own, that carries a decode batch's mask.
        canary_score: score of the canary's tokens, but for shifts that each launch draws anew.
        canary_channel: channel of K, behind the head's own, that carries it.
        shift_channel: channel of K, likewise, that carries K's shift; the next one is for the query's.
        canary_tokens: slots at the end of a bucket that hold no token.
    """

    masked: float = float(MASKED)
    mask_channel: int = 0
    canary_score: float = float(CANARY_SCORE)
    canary_channel: int = SCORE_CHANNEL
    shift_channel: int = SHIFT_CHANNEL
    canary_tokens: int = CANARY_TOKENS


@dataclass(frozen=True)
class AttentionManifest:
    """Attention graphs of one geometry.

    Attributes:
        toolkit: version of rknn-toolkit2.
        target: the chip.
        dtype: of every operand.
        axes: of q, K and V as compiled; `length` is rows or tokens. The mask is `[1, tokens, 1, rows]`.
        kv_heads: of the model.
        group: query heads per KV head.
        head_dim: elements per head.
        marks: what the host writes into operands.
        files: one for each kind.
    """

    holds: ClassVar[str] = "attention"

    toolkit: str
    kv_heads: int
    group: int
    head_dim: int
    files: tuple[AttentionFile, ...]
    marks: Marks = Marks()
    target: str = TARGET
    dtype: str = "float16"
    axes: tuple[str, ...] = ("heads", "channels", "1", "length")

    def graph(self, tile: int) -> AttentionGraph:
        """The graph of a tile."""
        return AttentionGraph(self.kv_heads, self.group, self.head_dim, tile)

    @property
    def npu_bytes(self) -> int:
        """NPU memory of one core that holds all graphs."""
        return sum(file.rknn.nbytes + file.internal_bytes for file in self.files)

    def graph_files(self) -> Iterator[GraphFile]:
        """Every .rknn file."""
        return (file.rknn for file in self.files)

    def check(self) -> None:
        """Hold the fields against what this version of rockpage stages.

        Raises:
            ValueError: the graphs take other operands than rockpage writes.
        """
        if (self.marks, self.target, self.dtype) != (Marks(), TARGET, "float16"):
            raise ValueError(f"graphs for {self.target}, {self.dtype}, with {self.marks} are not what rockpage stages")
        if sorted(file.tile for file in self.files) != [1, *TILES]:
            raise ValueError(
                f"it has graphs of {', '.join(file.kind for file in self.files) or 'nothing'}, and not one of each kind"
            )
        for file in self.files:
            graph = self.graph(file.tile)
            if (file.kind, file.rows) != (graph.kind, graph.rows):
                raise ValueError(f"{file.kind} with {file.rows} rows is not the graph {graph.kind} with {graph.rows}")
            for launch in file.launches:
                try:
                    shapes = graph.input_shapes(launch.batch, launch.tokens)
                except StagingError as error:
                    raise ValueError(str(error)) from error
                if (file.inputs, launch.table.shapes) != (tuple(shapes), tuple(shapes.values())):
                    raise ValueError(
                        f"{file.kind} of {launch.batch} x {launch.tokens} takes {launch.table.shapes}, not {shapes}"
                    )

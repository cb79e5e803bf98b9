"""The attention graphs that a board runs, as ONNX, in the one form that the vendor's compiler makes one operator of.

rknn-toolkit2 2.5.0 fuses products, mask and softmax if the leading axis is that of the heads and channels come second:
q `[heads, channels, 1, rows]`, K and V `[heads, channels, 1, tokens]`. The transpositions in the graph then fold away.
With a further leading axis, channels last, or a mask of three axes, it makes several operators, some on the CPU.

A model's geometry has one graph for decoding, without a mask input: K carries the mask, see `staging.StagingLayout`.
Sequences of different lengths share a launch. Each tile of a prompt's tokens has a graph of its own, where every row
sees another number of tokens, so that the mask is an input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DimensionTooLarge, MissingExtra, UsageError
from staging import StagingLayout

from .canary import CANARY_ROWS
from .device import MAX_DIMENSION, ROW_MULTIPLE
from .launch import TILES

__all__ = ["AttentionGraph", "attention_graphs"]

_Size = TypeVar("_Size", int, str)

_OPSET = 13  # the oldest whose Softmax takes one axis; what rknn-toolkit2 2.5.0 knows ends at 19
_IR_VERSION = 8


@dataclass(frozen=True)
class AttentionGraph:
    """One graph of a model's geometry; batch and bucket are free dimensions.

    `out = softmax(q @ k^T + mask) @ v` for each head; q is scaled already.

    Attributes:
        kv_heads: of the model.
        group: query heads per KV head.
        head_dim: elements per head.
        tile: query tokens of each sequence: 1 decodes.
    """

    kv_heads: int
    group: int
    head_dim: int
    tile: int

    @property
    def kind(self) -> str:
        """`decode`, or `prefill16` for tiles of 16 tokens."""
        return "decode" if self.tile == 1 else f"prefill{self.tile}"

    @property
    def masked(self) -> bool:
        """Whether the mask is an input."""
        return self.tile > 1

    @property
    def rows(self) -> int:
        """Query rows of each KV head: those of the tile, the canary's, and padding."""
        return -(-(self.tile * self.group + CANARY_ROWS) // ROW_MULTIPLE) * ROW_MULTIPLE

    def layout(self, batch: int, tokens: int) -> StagingLayout:
        """Where the operands of a launch lie.

        Raises:
            UsageError: the graph has no such launch: a tile is one sequence's, and sizes are positive.
            DimensionTooLarge: a dimension is beyond what the NPU's registers hold.
        """
        if batch < 1 or tokens < 1 or (self.masked and batch > 1):
            raise UsageError(
                f"a {self.kind} graph has no launch of {batch} sequences of {tokens} tokens", batch=batch, tokens=tokens
            )
        layout = StagingLayout(
            batch, self.kv_heads, tokens, self.rows, self.head_dim, mask_rows=self.rows if self.masked else 0
        )
        largest = max(layout.heads, tokens, self.rows, layout.key_channels)
        if largest > MAX_DIMENSION:
            raise DimensionTooLarge(
                f"a launch of {batch} sequences of {tokens} tokens has a dimension of {largest}, the NPU's registers "
                f"end at {MAX_DIMENSION}: use a smaller batch or bucket",
                dimension=largest,
                limit=MAX_DIMENSION,
            )
        return layout

    def input_shapes(self, batch: int, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the graph's inputs by name, in its order, channels second.

        Raises:
            UsageError: as for `layout`, and DimensionTooLarge likewise.
        """
        return self._shapes(self.layout(batch, tokens).heads, tokens)

    def inputs(
        self, q: NDArray[np.float16], k: NDArray[np.float16], v: NDArray[np.float16], mask: NDArray[np.float16] | None
    ) -> list[NDArray[np.float16]]:
        """A launch's operands, token by token as they are staged, as the graph's inputs: views.

        Args:
            q: `[heads, rows, channels]`.
            k: `[heads, tokens, channels]`.
            v: `[heads, tokens, head_dim]`.
            mask: `[1, rows, tokens]`; None where K carries it.
        """
        operands = [operand.swapaxes(1, 2)[:, :, np.newaxis] for operand in (q, k, v)]
        return operands if mask is None else [*operands, mask.swapaxes(1, 2)[:, :, np.newaxis]]

    def onnx(self) -> bytes:
        """The graph, serialised; the same bytes each time.

        Raises:
            MissingExtra: the `onnx` package is not installed.
        """
        try:
            import onnx  # noqa: PLC0415 - comes with an extra
        except ModuleNotFoundError as error:
            raise MissingExtra("building attention graphs needs onnx: pip install 'rockpage[model]'") from error
        node, fp16 = onnx.helper.make_node, onnx.TensorProto.FLOAT16
        mask = [
            node("Transpose", ["mask"], ["mask_columns"], perm=[0, 2, 3, 1]),
            node("Add", ["products", "mask_columns"], ["scores"]),
        ]
        nodes = [
            node("Transpose", ["q"], ["q_rows"], perm=[0, 2, 3, 1]),
            node("Transpose", ["k"], ["k_columns"], perm=[0, 2, 1, 3]),
            node("Transpose", ["v"], ["v_rows"], perm=[0, 2, 3, 1]),
            node("MatMul", ["q_rows", "k_columns"], ["products"]),
            *(mask if self.masked else []),
            node("Softmax", ["scores" if self.masked else "products"], ["weights"], axis=-1),
            node("MatMul", ["weights", "v_rows"], ["result"]),
            node("Transpose", ["result"], ["out"], perm=[0, 3, 1, 2]),
        ]
        shapes = self._shapes("heads", "tokens")  # free dimensions have names
        values = [onnx.helper.make_tensor_value_info(name, fp16, shape) for name, shape in shapes.items()]
        out = onnx.helper.make_tensor_value_info("out", fp16, ["heads", self.head_dim, 1, self.rows])
        graph = onnx.helper.make_graph(nodes, self.kind, values, [out])
        model = onnx.helper.make_model(
            graph,
            opset_imports=[onnx.helper.make_opsetid("", _OPSET)],
            ir_version=_IR_VERSION,
            producer_name="rockpage",
        )
        serialised: bytes = model.SerializeToString(deterministic=True)
        return serialised

    def _shapes(self, heads: _Size, tokens: _Size) -> dict[str, tuple[int | _Size, ...]]:
        channels = self.layout(1, ROW_MULTIPLE).key_channels
        shapes: dict[str, tuple[int | _Size, ...]] = {
            "q": (heads, channels, 1, self.rows),
            "k": (heads, channels, 1, tokens),
            "v": (heads, self.head_dim, 1, tokens),
        }
        return shapes | ({"mask": (1, tokens, 1, self.rows)} if self.masked else {})


def attention_graphs(kv_heads: int, heads: int, head_dim: int) -> tuple[AttentionGraph, ...]:
    """All graphs of a geometry: for decoding, and for each tile of a prompt.

    Args:
        kv_heads: KV heads of a layer.
        heads: query heads, a multiple.
        head_dim: elements per head, a multiple of 8.

    Raises:
        UsageError: the numbers do not go together.
    """
    if min(kv_heads, heads, head_dim) < 1 or heads % kv_heads:
        raise UsageError(
            f"{heads} query heads of {head_dim} elements over {kv_heads} KV heads: they must be a multiple",
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
    return tuple(AttentionGraph(kv_heads, heads // kv_heads, head_dim, tile) for tile in (1, *TILES))

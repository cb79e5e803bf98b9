"""A decoder's dense parts as ONNX graphs for the NPU: everything but embedding, rotation and attention.

Cut where attention cuts, as in `npu.graphs`: L layers become L + 1 segments. What differs is the form. Values are
`[1, channels, 1, rows]`, every product is a convolution of size 1, and the rows lie along the width. So rknn-toolkit2
2.5.0 compiles a layer to 10 operators, all on the NPU, where `[rows, channels]` gives 15 to 26: a reshape and a
transposition around each. It keeps one copy of the weights for all numbers of rows.

Queries and keys leave before they are rotated (and, in families that do so, before their heads are normed). That would
be 18 operators a layer on the NPU; the host copies them anyway, see `npu.dense_decoder`.

==================  ===================  ======================================================
segment             inputs               outputs
==================  ===================  ======================================================
`first`             residual             q, k, v of layer 0
`middle-l`, l<L-1   attended, residual   residual behind layer l, then q, k, v of layer l + 1
`last`              attended, residual   logits
==================  ===================  ======================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import MissingExtra

from .ggml import dequantize
from .model import ModelConfig
from .source import ModelSource

if TYPE_CHECKING:
    import onnx

__all__ = ["KEPT_FP16", "DenseSegments", "Smoothing", "as_channels", "as_rows"]

_OPSET = 13
_IR_VERSION = 8

Smoothing = Mapping[str, NDArray[np.float32]]
"""By what values inside a segment are divided, float32 `[channels]` each, by name: any of `DenseSegments.readers`.

int8 has one scale for all channels of a value, so that a large one costs all others their precision. The matrix that
reads the value makes up for it: weights have a scale per output and take the spread better (SmoothQuant, arXiv
2211.10438).
"""

KEPT_FP16 = ("middle", "mlp_normed", "swiglu", "down", "residual_out", "normed")
"""Values that int8 cannot hold: the residual stream, where single tokens reach 25,000 beside others of 1 (SmolLM2),
what its norms make of it, the gated product, and the projection that reads that product."""


def as_channels(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[rows, channels]` as a segment takes it, `[1, channels, 1, rows]`: a new array."""
    return np.ascontiguousarray(rows.T[None, :, None])


def as_rows(channels: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[1, channels, 1, rows]` as `[rows, channels]`: a new array."""
    return np.ascontiguousarray(channels[0, :, 0].T)


class DenseSegments:
    """The segments of one open model, built one at a time: each holds its weights.

    Args:
        source: the open model.
        config: its dimensions.

    Raises:
        MissingExtra: the `onnx` package is not installed.
    """

    def __init__(self, source: ModelSource, config: ModelConfig) -> None:
        try:
            import onnx  # noqa: PLC0415 - comes with an extra
        except ModuleNotFoundError as error:
            raise MissingExtra("building dense graphs needs onnx: pip install 'rockpage[model]'") from error
        self._onnx = onnx
        self._source = source
        self._config = config

    def __len__(self) -> int:
        """One more than the model has layers."""
        return self._config.layers + 1

    def name(self, index: int) -> str:
        """`first`, `middle-0` and so on, `last`."""
        return "first" if index == 0 else "last" if index == self._config.layers else f"middle-{index - 1}"

    def inputs(self, index: int) -> dict[str, int]:
        """Channels of a segment's inputs by name, in the graph's order."""
        residual = {"residual": self._config.hidden}
        return residual if index == 0 else {"attended": self._config.heads * self._config.head_dim, **residual}

    def outputs(self, index: int) -> dict[str, int]:
        """Channels of a segment's outputs by name, in the graph's order."""
        if index == self._config.layers:
            return {"logits": self._config.vocab}
        q_width, kv_width = (heads * self._config.head_dim for heads in (self._config.heads, self._config.kv_heads))
        residual = {"residual_out": self._config.hidden} if index else {}
        return {**residual, "q": q_width, "k": kv_width, "v": kv_width}

    def readers(self, index: int) -> dict[str, tuple[str, ...]]:
        """Values inside a segment that can be smoothed, each with the tensors that read it."""
        before, behind = f"blk.{index - 1}.ffn", f"blk.{index}.attn"
        mlp = {"mlp_normed": (f"{before}_gate.weight", f"{before}_up.weight"), "swiglu": (f"{before}_down.weight",)}
        attention = {"normed": tuple(f"{behind}_{name}.weight" for name in "qkv")}
        return (mlp if index else {}) | (attention if index < self._config.layers else {})

    def onnx(
        self,
        index: int,
        dtype: type[np.float16 | np.float32] = np.float16,
        *,
        smoothing: Smoothing | None = None,
        probed: bool = False,
    ) -> bytes:
        """A segment, serialised; the number of rows is a free dimension.

        Args:
            index: which, from 0.
            dtype: of values and weights. Weights are rounded to fp16 in either case.
            smoothing: of its inner values; none by default.
            probed: the values that can be smoothed are outputs too, behind the others.
        """
        graph = _Graph(self._onnx, dtype, self._config.eps)
        inputs, outputs = self.inputs(index), self.outputs(index)
        residual = self._after_attention(graph, index - 1, smoothing or {}) if index else "residual"
        if index < self._config.layers:
            self._before_attention(graph, index, residual, smoothing or {})
        else:
            normed = graph.rms_norm(residual, self.tensor("output_norm.weight")[0], "normed")
            graph.linear(normed, self.tensor(self._config.head_tensor), "logits")
        if probed:
            outputs |= {name: self.tensor(readers[0]).shape[1] for name, readers in self.readers(index).items()}
        self._source.release_pages()
        return graph.serialise(self.name(index), inputs, outputs)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor of the model, decoded: `[rows, columns]`; a vector is one row."""
        info = self._source.tensors[name]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        decoded: NDArray[np.float32] = dequantize(info.type, self._source.data(name).reshape(rows, -1))
        return decoded

    def _after_attention(self, graph: _Graph, layer: int, smoothing: Smoothing) -> str:
        block = f"blk.{layer}"
        mlp, swiglu = smoothing.get("mlp_normed", np.float32(1)), smoothing.get("swiglu", np.float32(1))
        out = graph.linear("attended", self.tensor(f"{block}.attn_output.weight"), "out")
        residual = graph.node("Add", out, "residual", name="middle")
        normed = graph.rms_norm(residual, self.tensor(f"{block}.ffn_norm.weight")[0] / mlp, "mlp_normed")
        gate = graph.linear(normed, self.tensor(f"{block}.ffn_gate.weight") * mlp, "gate")
        up = graph.linear(normed, (self.tensor(f"{block}.ffn_up.weight").T / swiglu).T * mlp, "up")
        silu = graph.node("Mul", gate, graph.node("Sigmoid", gate))
        product = graph.node("Mul", silu, up, name="swiglu")
        down = graph.linear(product, self.tensor(f"{block}.ffn_down.weight") * swiglu, "down")
        return graph.node("Add", down, residual, name="residual_out")

    def _before_attention(self, graph: _Graph, layer: int, residual: str, smoothing: Smoothing) -> None:
        block = f"blk.{layer}"
        factors = smoothing.get("normed", np.float32(1))
        normed = graph.rms_norm(residual, self.tensor(f"{block}.attn_norm.weight")[0] / factors, "normed")
        for name in ("q", "k", "v"):
            weight = self.tensor(f"{block}.attn_{name}.weight") * factors
            bias = self.tensor(f"{block}.attn_{name}.bias")[0] if self._config.family.qkv_bias else None
            graph.linear(normed, weight, name, bias)


class _Graph:
    """One graph in the making; methods take and return names of values."""

    def __init__(self, onnx: Any, dtype: type[np.float16 | np.float32], eps: float) -> None:  # noqa: ANN401 - a module
        self._onnx = onnx
        self._dtype = dtype
        self._eps = eps
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def node(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:  # noqa: ANN401 - the operation's
        name = name or f"t{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def linear(self, x: str, weight: NDArray[np.float32], name: str, bias: NDArray[np.float32] | None = None) -> str:
        """The product of every row by a matrix `[outputs, inputs]`."""
        constants = [weight[:, :, None, None]] + ([] if bias is None else [bias])
        return self.node("Conv", x, *map(self._constant, constants), name=name)

    def rms_norm(self, x: str, weight: NDArray[np.float32], name: str) -> str:
        """RMSNorm over channels, in the operations that the compiler knows it by."""
        mean = self.node("ReduceMean", self.node("Mul", x, x), axes=[1], keepdims=1)
        root = self.node("Sqrt", self.node("Add", mean, self._constant(np.array(self._eps, np.float32))))
        return self.node("Mul", self.node("Div", x, root), self._constant(weight[None, :, None, None]), name=name)

    def serialise(self, name: str, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> bytes:
        helper = self._onnx.helper
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self._dtype))

        def declared(values: Mapping[str, int]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(value, kind, [1, size, 1, "rows"]) for value, size in values.items()]

        graph = helper.make_graph(self._nodes, name, declared(inputs), declared(outputs), self._constants)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION, producer_name="rockpage"
        )
        serialised: bytes = model.SerializeToString(deterministic=True)
        return serialised

    def _constant(self, value: NDArray[np.float32]) -> str:
        name = f"c{len(self._constants)}"
        rounded = value.astype(np.float16).astype(self._dtype)
        self._constants.append(self._onnx.numpy_helper.from_array(rounded, name))
        return name

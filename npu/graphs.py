"""The dense parts of a decoder as ONNX graphs: everything but attention, cut where attention cuts it.

A model of L layers becomes L + 1 segments, so that a step runs L + 1 graphs and L attentions in turn:

    first              embeddings -> [norm, q|k|v, rotate] of layer 0
    middle(l), l < L-1 attention  -> [o, add, norm, gate|up, SiLU, down, add] of layer l, [norm, q|k|v, rotate] of l + 1
    last               attention  -> [o, add, norm, gate|up, SiLU, down, add] of layer L-1, norm, head

Row r of every input and output belongs to token r; nothing but attention mixes rows.

| name           | float32, m rows        | meaning                                                   |
|----------------|------------------------|-----------------------------------------------------------|
| `attended`     | `[m, heads * d]`       | output of attention (not in `first`)                      |
| `residual`     | `[m, hidden]`          | the residual stream                                       |
| `cos`, `sin`   | `[m, d / 2]`           | angles of each token's position (not in `last`)           |
| `logit_rows`   | int64 `[r]`            | rows whose logits are wanted (`last` only)                |
| `q`            | `[1, m, heads * d]`    | out: rotated queries                                      |
| `k`            | `[1, m, kv_heads * d]` | out: rotated keys                                         |
| `v`            | `[m, kv_heads * d]`    | out: values                                               |
| `residual_out` | `[m, hidden]`          | out: the residual stream behind the layer (`middle` only) |
| `logits`       | `[r, vocab]`           | out (`last` only)                                         |

Matrices are external initialisers at their places in the weights file; norms and biases are inside the graph.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ggml import dequantize
from .model import ModelConfig
from .onnx_graph import OnnxGraph
from .source import ModelSource
from .weights import Activations, WeightsPlan

__all__ = ["SegmentGraphs"]


class SegmentGraphs:
    """Builds the segments of one model, serialised.

    Args:
        source: the open model; its norms and biases are copied into the graphs.
        config: its dimensions.
        plan: where its matrices lie in the weights file.
        activations: how the inputs of products are held.

    Raises:
        MissingExtra: the `onnx` package is not installed.
    """

    def __init__(self, source: ModelSource, config: ModelConfig, plan: WeightsPlan, activations: Activations) -> None:
        self._source = source
        self._config = config
        self._groups = plan.groups
        self._activations = activations

    def first(self) -> bytes:
        """Embeddings to q, k, v of layer 0."""
        graph = self._graph()
        normed = graph.rms_norm(graph.input("residual", self._config.hidden), self._vector("blk.0.attn_norm.weight"))
        self._before_attention(graph, 0, normed)
        return graph.serialise("first")

    def middle(self, layer: int) -> bytes:
        """Attention of `layer` to q, k, v of the next."""
        graph = self._graph()
        attended = graph.input("attended", self._config.heads * self._config.head_dim)
        mlp, residual = self._after_attention(graph, layer, attended, graph.input("residual", self._config.hidden))
        norm = self._vector(f"blk.{layer + 1}.attn_norm.weight")
        normed, _ = graph.add_rms_norm(mlp, residual, norm, total="residual_out")
        graph.output("residual_out", "m", self._config.hidden)
        self._before_attention(graph, layer + 1, normed)
        return graph.serialise(f"middle {layer}")

    def last(self) -> bytes:
        """Attention of the last layer to the logits of the wanted rows; the others are dropped at once."""
        graph = self._graph()
        rows = graph.input("logit_rows", dtype=np.int64)
        attended = graph.node("Gather", graph.input("attended", self._config.heads * self._config.head_dim), rows)
        residual = graph.node("Gather", graph.input("residual", self._config.hidden), rows)
        mlp, residual = self._after_attention(graph, self._config.layers - 1, attended, residual)
        normed, _ = graph.add_rms_norm(mlp, residual, self._vector("output_norm.weight"))
        (logits,) = graph.linear(normed, self._groups[(self._config.head_tensor,)])
        graph.node("Identity", logits, outputs=["logits"])
        graph.output("logits", "r", self._config.vocab)
        return graph.serialise("last")

    def _graph(self) -> OnnxGraph:
        return OnnxGraph(self._activations, self._config.eps)

    def _before_attention(self, graph: OnnxGraph, layer: int, normed: str) -> None:
        """The normed residual to rotated q and k, and v.

        K and V outlive their step: every later token reads them. So int8 activations are quantised twice here, which
        takes a fifth off the mean error of a token's log-probability for a tenth of the speed.
        """
        config, block = self._config, f"blk.{layer}"
        names = (f"{block}.attn_q.weight", f"{block}.attn_k.weight", f"{block}.attn_v.weight")
        q, k, v = graph.linear(normed, self._groups[names], twice=True)
        cos, sin = (graph.input(name, config.head_dim // 2) for name in ("cos", "sin"))
        zero = graph.constant(np.zeros(1, np.int64))  # the axis of the batch, and the row of cos for the first token
        pairs = int(config.family.interleaved)
        for name, value, heads in (("q", q, config.heads), ("k", k, config.kv_heads)):
            biased = self._add_bias(graph, f"{block}.attn_{name}.bias", value)
            normed_heads = self._norm_heads(graph, f"{block}.attn_{name}_norm.weight", biased)
            batched = graph.node("Unsqueeze", normed_heads, zero)
            graph.node("RotaryEmbedding", batched, zero, cos, sin, outputs=[name], contrib=True, interleaved=pairs)
            graph.output(name, 1, "m", heads * config.head_dim)
        graph.node("Identity", self._add_bias(graph, f"{block}.attn_v.bias", v), outputs=["v"])
        graph.output("v", "m", config.kv_heads * config.head_dim)

    def _add_bias(self, graph: OnnxGraph, name: str, value: str) -> str:
        """`value` with its bias, if the family has one."""
        return graph.node("Add", value, graph.constant(self._vector(name))) if self._config.family.qkv_bias else value

    def _norm_heads(self, graph: OnnxGraph, name: str, value: str) -> str:
        """`value` with RMSNorm of each head by itself, if the family has it; all heads share one weight."""
        if not self._config.family.qk_norm:
            return value
        heads = graph.node("Reshape", value, graph.constant(np.array([0, -1, self._config.head_dim])))
        normed = graph.rms_norm(heads, self._vector(name))
        return graph.node("Reshape", normed, graph.constant(np.array([0, -1])))

    def _after_attention(self, graph: OnnxGraph, layer: int, attended: str, residual: str) -> tuple[str, str]:
        """Output projection and gated MLP: `(mlp, residual)`, whose sum is the residual stream behind the layer."""
        block = f"blk.{layer}"
        (out,) = graph.linear(attended, self._groups[(f"{block}.attn_output.weight",)])
        normed, residual = graph.add_rms_norm(out, residual, self._vector(f"{block}.ffn_norm.weight"))
        gate, up = graph.linear(normed, self._groups[(f"{block}.ffn_gate.weight", f"{block}.ffn_up.weight")])
        silu = graph.node("Mul", gate, graph.node("Sigmoid", gate))
        (mlp,) = graph.linear(graph.node("Mul", silu, up), self._groups[(f"{block}.ffn_down.weight",)])
        return mlp, residual

    def _vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weight or a bias."""
        info = self._source.tensors[name]
        vector: NDArray[np.float32] = dequantize(info.type, self._source.data(name).reshape(1, -1))[0]
        # A fault maps the pages around the one it wanted too: over all norms that came to a fifth of the file.
        self._source.release_pages()
        return vector

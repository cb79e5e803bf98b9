"""ONNX Runtime's GroupQueryAttention as a peer: its own K and V in one piece, one thread, the step's token appended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hostcache import KVGeometry

__all__ = ["NO_ONNX", "PRECISIONS", "GroupQueryAttention", "OnnxRuntime"]

NO_ONNX = "onnxruntime or onnx is not installed, so GroupQueryAttention is no peer: pip install 'rockpage[model]'"

MOST_BYTES = 96 << 20
"""Of K and V that take turns, as in our own sweeps; it is slow, so more would take long."""

PRECISIONS: dict[str, DTypeLike] = {"fp32": np.float32, "fp16": np.float16}
"""What the operator takes on a CPU (ONNX Runtime 1.32)."""

OPSET, IR_VERSION = 21, 10  # the IR version of opset 21
CONTRIB = "com.microsoft"

SEED = 0


@dataclass(frozen=True)
class OnnxRuntime:
    """The modules, where they are installed."""

    runtime: Any
    onnx: Any

    @classmethod
    def load(cls) -> OnnxRuntime | None:
        """None: one of them is not installed."""
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its official builds report to their maker
        try:
            import onnx
            import onnxruntime  # type: ignore[import-untyped]  # it ships no types
        except ImportError:
            return None
        return cls(onnxruntime, onnx)

    def session(self, geometry: KVGeometry, heads: int, dtype: DTypeLike) -> Any:  # noqa: ANN401 - it ships no types
        """One node, with one thread."""
        graph = _graph(self.onnx, geometry, heads, np.dtype(dtype))
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # errors
        return self.runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class GroupQueryAttention:
    """A decoding step of a batch, layer after layer, each with K and V of its own.

    K and V are present and past at once, as the operator likes them best: nothing is copied but the step's own token.

    Args:
        peer: the modules.
        geometry: of the model.
        heads: query heads.
        sequences: of the batch.
        context: tokens of each, the step's own included.
        dtype: of everything, float32 or float16.

    Attributes:
        keys: `[layers, sequences, kv_heads, context, head_dim]`.
        values: the same.
        q: `[sequences, 1, heads * head_dim]`.
        k: the step's own, `[sequences, 1, kv_heads * head_dim]`.
        v: the same.
        out: `[sequences, 1, heads * head_dim]`, of the last layer.
    """

    def __init__(
        self, peer: OnnxRuntime, geometry: KVGeometry, heads: int, sequences: int, context: int, *, dtype: DTypeLike
    ) -> None:
        kind = np.dtype(dtype)
        layer_bytes = sequences * geometry.kv_heads * context * geometry.head_dim * 2 * kind.itemsize
        self.layers = max(2, min(geometry.layers, MOST_BYTES // layer_bytes))
        rng = np.random.default_rng(SEED)

        def some(*shape: int) -> NDArray[Any]:
            return rng.standard_normal(shape, np.float32).astype(kind)

        shape = (self.layers, sequences, geometry.kv_heads, context, geometry.head_dim)
        self.keys, self.values = some(*shape), some(*shape)
        q_width, kv_width = heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
        self.q, self.k, self.v = some(sequences, 1, q_width), some(sequences, 1, kv_width), some(sequences, 1, kv_width)
        self.out = np.empty_like(self.q)
        self._lengths = np.full(sequences, context - 1, np.int32)  # the operator wants one less than there are
        self._total = np.array([context], np.int32)
        self._session = peer.session(geometry, heads, kind)
        self._bindings = [self._binding(layer) for layer in range(self.layers)]

    def attend(self) -> None:
        """Over all layers."""
        for binding in self._bindings:
            self._session.run_with_iobinding(binding)

    def _binding(self, layer: int) -> Any:  # noqa: ANN401 - it ships no types
        binding = self._session.io_binding()
        inputs = {"q": self.q, "k": self.k, "v": self.v, "lengths": self._lengths, "total": self._total}
        past = {"key": self.keys[layer], "value": self.values[layer]}
        for name, array in {**inputs, **{f"past_{name}": array for name, array in past.items()}}.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in {"out": self.out, **past}.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return binding


def _graph(onnx: Any, geometry: KVGeometry, heads: int, kind: np.dtype[Any]) -> bytes:  # noqa: ANN401 - optional
    """The node alone; batch and context are free."""
    helper = onnx.helper
    element, whole = helper.np_dtype_to_tensor_dtype(kind), onnx.TensorProto.INT32
    width, kv_width = heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    cached = ["n", geometry.kv_heads, "context", geometry.head_dim]
    shapes = {"q": ["n", 1, width], "k": ["n", 1, kv_width], "v": ["n", 1, kv_width]}
    inputs = [helper.make_tensor_value_info(name, element, shape) for name, shape in shapes.items()]
    inputs += [helper.make_tensor_value_info(name, element, cached) for name in ("past_key", "past_value")]
    inputs += [
        helper.make_tensor_value_info(name, whole, shape) for name, shape in (("lengths", ["n"]), ("total", [1]))
    ]
    outputs = [helper.make_tensor_value_info("out", element, ["n", 1, width])]
    outputs += [helper.make_tensor_value_info(name, element, cached) for name in ("key", "value")]
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_key", "past_value", "lengths", "total"],
        ["out", "key", "value"],
        domain=CONTRIB,
        num_heads=heads,
        kv_num_heads=geometry.kv_heads,
    )
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
    return serialized

"""A thin layer over `onnx.helper` that knows how rockpage's matrices are multiplied by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import MissingExtra

from .weights import Activations, Form, PackedMatrix

if TYPE_CHECKING:
    import onnx

__all__ = ["WEIGHTS_FILE", "OnnxGraph"]

WEIGHTS_FILE = "weights.bin"
"""Name of the weights file, in the folder that the session is told to look in."""

_OPSET = 21
_IR_VERSION = 10  # the IR version of opset 21
_ACCURACY_LEVEL: dict[Activations, int] = {"fp32": 1, "int8": 4}  # of MatMulNBits: the type its inputs are computed in


class OnnxGraph:
    """One ONNX graph in the making; methods take and return names of values.

    Args:
        activations: how the inputs of products are held.
        eps: epsilon of every RMSNorm.

    Raises:
        MissingExtra: the `onnx` package is not installed.
    """

    def __init__(self, activations: Activations, eps: float) -> None:
        try:
            import onnx  # noqa: PLC0415 - comes with an extra
        except ModuleNotFoundError as error:
            raise MissingExtra("building a model's graphs needs onnx: pip install 'rockpage[model]'") from error
        self._onnx = onnx
        self._level = _ACCURACY_LEVEL[activations]
        self._eps = eps
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._block_sums: dict[tuple[str, int], str] = {}  # by input and size of its blocks
        self._twice: set[str] = set()  # inputs of products that are quantised twice
        self._stacked: dict[tuple[str, int], str] = {}  # their parts, by input and size of its blocks
        self._names = 0

    def input(self, name: str, *width: int, dtype: type[np.float32 | np.int64] = np.float32) -> str:
        """Declare an input `[m, *width]`; int64 ones are `[r]`."""
        shape = ["m" if dtype is np.float32 else "r", *width]
        self._inputs.append(self._onnx.helper.make_tensor_value_info(name, self._type(dtype), shape))
        return name

    def output(self, name: str, *shape: int | str) -> None:
        """Declare an existing float32 value an output."""
        self._outputs.append(self._onnx.helper.make_tensor_value_info(name, self._type(np.float32), shape))

    def constant(self, value: NDArray[Any]) -> str:
        """A small constant inside the graph."""
        name = self._name()
        self._initializers.append(self._onnx.numpy_helper.from_array(value, name))
        return name

    def node(
        self,
        op: str,
        *inputs: str,
        outputs: list[str] | None = None,
        contrib: bool = False,
        **attributes: Any,  # noqa: ANN401 - whatever the operation takes
    ) -> str:
        """Append an operation; returns its first output, named `outputs[0]` or anew.

        `contrib` operations are ONNX Runtime's own; `attributes` are the operation's.
        """
        outputs = outputs or [self._name()]
        domain = "com.microsoft" if contrib else ""
        self._nodes.append(self._onnx.helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def rms_norm(self, x: str, weight: NDArray[np.float32]) -> str:
        """RMSNorm of each row of x."""
        return self.node("SimplifiedLayerNormalization", x, self.constant(weight), axis=-1, epsilon=self._eps)

    def add_rms_norm(
        self, x: str, residual: str, weight: NDArray[np.float32], total: str | None = None
    ) -> tuple[str, str]:
        """`x + residual`, normed and as it is: `(normed, total)`; `total` may be given its name."""
        normed, total = self._name(), total or self._name()
        self.node(
            "SkipSimplifiedLayerNormalization",
            x,
            residual,
            self.constant(weight),
            outputs=[normed, "", "", total],
            contrib=True,
            epsilon=self._eps,
        )
        return normed, total

    def linear(self, x: str, group: tuple[PackedMatrix, ...], *, twice: bool = False) -> list[str]:
        """Products of x by every tensor of a group, stacked or not.

        With `twice`, activations in int8 are quantised twice, see `_quantised_twice`.
        """
        if twice and self._level == _ACCURACY_LEVEL["int8"]:
            self._twice.add(x)
        results = []
        for matrix in group:
            product = self._product(x, matrix)
            if len(matrix.source_rows) == 1:
                results.append(product)
                continue
            parts = [self._name() for _ in matrix.source_rows]
            sizes = self.constant(np.array(matrix.source_rows, np.int64))
            self.node("Split", product, sizes, outputs=parts, axis=1)
            results += parts
        return results

    def serialise(self, name: str) -> bytes:
        """The finished model."""
        helper = self._onnx.helper
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._initializers)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="rockpage")
        serialised: bytes = model.SerializeToString()
        return serialised

    def _product(self, x: str, matrix: PackedMatrix) -> str:
        match matrix.form:
            case Form.DENSE:
                return self.node("Gemm", x, self._array(matrix, "weights"), transB=1)
            case Form.Q4:
                return self._nbits(x, matrix, 4, "quants", "scales")
            case Form.Q4_OFFSET:
                return self._add_offsets(x, matrix, self._nbits(x, matrix, 4, "quants", "scales"))
            case Form.Q8:
                return self._nbits(x, matrix, 8, "quants", "scales")
            case Form.Q8_OFFSET:
                return self._add_offsets(x, matrix, self._nbits(x, matrix, 8, "quants", "scales"))
            case Form.Q8_HALVES:
                high = self._nbits(x, matrix, 4, "high", "high_scales")
                low = self._nbits(x, matrix, 4, "low", "low_scales")
                return self._add_offsets(x, matrix, self.node("Add", high, low))

    def _quantised_twice(self, x: str, block: int) -> str:
        """`[2m, K]`: what int8 keeps of every block of x, and below it what int8 loses, about 15 bits together.

        The product is taken of both at once, which costs two rows instead of one; unlike products with float
        activations it is the same, bit for bit, whatever the number of rows.
        """
        blocks = self._blocks(x, block)
        peak = self.node("ReduceMax", self.node("Abs", blocks), self.constant(np.array([2])))
        step = self.node("Mul", peak, self.constant(np.array(1 / 127, np.float32)))  # as MatMulNBits quantises
        step = self.node("Max", step, self.constant(np.array(1e-30, np.float32)))  # a block of zeros has no step
        kept = self.node("Mul", self.node("Round", self.node("Div", blocks, step)), step)
        stacked = self.node("Concat", kept, self.node("Sub", blocks, kept), axis=0)
        return self.node("Reshape", stacked, self.constant(np.array([0, -1])))

    def _nbits(self, x: str, matrix: PackedMatrix, bits: int, quants: str, scales: str) -> str:
        if x not in self._twice:
            return self._nbits_once(x, matrix, bits, quants, scales)
        if (x, matrix.block) not in self._stacked:
            self._stacked[x, matrix.block] = self._quantised_twice(x, matrix.block)
        both = self._nbits_once(self._stacked[x, matrix.block], matrix, bits, quants, scales)
        parts = self.node("Reshape", both, self.constant(np.array([2, -1, matrix.rows])))
        return self.node("ReduceSum", parts, self.constant(np.array([0])), keepdims=0)

    def _nbits_once(self, x: str, matrix: PackedMatrix, bits: int, quants: str, scales: str) -> str:
        return self.node(
            "MatMulNBits",
            x,
            self._array(matrix, quants),
            self._array(matrix, scales),
            contrib=True,
            K=matrix.columns,
            N=matrix.rows,
            bits=bits,
            block_size=matrix.block,
            accuracy_level=self._level,
        )

    def _add_offsets(self, x: str, matrix: PackedMatrix, product: str) -> str:
        """`product + block_sums(x) @ offsets.T` in one operation."""
        if (x, matrix.block) not in self._block_sums:
            sums = self.node("ReduceSum", self._blocks(x, matrix.block), self.constant(np.array([2])), keepdims=0)
            self._block_sums[x, matrix.block] = sums
        return self.node("Gemm", self._block_sums[x, matrix.block], self._array(matrix, "offsets"), product, transB=1)

    def _blocks(self, x: str, block: int) -> str:
        """The blocks of each row: `[m, K / block, block]`."""
        return self.node("Reshape", x, self.constant(np.array([0, -1, block])))

    def _array(self, matrix: PackedMatrix, role: str) -> str:
        """An external initialiser: a range of the weights file."""
        array = matrix.arrays[role]
        tensor = self._onnx.TensorProto(
            name=f"{'+'.join(matrix.sources)}:{role}",
            data_type=self._type(array.dtype),
            dims=array.shape,
            data_location=self._onnx.TensorProto.EXTERNAL,
        )
        for key, value in (("location", WEIGHTS_FILE), ("offset", array.offset), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._initializers.append(tensor)
        return tensor.name

    def _type(self, dtype: np.dtype[Any] | type[np.generic]) -> int:
        return self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def _name(self) -> str:
        self._names += 1
        return f"t{self._names}"

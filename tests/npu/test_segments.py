"""What the kernels behind the sessions compute, where machines differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped] # it ships no types
import pytest

from hostcache.errors import UsageError
from npu.segments import session_options

BLOCK, OUTPUTS = 32, 16


def test_an_outlier_costs_its_own_block_precision_and_no_other(tmp_path: Path) -> None:
    """Inputs of 4-bit products are quantised block by block, whichever kernels a processor gets.

    The first block of inputs holds a large number and meets weights of 0; the second holds small ones. Its codes have
    127 steps for the largest of them, so each is off by half a step at most.
    """
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (OUTPUTS, 2 * BLOCK), np.uint8)
    codes[:, :BLOCK] = 8  # stands for 0
    weights = codes.astype(np.float32) - 8
    inputs = rng.uniform(-1, 1, (5, 2 * BLOCK)).astype(np.float32)
    inputs[:, 3] = 1000
    packed = (codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)).reshape(OUTPUTS, 2, BLOCK // 2)
    session = onnxruntime.InferenceSession(product(packed), session_options(tmp_path, 1))
    (found,) = session.run(None, {"x": inputs})
    step = np.abs(inputs[:, BLOCK:]).max(axis=1, keepdims=True) / 127
    bound = np.abs(weights).sum(axis=1) * step / 2
    assert (np.abs(found - inputs @ weights.T) <= 1.01 * bound).all()


def test_a_folder_that_onnx_runtime_cannot_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"M.udcfcller' is not UTF-8: set XDG_CACHE_HOME"):
        session_options(tmp_path / "M\udcfcller", 1)


def product(packed: np.ndarray) -> bytes:
    """A graph that multiplies x by 4-bit weights, all scales 1, with int8 inputs (`accuracy_level` 4)."""
    node = onnx.helper.make_node(
        "MatMulNBits",
        ["x", "weights", "scales"],
        ["y"],
        domain="com.microsoft",
        K=2 * BLOCK,
        N=OUTPUTS,
        bits=4,
        block_size=BLOCK,
        accuracy_level=4,
    )
    graph = onnx.helper.make_graph(
        [node],
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["m", 2 * BLOCK])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["m", OUTPUTS])],
        [
            onnx.numpy_helper.from_array(packed, "weights"),
            onnx.numpy_helper.from_array(np.ones(2 * OUTPUTS, np.float32), "scales"),
        ],
    )
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised

"""Repacked matrices hold exactly the model's weights, and their products are those of the weights."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime  # type: ignore[import-untyped] # it ships no types
import pytest
from gguf.quants import dequantize as reference_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu.ggml import GGMLType
from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.onnx_graph import WEIGHTS_FILE, OnnxGraph
from npu.weights import Activations, Form, PackedArray, PackedMatrix, WeightsPlan, pack_rows, plan_weights
from tests.npu.quantised import encode, reference
from tests.npu.tiny import TINY, write_tiny_llama

FORMS = [
    (GGMLType.Q4_0, Form.Q4),
    (GGMLType.Q4_1, Form.Q4_OFFSET),
    (GGMLType.Q5_0, Form.Q8),
    (GGMLType.Q5_0, Form.Q8_HALVES),
    (GGMLType.Q5_1, Form.Q8_OFFSET),
    (GGMLType.Q5_1, Form.Q8_HALVES),
    (GGMLType.Q8_0, Form.Q8),
    (GGMLType.Q8_0, Form.Q8_HALVES),
    (GGMLType.IQ4_NL, Form.Q8),
    (GGMLType.IQ4_NL, Form.Q8_HALVES),
    (GGMLType.Q2_K, Form.Q4_OFFSET),
    (GGMLType.Q3_K, Form.Q4),
    (GGMLType.Q4_K, Form.Q4_OFFSET),
    (GGMLType.Q5_K, Form.Q8_OFFSET),
    (GGMLType.Q5_K, Form.Q8_HALVES),
    (GGMLType.Q6_K, Form.Q8),
    (GGMLType.Q6_K, Form.Q8_HALVES),
    (GGMLType.F16, Form.DENSE),
    (GGMLType.BF16, Form.DENSE),
    (GGMLType.F32, Form.DENSE),
]
IDS = [f"{kind.name}-{form.value}" for kind, form in FORMS]


INT8_ONLY = (Form.Q8, Form.Q8_OFFSET)
FP32_ONLY = (Form.Q8_HALVES,)


def block_of(kind: GGMLType) -> int:
    """Weights of a type that share a scale, as `ggml-common.h` has it."""
    return 16 if kind in (GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q6_K) else 32


def random_rows(kind: GGMLType, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of a real tensor of this type, one block of scale 0 among them."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    values[0, : kind.block_elements] = 0
    return encode(values, kind).view(np.uint8).reshape(rows, -1)


def unpack(form: Form, arrays: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """What the kernels make of packed arrays, by the specification of MatMulNBits: element 2i in the low nibble."""

    def quants(role: str, zero: int) -> NDArray[np.float64]:
        raw = arrays[role]
        if zero == 8:
            raw = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:2], -1)
        return raw.astype(np.float64) - zero

    def scaled(values: NDArray[np.float64], role: str) -> NDArray[np.float64]:
        out: NDArray[np.float64] = values * arrays[role].astype(np.float64)[..., None]
        return out

    if form is Form.DENSE:
        return arrays["weights"].astype(np.float64)
    if form is Form.Q8_HALVES:
        blocks = scaled(quants("high", 8), "high_scales") + scaled(quants("low", 8), "low_scales")
    else:
        blocks = scaled(quants("quants", 128 if form in INT8_ONLY else 8), "scales")
    if "offsets" in arrays:
        blocks = blocks + arrays["offsets"].astype(np.float64)[..., None]
    return blocks.reshape(len(blocks), -1)


@pytest.mark.parametrize(("kind", "form"), FORMS, ids=IDS)
def test_packed_rows_are_the_same_weights(kind: GGMLType, form: Form) -> None:
    raw = random_rows(kind, 6, 512)
    packed = pack_rows(form, kind, raw)
    weights, expected = unpack(form, packed), reference(kind, raw)
    if "offsets" not in packed:
        np.testing.assert_array_equal(weights, expected)
        return
    # An offset is rounded to float32, in Q8_HALVES of a type with offsets twice; so is the reference's own sum.
    largest = max(abs(packed["offsets"]).max(), abs(expected).max())
    assert abs(weights - expected).max() <= 3 * 2.0**-24 * largest


@given(st.binary(min_size=34, max_size=34))
@settings(max_examples=100, deadline=None)
def test_any_codes_survive_packing(content: bytes) -> None:
    raw = np.frombuffer(content, np.uint8).copy().reshape(1, -1)
    raw[0, 1] &= 0xBF if raw[0, 1] & 0x7C == 0x7C else 0xFF  # infinity and NaN
    for form in (Form.Q8, Form.Q8_HALVES):
        weights = unpack(form, pack_rows(form, GGMLType.Q8_0, raw))
        np.testing.assert_array_equal(weights, reference(GGMLType.Q8_0, raw))


# --- the whole file -----------------------------------------------------------------------------------------------


def write_plan(path: Path, activations: Activations) -> tuple[ModelConfig, WeightsPlan, bytes]:
    with GGUFFile.open(path) as opened:
        config = ModelConfig.from_gguf(opened)
        plan = plan_weights(opened, config, activations)
        file = io.BytesIO()
        plan.write(opened, file)
    return config, plan, file.getvalue()


def load_array(content: bytes, array: PackedArray) -> NDArray[Any]:
    return np.frombuffer(content, array.dtype, array.nbytes // array.dtype.itemsize, array.offset).reshape(array.shape)


@pytest.mark.parametrize("activations", ["int8", "fp32"])
@pytest.mark.parametrize("value_type", [None, "Q4_0"], ids=["stacked", "apart"])
def test_the_file_holds_every_matrix_of_the_model(
    tmp_path: Path, activations: Activations, value_type: str | None
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", replace(TINY, value_type=value_type))
    _, plan, content = write_plan(path, activations)
    assert len(content) == plan.nbytes
    tensors = {t.name: reference_dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    taken: list[tuple[int, int]] = []
    found: list[str] = []
    for names, group in plan.groups.items():
        assert len(group) == (1 if value_type is None or len(names) == 1 else len(names))
        for matrix in group:
            arrays = {role: load_array(content, array) for role, array in matrix.arrays.items()}
            weights = unpack(matrix.form, arrays).astype(np.float32)
            expected = np.concatenate([tensors[name] for name in matrix.sources])
            np.testing.assert_array_equal(weights, expected)
            assert weights.shape == (matrix.rows, matrix.columns)
            taken += [(array.offset, array.offset + array.nbytes) for array in matrix.arrays.values()]
            found += matrix.sources
    assert sorted(found) == sorted(name for name, values in tensors.items() if values.ndim == 2)
    taken.sort()
    assert all(start % 64 == 0 for start, _ in taken)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))


# --- products -----------------------------------------------------------------------------------------------------


def product(
    folder: Path, kind: GGMLType, form: Form, raw: NDArray[np.uint8], activations: Activations
) -> onnxruntime.InferenceSession:
    """A session that multiplies `x` `[m, columns]` by the rows of a tensor."""
    columns = raw.shape[1] // kind.block_bytes * kind.block_elements
    packed = pack_rows(form, kind, raw)
    arrays, content = {}, b""
    for role, values in packed.items():
        arrays[role] = PackedArray(values.dtype, values.shape, len(content), values.nbytes)
        content += values.tobytes() + b"\0" * (-values.nbytes % 64)
    (folder / WEIGHTS_FILE).write_bytes(content)
    graph = OnnxGraph(activations, eps=1e-5)
    x = graph.input("x", columns)
    (y,) = graph.linear(x, (PackedMatrix(form, block_of(kind), ("w",), (len(raw),), columns, arrays),))
    graph.output(y, "m", len(raw))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(graph.serialise("product"), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize(("kind", "form"), FORMS, ids=IDS)
def test_products_stay_within_their_error_bounds(tmp_path: Path, kind: GGMLType, form: Form, m: int) -> None:
    columns, rows = 288 if kind.block_elements == 32 else 512, 70  # rows are no multiple of a kernel's tile
    block = block_of(kind)
    raw = random_rows(kind, rows, columns, seed=m)
    weights = reference(kind, raw)
    x = np.random.default_rng(m).standard_normal((m, columns)).astype(np.float32) + np.float32(0.5)
    exact = x.astype(np.float64) @ weights.T
    # Float32 sums of n terms: each of at most n additions rounds by 2^-24 of a partial sum below sum |x| |w|. Offsets
    # and halves are summed apart, so that |w| is that of the parts: at most 3 times the largest of a block.
    scale = np.abs(x).astype(np.float64) @ np.full_like(weights, 3 * np.abs(weights).max()).T
    rounding = columns * 2.0**-24 * scale
    if form not in INT8_ONLY:
        y = product(tmp_path, kind, form, raw, "fp32").run(None, {"x": x})[0]
        assert (np.abs(y - exact) <= rounding).all()
    if form not in FP32_ONLY:
        y = product(tmp_path, kind, form, raw, "int8").run(None, {"x": x})[0]
        # Each x is rounded to a step of its block's largest / 127, so by half a step; offsets meet the unrounded sums.
        half_steps = np.repeat(np.abs(x).reshape(m, -1, block).max(-1) / 254, block, axis=1)
        symmetric = np.abs(weights - _offsets_of(form, kind, raw))
        assert (np.abs(y - exact) <= half_steps @ symmetric.T * 1.001 + rounding).all()


def _offsets_of(form: Form, kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float64] | float:
    offsets = pack_rows(form, kind, raw).get("offsets")
    if offsets is None:
        return 0.0
    out: NDArray[np.float64] = np.repeat(offsets.astype(np.float64), block_of(kind), axis=1)
    return out


@pytest.mark.parametrize(
    ("kind", "form", "activations"),
    [(*case, "int8") for case in FORMS if case[1] not in FP32_ONLY]
    + [(*case, "fp32") for case in FORMS if case[1] not in INT8_ONLY],
)
def test_a_row_gets_the_same_bits_in_any_company(
    tmp_path: Path, kind: GGMLType, form: Form, activations: Activations
) -> None:
    """All but one case: 4-bit blocks with float activations, where a single row has a kernel of its own."""
    columns = 576 if kind.block_elements == 32 else 768
    raw = random_rows(kind, 100, columns)
    x = np.random.default_rng(1).standard_normal((70, columns)).astype(np.float32)
    session = product(tmp_path, kind, form, raw, activations)
    together = session.run(None, {"x": x})[0]
    for m in (2, 3, 8, 33):
        np.testing.assert_array_equal(session.run(None, {"x": x[:m]})[0], together[:m], err_msg=f"{m} rows")
    alone = session.run(None, {"x": x[:1]})[0]
    if activations == "int8" or form is Form.DENSE:
        np.testing.assert_array_equal(alone, together[:1])
    else:
        assert np.abs(alone - together[:1]).max() <= 5e-6 * np.abs(together).max()

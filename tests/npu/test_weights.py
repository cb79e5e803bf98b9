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
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu.ggml import GGMLType
from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.onnx_graph import WEIGHTS_FILE, OnnxGraph
from npu.weights import BLOCK, Activations, Form, PackedArray, PackedMatrix, WeightsPlan, pack_rows, plan_weights
from tests.npu.tiny import TINY, write_tiny_llama

FORMS = [
    (GGMLType.Q4_0, Form.Q4),
    (GGMLType.Q4_1, Form.Q4_OFFSET),
    (GGMLType.Q8_0, Form.Q8),
    (GGMLType.Q8_0, Form.Q8_HALVES),
    (GGMLType.F16, Form.DENSE),
    (GGMLType.F32, Form.DENSE),
]
IDS = [f"{kind.name}-{form.value}" for kind, form in FORMS]


def random_rows(kind: GGMLType, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of a real tensor of this type, one block of scale 0 among them."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    values[rows // 2, :BLOCK] = 0
    return quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8).reshape(rows, -1)


def reference(kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The weights in float64, where the product of a float16 scale and a quant is exact."""
    return reference_dequantize(
        raw.view(_REFERENCE_DTYPES.get(kind, np.uint8)), gguf.GGMLQuantizationType(kind)
    ).astype(np.float64)


_REFERENCE_DTYPES: dict[GGMLType, type[np.generic]] = {GGMLType.F16: np.float16, GGMLType.F32: np.float32}


def unpack(form: Form, arrays: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """What the kernels make of packed arrays, by the specification of MatMulNBits: element 2i in the low nibble."""

    def quants(role: str, zero: int) -> NDArray[np.float64]:
        raw = arrays[role]
        if zero == 8:
            raw = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:2], BLOCK)
        return raw.astype(np.float64) - zero

    def scaled(values: NDArray[np.float64], role: str) -> NDArray[np.float64]:
        out: NDArray[np.float64] = values * arrays[role].astype(np.float64)[..., None]
        return out

    if form is Form.DENSE:
        return arrays["weights"].astype(np.float64)
    if form is Form.Q8_HALVES:
        blocks = scaled(quants("high", 8), "high_scales") + scaled(quants("low", 8), "low_scales")
    else:
        blocks = scaled(quants("quants", 128 if form is Form.Q8 else 8), "scales")
    if "offsets" in arrays:
        blocks = blocks + arrays["offsets"].astype(np.float64)[..., None]
    return blocks.reshape(len(blocks), -1)


@pytest.mark.parametrize(("kind", "form"), FORMS, ids=IDS)
def test_packed_rows_are_the_same_weights(kind: GGMLType, form: Form) -> None:
    raw = random_rows(kind, 6, 96)
    weights = unpack(form, pack_rows(form, kind, raw))
    np.testing.assert_array_equal(weights.astype(np.float32), reference(kind, raw).astype(np.float32))


@given(st.binary(min_size=20 * 3, max_size=20 * 3), st.sampled_from([kind for kind, form in FORMS[:4]]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_mean_the_same_weights(content: bytes, kind: GGMLType) -> None:
    """Not only what a quantiser writes: any quant, and any finite scale down to the subnormal."""
    raw = np.frombuffer(content, np.uint8)[: kind.block_bytes].copy()
    for half in (raw[:2], raw[2:4]) if kind is GGMLType.Q4_1 else (raw[:2],):
        if half[1] & 0x7C == 0x7C:  # infinity and NaN
            half[1] &= 0xBF
    raw = raw.reshape(1, -1)
    for form in (form for a, form in FORMS if a is kind):
        weights, expected = unpack(form, pack_rows(form, kind, raw)), reference(kind, raw)
        if form is Form.Q4_OFFSET:
            # m + 8 d is rounded once to float32, and so is the reference's own d q + m.
            largest = max(abs(float(raw[:, i : i + 2].view(np.float16)[0, 0])) for i in (0, 2))
            assert np.abs(weights - expected).max() <= (16 * largest) * 2.0**-23
        else:
            np.testing.assert_array_equal(weights, expected)


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
    (y,) = graph.linear(x, (PackedMatrix(form, ("w",), (len(raw),), columns, arrays),))
    graph.output(y, "m", len(raw))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(graph.serialise("product"), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize(("kind", "form"), FORMS, ids=IDS)
def test_products_stay_within_their_error_bounds(tmp_path: Path, kind: GGMLType, form: Form, m: int) -> None:
    columns, rows = 288, 70  # neither is a multiple of a kernel's tile
    raw = random_rows(kind, rows, columns, seed=m)
    weights = reference(kind, raw)
    x = np.random.default_rng(m).standard_normal((m, columns)).astype(np.float32) + np.float32(0.5)
    exact = x.astype(np.float64) @ weights.T
    # Float32 sums of n terms: each of at most n additions rounds by 2^-24 of a partial sum below sum |x| |w|. Offsets
    # and halves are summed apart, so that |w| is that of the parts: at most 3 times the largest of a block.
    scale = np.abs(x).astype(np.float64) @ np.full_like(weights, 3 * np.abs(weights).max()).T
    rounding = columns * 2.0**-24 * scale
    if form is not Form.Q8:  # it exists for int8 alone
        y = product(tmp_path, kind, form, raw, "fp32").run(None, {"x": x})[0]
        assert (np.abs(y - exact) <= rounding).all()
    if form is not Form.Q8_HALVES:
        y = product(tmp_path, kind, form, raw, "int8").run(None, {"x": x})[0]
        # Each x is rounded to a step of its block's largest / 127, so by half a step; offsets meet the unrounded sums.
        half_steps = np.repeat(np.abs(x).reshape(m, -1, BLOCK).max(-1) / 254, BLOCK, axis=1)
        symmetric = np.abs(weights - _offsets_of(form, kind, raw))
        assert (np.abs(y - exact) <= half_steps @ symmetric.T * 1.001 + rounding).all()


def _offsets_of(form: Form, kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float64] | float:
    if form is not Form.Q4_OFFSET:
        return 0.0
    offsets: NDArray[np.float64] = np.repeat(pack_rows(form, kind, raw)["offsets"].astype(np.float64), BLOCK, axis=1)
    return offsets


@pytest.mark.parametrize(
    ("kind", "form", "activations"),
    [(*case, "int8") for case in FORMS if case[1] is not Form.Q8_HALVES]
    + [(*case, "fp32") for case in FORMS if case[1] is not Form.Q8],
)
def test_a_row_gets_the_same_bits_in_any_company(
    tmp_path: Path, kind: GGMLType, form: Form, activations: Activations
) -> None:
    """All but one case: 4-bit blocks with float activations, where a single row has a kernel of its own."""
    raw = random_rows(kind, 100, 576)
    x = np.random.default_rng(1).standard_normal((70, 576)).astype(np.float32)
    session = product(tmp_path, kind, form, raw, activations)
    together = session.run(None, {"x": x})[0]
    for m in (2, 3, 8, 33):
        np.testing.assert_array_equal(session.run(None, {"x": x[:m]})[0], together[:m], err_msg=f"{m} rows")
    alone = session.run(None, {"x": x[:1]})[0]
    if activations == "int8" or form is Form.DENSE:
        np.testing.assert_array_equal(alone, together[:1])
    else:
        assert np.abs(alone - together[:1]).max() <= 5e-6 * np.abs(together).max()

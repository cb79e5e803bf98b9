"""The attention graphs: their shapes as the contract says, and their sum against exact attention."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped] # it ships no types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import DimensionTooLarge, UsageError
from npu.attention_graph import AttentionGraph, attention_graphs
from tests.npu.attention_cases import Case, random_case


def run_float32(graph: AttentionGraph, case: Case) -> NDArray[np.float32]:
    """The graph with float32 in place of fp16, so that only its structure is judged."""
    model = onnx.load_from_string(graph.onnx())
    onnx.checker.check_model(model, full_check=True)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    inputs = [array.astype(np.float32) for array in graph.inputs(case.q, case.k, case.v, case.mask)]
    (out,) = session.run(None, dict(zip(names, inputs, strict=True)))
    assert out.shape == (len(case.q), graph.head_dim, 1, graph.rows)
    result: NDArray[np.float32] = out[:, :, 0].swapaxes(1, 2)
    return result


@pytest.mark.parametrize(
    ("kv_heads", "heads", "head_dim", "rows"),
    [
        (3, 9, 64, (4, 52, 196)),  # 1 * 3, 16 * 3 and 64 * 3, each and a canary, to the next multiple of 4
        (2, 14, 64, (8, 116, 452)),
        (2, 12, 128, (8, 100, 388)),
        (4, 4, 32, (4, 20, 68)),
    ],
)
def test_rows_hold_tile_and_canary(kv_heads: int, heads: int, head_dim: int, rows: tuple[int, ...]) -> None:
    graphs = attention_graphs(kv_heads, heads, head_dim)
    assert [graph.kind for graph in graphs] == ["decode", "prefill16", "prefill64"]
    assert tuple(graph.rows for graph in graphs) == rows


def test_shapes_as_the_contract_says() -> None:
    decode, prefill16, _ = attention_graphs(3, 9, 64)
    assert decode.input_shapes(4, 256) == {"q": (12, 72, 1, 4), "k": (12, 72, 1, 256), "v": (12, 64, 1, 256)}
    assert prefill16.input_shapes(1, 128) == {
        "q": (3, 64, 1, 52),
        "k": (3, 64, 1, 128),
        "v": (3, 64, 1, 128),
        "mask": (1, 128, 1, 52),
    }


def test_operands_become_inputs_without_a_copy() -> None:
    graph = attention_graphs(3, 9, 64)[1]
    case = random_case(graph, [40], 64, seed=1)
    inputs = graph.inputs(case.q, case.k, case.v, case.mask)
    assert [array.shape for array in inputs] == list(graph.input_shapes(1, 64).values())
    assert case.mask is not None
    operands = (case.q, case.k, case.v, case.mask)
    assert all(np.shares_memory(array, operand) for array, operand in zip(inputs, operands, strict=True))
    assert inputs[1][2, 5, 0, 7] == case.k[2, 7, 5]
    assert inputs[3][0, 63, 0, 51] == case.mask[0, 51, 63]


@settings(max_examples=25)
@given(data=st.data())
def test_decoding_a_ragged_batch_is_exact(data: st.DataObject) -> None:
    group, head_dim = data.draw(st.integers(1, 8)), 8 * data.draw(st.integers(1, 6))
    graph = AttentionGraph(data.draw(st.integers(1, 3)), group, head_dim, tile=1)
    tokens = 4 * data.draw(st.integers(1, 20))
    lengths = data.draw(st.lists(st.integers(1, tokens - 2), min_size=1, max_size=4))
    case = random_case(graph, lengths, tokens, data.draw(st.integers(0, 99)), spread=data.draw(st.sampled_from([1, 8])))
    out = run_float32(graph, case)
    np.testing.assert_allclose(out[:, : case.used], case.want[:, : case.used], atol=1e-5)
    np.testing.assert_allclose(out[:, -case.asking :], case.want[:, -case.asking :], atol=1e-5)


@settings(max_examples=15)
@given(data=st.data())
def test_a_tile_is_causal_and_exact(data: st.DataObject) -> None:
    tile = data.draw(st.sampled_from([16, 64]))
    graph = AttentionGraph(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7)), 16, tile)
    tokens = tile + 4 * data.draw(st.integers(1, 12))
    case = random_case(graph, [data.draw(st.integers(tile, tokens - 2))], tokens, data.draw(st.integers(0, 99)))
    out = run_float32(graph, case)
    np.testing.assert_allclose(out[:, : case.used], case.want[:, : case.used], atol=1e-5)
    np.testing.assert_allclose(out[:, -case.asking :], case.want[:, -case.asking :], atol=1e-5)


def test_a_sequence_that_pads_the_batch_is_the_average_of_nothing() -> None:
    """Its K and V are zero but for the marks, and it sees slot 0: zeros come out, the canary's answer with them."""
    graph = attention_graphs(2, 4, 16)[0]
    case = random_case(graph, [5, 1], 12, seed=3)
    case.k[2:, 0] = 0
    case.v[2:, 0] = 0
    out = run_float32(graph, case)
    assert (out[2:, : case.used] == 0).all()
    np.testing.assert_allclose(out[2:, -1], case.want[2:, -1], atol=1e-5)


def test_the_same_graph_is_the_same_bytes() -> None:
    first, again = (attention_graphs(3, 9, 64)[1].onnx() for _ in range(2))
    assert first == again
    assert attention_graphs(3, 12, 64)[1].onnx() != first


@pytest.mark.parametrize(("kv_heads", "heads", "head_dim"), [(3, 10, 64), (0, 4, 64), (2, 0, 64), (2, 4, 0)])
def test_geometries_that_cannot_be(kv_heads: int, heads: int, head_dim: int) -> None:
    with pytest.raises(UsageError, match=f"{heads} query heads of {head_dim} elements over {kv_heads} "):
        attention_graphs(kv_heads, heads, head_dim)


def test_heads_that_are_not_whole_tiles_of_channels() -> None:
    with pytest.raises(UsageError, match="100"):
        attention_graphs(2, 4, 100)[0].input_shapes(1, 64)


@pytest.mark.parametrize(("kind", "batch", "tokens"), [(0, 0, 64), (0, 1, 0), (1, 2, 64)])
def test_launches_that_no_graph_has(kind: int, batch: int, tokens: int) -> None:
    with pytest.raises(UsageError, match=f"{batch} sequences of {tokens} tokens"):
        attention_graphs(2, 4, 64)[kind].input_shapes(batch, tokens)


@pytest.mark.parametrize(("batch", "tokens", "dimension"), [(1, 8192, 8192), (4096, 64, 8192)])
def test_dimensions_beyond_the_registers(batch: int, tokens: int, dimension: int) -> None:
    with pytest.raises(DimensionTooLarge, match=str(dimension)):
        attention_graphs(2, 4, 64)[0].input_shapes(batch, tokens)


def test_a_tile_with_more_rows_than_a_register_holds() -> None:
    with pytest.raises(DimensionTooLarge, match="8196"):
        attention_graphs(1, 128, 64)[2].input_shapes(1, 64)  # 64 * 128 + 1, to the next multiple of 4

"""The segments' interfaces, and what they refer to in the weights file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from npu.gguf import GGUFFile
from npu.graphs import SegmentGraphs
from npu.model import ModelConfig
from npu.weights import Activations, WeightsPlan, plan_weights
from tests.npu.tiny import TINY, TinyLlama, write_tiny_llama

Q, KV, HIDDEN, HALF, VOCAB = 64, 32, 64, 8, 272  # widths of the tiny model

FIRST_IN = {"residual": ("m", HIDDEN), "cos": ("m", HALF), "sin": ("m", HALF)}
QKV = {"q": (1, "m", Q), "k": (1, "m", KV), "v": ("m", KV)}


def build(folder: Path, model: TinyLlama, activations: Activations) -> tuple[WeightsPlan, list[onnx.ModelProto]]:
    with GGUFFile.open(write_tiny_llama(folder / "tiny.gguf", model)) as opened:
        config = ModelConfig.from_gguf(opened)
        plan = plan_weights(opened, config, activations)
        graphs = SegmentGraphs(opened, config, plan, activations)
        middle = [graphs.middle(layer) for layer in range(config.layers - 1)]
        return plan, [onnx.load_from_string(raw) for raw in (graphs.first(), *middle, graphs.last())]


def shapes(values: list[onnx.ValueInfoProto]) -> dict[str, tuple[int | str, ...]]:
    return {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


def test_segments_take_and_give_what_the_table_says(tmp_path: Path) -> None:
    _, (first, middle, last) = build(tmp_path, TINY, "int8")
    assert shapes(first.graph.input) == FIRST_IN
    assert shapes(first.graph.output) == QKV
    assert shapes(middle.graph.input) == {"attended": ("m", Q), **FIRST_IN}
    assert shapes(middle.graph.output) == {**QKV, "residual_out": ("m", HIDDEN)}
    assert shapes(last.graph.input) == {"attended": ("m", Q), "residual": ("m", HIDDEN), "logit_rows": ("r",)}
    assert shapes(last.graph.output) == {"logits": ("r", VOCAB)}


@pytest.mark.parametrize("activations", ["int8", "fp32"])
@pytest.mark.parametrize("model", [TINY, replace(TINY, value_type="Q8_0", tied_head=False)], ids=["stacked", "apart"])
def test_every_array_of_the_weights_file_is_used_once(
    tmp_path: Path, model: TinyLlama, activations: Activations
) -> None:
    plan, segments = build(tmp_path, model, activations)
    used = []
    for segment in segments:
        for tensor in segment.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                where = {entry.key: entry.value for entry in tensor.external_data}
                used.append((int(where["offset"]), int(where["length"]), tuple(tensor.dims)))
                assert where["location"] == "weights.bin"
    planned = [
        (array.offset, array.nbytes, array.shape)
        for group in plan.groups.values()
        for matrix in group
        for array in matrix.arrays.values()
    ]
    assert sorted(used) == sorted(planned)


@pytest.mark.parametrize(
    ("model", "activations", "products"),
    [
        # per layer: q|k|v, o, gate|up, down; and the head
        (TINY, "int8", [1, 4, 3 + 1]),
        (TINY, "fp32", [1, 4, 3 + 2]),  # the Q8_0 head in two halves
        # attn_v and ffn_up are Q8_0, so q, k, v and gate, up stay apart
        (replace(TINY, value_type="Q8_0"), "int8", [3, 4 + 3, 4 + 1]),
        (replace(TINY, value_type="Q8_0"), "fp32", [4, 5 + 4, 5 + 2]),
        (replace(TINY, matrix_type="F16"), "int8", [0, 0, 1]),
    ],
)
def test_tensors_that_share_an_input_are_multiplied_at_once(
    tmp_path: Path, model: TinyLlama, activations: Activations, products: list[int]
) -> None:
    _, segments = build(tmp_path, model, activations)
    found = [[node for node in segment.graph.node if node.op_type == "MatMulNBits"] for segment in segments]
    assert [len(nodes) for nodes in found] == products
    levels = {
        attribute.i for nodes in found for node in nodes for attribute in node.attribute if "level" in attribute.name
    }
    assert levels == {4 if activations == "int8" else 1}


def test_block_sums_are_taken_once_for_all_that_share_an_input(tmp_path: Path) -> None:
    # q and k are Q4_1 and v is Q4_0: two products with offsets of one input.
    _, (first, _, _) = build(tmp_path, replace(TINY, value_type="Q4_0"), "fp32")
    operations = [node.op_type for node in first.graph.node]
    assert operations.count("Gemm") == 2
    assert operations.count("ReduceSum") == 1


def test_the_inputs_of_q_k_and_v_are_quantised_twice_for_all_products_at_once(tmp_path: Path) -> None:
    _, (first, middle, last) = build(tmp_path, TINY, "int8")
    operations = [node.op_type for node in first.graph.node]
    assert operations.count("Round") == operations.count("Concat") == 1
    assert operations.count("ReduceSum") == 1 + 1  # block sums, and the two parts of the one product
    assert [node.op_type for node in middle.graph.node].count("Round") == 1
    assert "Round" not in [node.op_type for node in last.graph.node]


def test_the_last_segment_drops_unwanted_rows_first(tmp_path: Path) -> None:
    _, (_, _, last) = build(tmp_path, TINY, "int8")
    assert [node.op_type for node in last.graph.node][:2] == ["Gather", "Gather"]
    gathered = {node.input[0]: node.output[0] for node in last.graph.node[:2]}
    assert set(gathered) == {"attended", "residual"}
    assert not [node for node in last.graph.node[2:] if {"attended", "residual"} & set(node.input)]

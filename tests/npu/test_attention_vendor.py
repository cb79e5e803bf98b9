"""The vendor's compiler and simulator on every attention graph: `make test-vendor`.

The simulator stands for what the fused operator computes, not for a board's arithmetic: it rounds once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hostcache.errors import DeviceError, UsageError
from npu.attention_export import attention_job, export_attention, launch_sizes
from npu.attention_graph import AttentionGraph, attention_graphs
from npu.attention_manifest import AttentionManifest
from npu.rknn_cache import CompileCache
from npu.rknn_log import complaints, layer_tables
from npu.rknn_manifest import read_manifest
from npu.rknn_simulator import Simulator
from npu.rknn_toolkit import CompileJob, RknnToolkit
from staging import DEFAULT_BUCKETS
from tests.npu.attention_cases import Case, random_case

pytestmark = pytest.mark.vendor

GEOMETRIES = {
    "SmolLM2-135M": (3, 9, 64),
    "Qwen2.5-0.5B": (2, 14, 64),
    "Qwen2.5-1.5B and the reference": (2, 12, 128),
}
LONGEST = 4096


@pytest.fixture(scope="module")
def toolkit() -> Iterator[RknnToolkit]:
    with RknnToolkit() as toolkit:
        yield toolkit


@pytest.fixture(scope="module", params=list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def simulator(request: pytest.FixtureRequest) -> Iterator[tuple[Simulator, list[AttentionGraph]]]:
    """The graphs as they are exported, with all their launches."""
    sizes = launch_sizes(attention_graphs(*request.param))
    with Simulator(sizes) as simulator:
        yield simulator, list(sizes)


def check(simulator: Simulator, graph: AttentionGraph, case: Case) -> float:
    """Hold a launch against exact attention; returns the largest error of its query rows."""
    out = simulator.run(graph.kind, case.q, case.k, case.v, case.mask)
    assert np.abs(out[:, -case.asking :] - case.want[:, -case.asking :]).max() <= 5e-4  # the answers are at most 1
    got, want = out[:, : case.used], case.want[:, : case.used]
    # Half a step of fp16 around the exact value. Inside it is float32, whose steps are 4e-6 for scores of 60.
    half_step = np.spacing(np.abs(want).astype(np.float16)).astype(np.float64) / 2
    error = np.abs(got - want)
    assert (error <= half_step + 1e-5).all()
    return float(error.max())


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_launch_compiles_to_one_operator(
    toolkit: RknnToolkit, geometry: tuple[int, int, int], tmp_path: Path
) -> None:
    """`export_attention` refuses anything else; the count is stated here again."""
    sizes = launch_sizes(attention_graphs(*geometry))
    manifest = export_attention(sizes, tmp_path / "out", toolkit, CompileCache(tmp_path / "cache"))
    assert read_manifest(AttentionManifest, tmp_path / "out") == manifest
    for file in manifest.files:
        assert {(layer.op, layer.target) for launch in file.launches for layer in launch.table.layers} == {
            ("exSDPAttention", "NPU")
        }
        assert all(len(launch.table.layers) == 1 for launch in file.launches)
        # K and V of the longest launch lie in it once as they came; scores and a second order take the rest.
        longest = max(file.launches, key=lambda launch: launch.tokens).table
        kv_bytes = sum(2 * int(np.prod(shape)) for shape in longest.shapes[1:3])
        assert kv_bytes < longest.internal_bytes


def ragged_case(decode: AttentionGraph, batch: int, tokens: int, spread: float = 1.0) -> Case:
    """One sequence that fills the bucket, the others of any length; values in [-1, 1], as attention averages them."""
    lengths = [tokens - 2, *np.random.default_rng(tokens).integers(1, tokens - 1, batch - 1).tolist()]
    return random_case(decode, lengths, tokens, seed=batch, spread=spread, values="unit")


@pytest.mark.parametrize("tokens", DEFAULT_BUCKETS)
def test_decoding_is_exact_to_half_a_step(simulator: tuple[Simulator, list[AttentionGraph]], tokens: int) -> None:
    """In every launch there is. Half a step below 1 is 2^-12 = 2.4e-4."""
    runs, graphs = simulator
    decode = graphs[0]
    batches = [batch for batch, of_tokens in launch_sizes(graphs)[decode] if of_tokens == tokens]
    assert batches == [1, 2, 4, 8, 16][: len(batches)]
    for batch in batches:
        for spread in (1.0, 8.0):
            assert check(runs, decode, ragged_case(decode, batch, tokens, spread)) <= 5e-4


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_batch_is_as_exact_in_the_longest_bucket(geometry: tuple[int, int, int]) -> None:
    """The planner cuts it, for a staging buffer holds less; the graph itself takes it in one launch."""
    decode = attention_graphs(*geometry)[0]
    with Simulator({decode: ((4, LONGEST),)}) as runs:
        assert check(runs, decode, ragged_case(decode, 4, LONGEST)) <= 5e-4


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_short_context_with_large_values_is_exact_to_half_a_step(
    simulator: tuple[Simulator, list[AttentionGraph]], length: int
) -> None:
    """Results up to 4, where half a step of fp16 is 9.8e-4: no absolute bound below that can hold."""
    runs, (decode, *_) = simulator
    check(runs, decode, random_case(decode, [length] * 4, 64, seed=length, spread=4.0))


@pytest.mark.parametrize(("tile", "tokens"), [(16, 64), (16, LONGEST), (64, 128), (64, LONGEST)])
def test_a_tile_is_exact_to_half_a_step(
    simulator: tuple[Simulator, list[AttentionGraph]], tile: int, tokens: int
) -> None:
    runs, graphs = simulator
    (graph,) = (graph for graph in graphs if graph.tile == tile)
    for length in (tile, tokens - 2):
        case = random_case(graph, [length], tokens, seed=length, values="unit")
        assert check(runs, graph, case) <= 5e-4


def test_a_stale_result_does_not_answer_the_canary(simulator: tuple[Simulator, list[AttentionGraph]]) -> None:
    runs, (decode, *_) = simulator
    first, second = (random_case(decode, [20, 30], 64, seed=seed) for seed in (1, 2))
    stale = runs.run(decode.kind, first.q, first.k, first.v)
    wrong = np.abs(stale[:, -1] - second.want[:, -1]) > 0.015
    assert wrong.any(axis=1).all()  # every head shows it


def test_shapes_that_were_not_compiled_are_refused(simulator: tuple[Simulator, list[AttentionGraph]]) -> None:
    runs, (decode, prefill, _) = simulator
    case = random_case(decode, [5, 6, 7], 64, seed=0)
    with pytest.raises(UsageError, match="decode has no launch of inputs with the shapes"):
        runs.run("decode", case.q, case.k, case.v)
    tile = random_case(prefill, [20], 64, seed=0)
    with pytest.raises(UsageError, match="prefill16 has no launch"):
        runs.run("prefill16", tile.q, tile.k, tile.v)
    with pytest.raises(UsageError, match="no graph 'prefill32', only decode, prefill16, prefill64"):
        runs.run("prefill32", tile.q, tile.k, tile.v, tile.mask)


def test_a_launch_beyond_the_compiler_ends_its_process_and_says_so(toolkit: RknnToolkit) -> None:
    graph = attention_graphs(3, 9, 64)[0]
    with pytest.raises(DeviceError, match="SIGABRT; it said: buffer overflow!!!"), RknnToolkit() as doomed:
        doomed.compile(CompileJob("too long", graph.onnx(), (((3, 72, 1, 4), (3, 72, 1, 65536), (3, 64, 1, 65536)),)))
    toolkit.compile(attention_job(graph, ((1, 64),)))  # another process than that one


def test_a_simulator_goes_on_after_its_process_ended() -> None:
    decode = attention_graphs(3, 9, 64)[0]
    case = random_case(decode, [40], 64, seed=9)
    with Simulator({decode: ((1, 64),)}) as simulator:
        first = simulator.run("decode", case.q, case.k, case.v)
        simulator._toolkit._process.kill()  # as an abort inside the toolkit does
        with pytest.raises(DeviceError, match="SIGKILL"):
            simulator.run("decode", case.q, case.k, case.v)
        assert (simulator.run("decode", case.q, case.k, case.v) == first).all()
    with pytest.raises(UsageError, match="closed"):
        simulator.run("decode", case.q, case.k, case.v)


def test_a_graph_that_is_not_fused_shows_in_the_table(toolkit: RknnToolkit) -> None:
    """The form with another leading axis: what the reader of tables and `require_fused` are there for."""
    import onnx  # noqa: PLC0415 - as in the package

    node, fp16 = onnx.helper.make_node, onnx.TensorProto.FLOAT16
    nodes = [
        node("Transpose", ["k"], ["columns"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "columns"], ["products"]),
        node("Add", ["products", "mask"], ["scores"]),
        node("Softmax", ["scores"], ["weights"], axis=-1),
        node("MatMul", ["weights", "v"], ["out"]),
    ]
    kv = [1, 2, 256, 64]
    shapes = {"q": [1, 2, 8, 64], "k": kv, "v": kv, "mask": [1, 1, 8, 256], "out": [1, 2, 8, 64]}
    *inputs, out = (onnx.helper.make_tensor_value_info(name, fp16, shape) for name, shape in shapes.items())
    graph = onnx.helper.make_graph(nodes, "unfused", inputs, [out])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    log = toolkit.compile(CompileJob("unfused", model.SerializeToString()))
    assert any("fallback to CPU" in complaint for complaint in complaints(log))
    (table,) = layer_tables(log)
    operators = [layer.op for layer in table.layers]
    assert "exSDPAttention" not in operators
    assert operators.count("exMatMul") == 2

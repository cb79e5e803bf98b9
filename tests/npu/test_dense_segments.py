"""The dense segments for the NPU against the decoder that runs on the CPU, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from hostcache.errors import UsageError
from npu.decoder import Decoder
from npu.dense_decoder import SegmentedDecoder
from npu.dense_graph import KEPT_FP16, DenseSegments, Smoothing, as_channels, as_rows
from npu.dense_reference import ReferenceRunner, record
from npu.huggingface import HuggingFaceFolder
from npu.model import ModelConfig
from tests.npu.small_folder import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, write_small_folder

Floats = NDArray[np.float32]
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HuggingFaceFolder]:
    with HuggingFaceFolder.open(write_small_folder(tmp_path / "model", request.param)) as source:
        yield source


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[tuple[HuggingFaceFolder, ModelConfig]]:
    with HuggingFaceFolder.open(write_small_folder(tmp_path / "model", "llama")) as source:
        yield source, ModelConfig.from_gguf(source)


class Attention:
    """Remembers what it was given, and answers with something that depends on all of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Floats, Floats, Floats]] = []

    def __call__(self, layer: int, q: Floats, k: Floats, v: Floats, out: Floats) -> None:
        self.seen.append((q.copy(), k.copy(), v.copy()))
        out[:] = np.tanh(q + (k * v).repeat(HEADS // KV_HEADS, axis=1)) * (layer + 1)


def test_a_step_is_that_of_the_decoder_on_the_cpu(folder: HuggingFaceFolder, tmp_path: Path) -> None:
    """Ten rows in pieces of four, the last of which is padded; logits of some, in an order of their own."""
    config = ModelConfig.from_gguf(folder)
    runner = ReferenceRunner(DenseSegments(folder, config), rows=4)
    decoder = Decoder.load(folder, activations="fp32", cache_dir=tmp_path / "cache")
    tokens = np.arange(10, dtype=np.int32) * 5
    positions = np.array([0, 1, 2, 3, 90, 0, 1, 2, 200, 255], np.int32)
    wanted = np.array([9, 0, 4])
    ours, theirs = Attention(), Attention()
    logits = SegmentedDecoder(folder, config, runner).forward(tokens, positions, wanted, ours)
    expected = decoder.forward(tokens, positions, wanted, theirs)
    assert len(ours.seen) == LAYERS
    for got, want in zip(ours.seen, theirs.seen, strict=True):
        for array, name, heads in zip(got, "qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True):
            assert array.shape == (10, heads, HEAD_DIM), name
        for array, other in zip(got, want, strict=True):
            np.testing.assert_allclose(array, other, atol=1e-4)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected).max() > 1  # what is compared is not all zero


def test_no_logits_are_no_run(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    source, config = llama
    runner = ReferenceRunner(DenseSegments(source, config), rows=2)
    decoder = SegmentedDecoder(source, config, runner)
    none = decoder.forward(np.array([1], np.int32), np.array([0], np.int32), np.empty(0, np.int64), Attention())
    assert none.shape == (0, VOCAB)
    assert [len(runs) for runs in runner.outputs] == [1] * LAYERS + [0]


def test_the_smallest_fitting_number_of_rows_is_run(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    source, config = llama

    class Counting:
        row_counts = (1, 4)

        def __init__(self) -> None:
            self.rows: list[int] = []

        def run(self, index: int, inputs: list[Floats]) -> list[Floats]:
            self.rows.append(len(inputs[0]))
            widths = DenseSegments(source, config).outputs(index).values()
            return [np.zeros((len(inputs[0]), width), np.float32) for width in widths]

    runner = Counting()
    decoder = SegmentedDecoder(source, config, runner)  # type: ignore[arg-type] # takes lists, which it is given
    for rows, expected in ((1, [1]), (2, [4]), (4, [4]), (5, [4, 1]), (10, [4, 4, 4])):
        runner.rows.clear()
        decoder.forward(np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.empty(0, np.int64), Attention())
        assert runner.rows == expected * LAYERS


def test_a_step_that_cannot_be(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    source, config = llama
    decoder = SegmentedDecoder(source, config, ReferenceRunner(DenseSegments(source, config), 2), max_rows=3)
    with pytest.raises(UsageError, match="token id 60 is not within 0 to 59"):
        decoder.forward(np.array([VOCAB], np.int32), np.zeros(1, np.int32), np.empty(0, np.int64), Attention())
    with pytest.raises(UsageError, match="a step has 1 to 3 tokens, got 4"):
        decoder.forward(np.zeros(4, np.int32), np.zeros(4, np.int32), np.empty(0, np.int64), Attention())


def test_segments_and_their_values(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    segments = DenseSegments(*llama)
    assert [segments.name(index) for index in range(len(segments))] == ["first", "middle-0", "middle-1", "last"]
    assert segments.inputs(0) == {"residual": HIDDEN}
    assert segments.outputs(0) == {"q": 64, "k": 32, "v": 32}
    assert segments.inputs(1) == {"attended": 64, "residual": HIDDEN}
    assert segments.outputs(2) == {"residual_out": HIDDEN, "q": 64, "k": 32, "v": 32}
    assert segments.outputs(3) == {"logits": VOCAB}
    for index in range(4):
        model = onnx.load_from_string(segments.onnx(index))
        onnx.checker.check_model(model, full_check=True)
        for declared, values in (
            (model.graph.input, segments.inputs(index)),
            (model.graph.output, segments.outputs(index)),
        ):
            shapes = {
                value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
                for value in declared
            }
            assert shapes == {name: [1, channels, 1, "rows"] for name, channels in values.items()}
            assert {value.type.tensor_type.elem_type for value in declared} == {onnx.TensorProto.FLOAT16}


def test_what_stays_in_fp16_is_there(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    """A name that the graph does not have would be passed over, and the value become int8."""
    segments = DenseSegments(*llama)
    made = [{node.output[0] for node in onnx.load_from_string(segments.onnx(index)).graph.node} for index in range(4)]
    assert set(KEPT_FP16) <= made[1]
    assert set(KEPT_FP16) <= made[2]
    assert "normed" in made[0]


def test_the_same_segment_is_the_same_bytes(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    segments = DenseSegments(*llama)
    assert segments.onnx(1) == segments.onnx(1)
    assert segments.onnx(1) != segments.onnx(2)


def test_channels_and_rows() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    channels = as_channels(rows)
    assert channels.shape == (1, 3, 1, 2)
    assert channels[0, 2, 0, 1] == 5
    assert (as_rows(channels) == rows).all()


def test_smoothing_changes_no_result(folder: HuggingFaceFolder) -> None:
    config = ModelConfig.from_gguf(folder)
    tokens = np.arange(24, dtype=np.int32).reshape(3, 8)
    reference = record(folder, config, tokens)

    class Smoothed(DenseSegments):
        def onnx(
            self,
            index: int,
            dtype: type[np.float16 | np.float32] = np.float16,
            *,
            smoothing: Smoothing | None = None,
            probed: bool = False,
        ) -> bytes:
            assert smoothing is None
            return super().onnx(index, dtype, smoothing=reference.smoothing(index), probed=probed)

    runner = ReferenceRunner(Smoothed(folder, config), rows=8)
    for index, runs in enumerate(reference.inputs):
        for inputs, outputs in zip(runs, reference.outputs[index], strict=True):
            for got, want in zip(runner.run(index, inputs), outputs, strict=True):
                # Weights are rounded to fp16 anew: half a step is 4.9e-4 of each.
                assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


def test_smoothing_halves_the_spread(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    """Divided by the root of peak over weights' peak, up to one factor for all: by hand from what was recorded."""
    source, config = llama
    segments = DenseSegments(source, config)
    reference = record(source, config, np.arange(24, dtype=np.int32).reshape(3, 8))
    smoothing = reference.smoothing(1)
    assert set(smoothing) == {"mlp_normed", "swiglu", "normed"}
    assert set(reference.smoothing(0)) == {"normed"}
    assert set(reference.smoothing(LAYERS)) == {"mlp_normed", "swiglu"}
    # What layer 1 reads is the normed residual behind layer 0, which was recorded.
    residual = np.concatenate([outputs[0] for outputs in reference.outputs[1]])
    normed = residual / np.sqrt(np.square(residual).mean(axis=1, keepdims=True) + 1e-5)
    peak = np.abs(normed * segments.tensor("blk.1.attn_norm.weight")[0]).max(axis=0)
    weights = np.concatenate([segments.tensor(f"blk.1.attn_{name}.weight") for name in "qkv"])
    ratio = np.sqrt(peak / np.abs(weights).max(axis=0))
    np.testing.assert_allclose(smoothing["normed"] / smoothing["normed"][0], ratio / ratio[0], rtol=1e-3)
    assert abs(float(np.log(smoothing["normed"]).mean())) < 1e-5


def test_texts_do_not_see_each_other(llama: tuple[HuggingFaceFolder, ModelConfig]) -> None:
    source, config = llama
    together = record(source, config, np.arange(24, dtype=np.int32).reshape(3, 8))
    alone = record(source, config, np.arange(8, 16, dtype=np.int32).reshape(1, 8))
    for index in range(LAYERS + 1):
        np.testing.assert_allclose(together.outputs[index][1][0], alone.outputs[index][0][0], atol=1e-5)

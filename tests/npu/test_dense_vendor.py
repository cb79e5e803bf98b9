"""Segments of the demo's model in the vendor's simulator, fed with what a real text makes of it: `make test-vendor`.

Nothing here tells what a board's arithmetic gives: the simulator rounds the outputs of operators, and computes inside
them in float32. A norm of values around 25,000, whose squares fp16 cannot hold, is such an inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu.decoder import Decoder
from npu.dense_decoder import SegmentedDecoder
from npu.dense_export import Calibration
from npu.dense_graph import DenseSegments, as_channels, as_rows
from npu.dense_probe import QUESTIONS, Probe
from npu.dense_reference import ReferenceRunner, record
from npu.model import ModelConfig
from npu.rknn_cache import CompileCache, require_on_npu
from npu.rknn_toolkit import CompileJob, RknnToolkit
from npu.source import ModelSource, open_model
from npu.text import tokenizer_of
from tests.npu.small_folder import write_small_folder
from tests.npu.test_dense_segments import Attention
from tools.demo import SYSTEM

pytestmark = pytest.mark.vendor

TEXT = (
    "A bearing runs hot for one of a few reasons. There is too much grease in it, or too little; the shaft is not in "
    "line with the motor; the load is higher than it was made for; or dirt has come past the seal. Look at the "
    "temperature over a day before anything is taken apart, and write down what was changed and when it was changed."
)
"""Not what int8 was calibrated by."""

SAMPLED = (0, 2, 13, 20)
"""First, an early one, the one behind which single values reach 25,000, and one that carries them on."""


@pytest.fixture(scope="module")
def toolkit() -> Iterator[RknnToolkit]:
    with RknnToolkit() as toolkit:
        yield toolkit


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Iterator[tuple[ModelSource, ModelConfig]]:
    with open_model(demo_model) as source:
        yield source, ModelConfig.from_gguf(source)


@pytest.fixture(scope="module")
def segments(model: tuple[ModelSource, ModelConfig]) -> DenseSegments:
    return DenseSegments(*model)


@pytest.fixture(scope="module")
def reference(model: tuple[ModelSource, ModelConfig], demo_model: Path) -> ReferenceRunner:
    with open_model(demo_model) as source:
        tokens = tokenizer_of(source).encode(TEXT)[:64]
    assert len(tokens) == 64
    return record(*model, tokens.astype(np.int32)[np.newaxis])


@pytest.fixture(scope="module")
def calibration(model: tuple[ModelSource, ModelConfig], demo_model: Path) -> Calibration:
    with open_model(demo_model) as source:
        return Calibration(*model, tokenizer_of(source).encode(SYSTEM))


def errors(toolkit: RknnToolkit, job: CompileJob, reference: ReferenceRunner, index: int, rows: int) -> list[float]:
    """Relative error of each output against float32, over the whole text, `rows` at a time."""
    handle = toolkit.build(job)
    (inputs,), (outputs,) = reference.inputs[index], reference.outputs[index]
    runs = [toolkit.run(handle, [as_channels(x[start : start + rows]) for x in inputs]) for start in range(0, 64, rows)]
    results = [np.concatenate([as_rows(out) for out in parts]) for parts in zip(*runs, strict=True)]
    return [
        float(np.linalg.norm(got - want) / np.linalg.norm(want)) for got, want in zip(results, outputs, strict=True)
    ]


def shapes(segments: DenseSegments, index: int, rows: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple((1, channels, 1, count) for channels in segments.inputs(index).values()) for count in rows)


@pytest.mark.parametrize("index", SAMPLED)
def test_fp16_is_as_exact_as_fp16(
    toolkit: RknnToolkit, segments: DenseSegments, reference: ReferenceRunner, index: int
) -> None:
    """Half a step of fp16 is 4.9e-4; a few of them add up."""
    job = CompileJob(segments.name(index), segments.onnx(index), shapes(segments, index, (4, 16, 64)))
    for rows in (4, 16, 64):
        assert max(errors(toolkit, job, reference, index, rows)) < 1e-3


def test_the_head_in_fp16(toolkit: RknnToolkit, segments: DenseSegments, reference: ReferenceRunner) -> None:
    """The residual falls from 25,000 to 100 before it, so that more of fp16's steps are left in the result."""
    index = len(segments) - 1
    job = CompileJob(segments.name(index), segments.onnx(index), shapes(segments, index, (64,)))
    assert max(errors(toolkit, job, reference, index, 64)) < 3e-3


@pytest.mark.parametrize("index", SAMPLED)
def test_w8a8_follows_a_text_it_was_not_calibrated_by(
    toolkit: RknnToolkit,
    segments: DenseSegments,
    reference: ReferenceRunner,
    calibration: Calibration,
    index: int,
) -> None:
    """Queries and keys within 6 %, values within 10 %; the residual stream too.

    Its error is largest in layer 1, where single values grow tenfold, and not as far in the calibration's text.
    """
    *residual, q, k, v = errors(toolkit, calibration.job(segments, index, 16), reference, index, 16)
    assert max(q, k) < 0.06
    assert v < 0.1
    assert max(residual, default=0) < 0.15


@pytest.mark.parametrize("index", SAMPLED)
def test_everything_runs_on_the_npu(
    toolkit: RknnToolkit, segments: DenseSegments, calibration: Calibration, index: int, tmp_path: Path
) -> None:
    """And int8 holds its weights in less memory: all but the MLP's output projection in half."""
    fp16 = CompileJob(segments.name(index), segments.onnx(index), shapes(segments, index, (4, 16, 64)))
    int8 = calibration.job(segments, index, 16)
    made = [CompileCache(tmp_path).compile(toolkit, job) for job in (fp16, int8)]
    for job, compiled in zip((fp16, int8), made, strict=True):
        require_on_npu(job, compiled)
        assert len(compiled.tables) == len(job.shapes)
    weights = [compiled.tables[0].weight_bytes for compiled in made]
    assert 0.5 <= weights[1] / weights[0] < 0.65
    assert {layer.dtype for layer in made[0].tables[0].layers} == {"FLOAT16"}
    assert {layer.dtype for layer in made[1].tables[0].layers} == {"FLOAT16", "INT8"}


def prove(toolkit: RknnToolkit, job: CompileJob, reference: ReferenceRunner, index: int) -> None:
    """Learn a segment's answers beside zeros in its smallest launch; ask beside a text in all of them."""
    handle = toolkit.build(job)
    (text,) = reference.inputs[index]
    probe = Probe([x.shape[1] for x in text])

    def ask(number: int, inputs: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        rows = [
            np.concatenate((x, [y.astype(np.float32)])) for x, y in zip(inputs, probe.questions[number], strict=True)
        ]
        return [as_rows(out)[-1] for out in toolkit.run(handle, [as_channels(x) for x in rows])]

    counts = [count for ((_, _, _, count), *_) in job.shapes]
    probe.learn(lambda number: ask(number, [np.zeros_like(x[: counts[0] - 1]) for x in text]))
    for count in counts:
        for number in range(QUESTIONS):
            probe.check(number, count, ask(number, [x[: count - 1] for x in text]))


@pytest.mark.parametrize("index", [*SAMPLED, 30])
def test_a_launch_in_fp16_answers_its_question_whatever_lies_beside_it(
    toolkit: RknnToolkit, segments: DenseSegments, reference: ReferenceRunner, index: int
) -> None:
    job = CompileJob(segments.name(index), segments.onnx(index), shapes(segments, index, (4, 16, 64)))
    prove(toolkit, job, reference, index)


@pytest.mark.parametrize("index", SAMPLED)
def test_a_launch_in_w8a8_does_so_too(
    toolkit: RknnToolkit, segments: DenseSegments, reference: ReferenceRunner, calibration: Calibration, index: int
) -> None:
    prove(toolkit, calibration.job(segments, index, 16), reference, index)


class Simulated:
    """Runs segments by the vendor's simulator; see `npu.dense_decoder.SegmentRunner`."""

    row_counts = (4, 16)

    def __init__(self, toolkit: RknnToolkit, segments: DenseSegments) -> None:
        self._toolkit = toolkit
        self._handles = [
            toolkit.build(
                CompileJob(segments.name(index), segments.onnx(index), shapes(segments, index, self.row_counts))
            )
            for index in range(len(segments))
        ]

    def run(self, index: int, inputs: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        return [as_rows(out) for out in self._toolkit.run(self._handles[index], [as_channels(x) for x in inputs])]

    def close(self) -> None:
        pass  # the toolkit serves other tests


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_whole_model_in_fp16_is_that_of_the_cpu(toolkit: RknnToolkit, tmp_path: Path, family: str) -> None:
    """Three layers, in launches of 16 rows and 4; values around 1, whose steps in fp16 are up to 1/1024."""
    tokens = np.arange(19, dtype=np.int32) * 3
    positions = np.array([*range(12), *range(7)], np.int32)
    wanted = np.array([18, 0, 11])
    ours, theirs = Attention(), Attention()
    with open_model(write_small_folder(tmp_path / "model", family)) as source:
        config = ModelConfig.from_gguf(source)
        decoder = SegmentedDecoder(source, config, Simulated(toolkit, DenseSegments(source, config)))
        exact = Decoder.load(source, activations="fp32", cache_dir=tmp_path).forward(tokens, positions, wanted, theirs)
        logits = decoder.forward(tokens, positions, wanted, ours)
    for got, want in zip(ours.seen, theirs.seen, strict=True):
        for array, other in zip(got, want, strict=True):
            assert np.abs(array - other).max() < 0.02
    assert np.abs(logits - exact).max() < 0.02
    assert np.abs(exact).max() > 1  # what is compared is not all zero


def test_rows_share_the_weights(toolkit: RknnToolkit, segments: DenseSegments, tmp_path: Path) -> None:
    """Three numbers of rows in one file take 10 % more of it than one: commands, not a second copy."""
    sizes = []
    for rows in ((1,), (4, 16, 64)):
        job = CompileJob("rows", segments.onnx(5), shapes(segments, 5, rows))
        sizes.append(CompileCache(tmp_path).compile(toolkit, job).path.stat().st_size)
    assert sizes[0] < sizes[1] < 1.1 * sizes[0]

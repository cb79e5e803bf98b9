"""Whole answers by the vendor's C library, over the stub of it: the CPU's tokens, whatever fails or stays staged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.staged import StagedAttention
from tests.npu.driving import drive
from tests.npu.rknnrt_bed import RknnrtBed
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.tiny import TinyLlama, write_tiny_llama

MODEL = TinyLlama(layers=3, head_dim=32, heads=6, kv_heads=2, tied_head=False)

PROMPTS = ([5, 80, 33], list(range(3, 73)), list(range(200, 180, -1)))
"""Three, seventy and twenty tokens: all three graphs are run."""

ANSWER = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", MODEL)


@pytest.fixture(scope="module")
def graphs(model: Path) -> Path:
    return export_stub_graphs(model.parent, MODEL.kv_heads, MODEL.heads, MODEL.head_dim)


def load(model: Path, runtime: str, graphs: Path | None = None, resident_bytes: int = 0) -> Engine:
    """fp32 activations: int8 ones make steps of the differences in the last digit of fp16."""
    return Engine.load(
        model,
        runtime=runtime,
        graphs=graphs,
        resident_bytes=resident_bytes,
        activations="fp32",
        pool_bytes=4 << 20,
        cache_dir=model.parent,
    )


def answers(engine: Engine, salt: str = "") -> list[tuple[int, ...]]:
    """The most likely tokens behind each prompt, computed together; `salt` keeps them from sharing older KV."""
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    ids = [engine.add_request(prompt, params, salt=salt) for prompt in PROMPTS]
    outputs = drive(engine)
    return [tuple(token for output in outputs[request] for token in output.token_ids) for request in ids]


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[tuple[int, ...]]]:
    with load(model, "cpu") as engine:
        yield answers(engine)


@pytest.mark.parametrize("resident_bytes", [0, 4 << 20])
def test_the_tokens_are_those_of_the_cpu(
    rknnrt_bed: RknnrtBed, model: Path, graphs: Path, expected: list[tuple[int, ...]], resident_bytes: int
) -> None:
    with load(model, "rknnrt", graphs, resident_bytes) as engine:
        assert answers(engine) == expected
        runtime = engine.runtime
        assert isinstance(runtime, StagedAttention)
        assert (runtime.cores.failures, runtime.cores.on_host) == (0, 0)
        # Step by step: three prompts' first chunks; the rest of the longest, and a batch of the two others; ten
        # batches of all, in the buckets of 64 and 128 tokens; the last token of the longest. Each in three layers.
        assert runtime.cores.launches == 3 * (3 + 2 + 2 * (ANSWER - 2) + 1)
        if resident_bytes:
            assert runtime.residency is not None
            # Each of the batches in 64 and the sequence in 128 tokens is gathered whole once, in each layer.
            assert (runtime.residency.counts.grown, runtime.residency.counts.whole) == (3 * (10 + 10), 3 * 2)


@pytest.mark.parametrize(
    "faults",
    [
        "rknn_run@4=-1 rknn_run@9=stale rknn_run@15=garbage rknn_run@22=timeout:10",
        "rknn_set_io_mem@5=-5 rknn_set_io_mem@9=stale rknn_set_io_mem@20=garbage rknn_set_input_shapes@3=garbage",
        "rknn_create_mem_from_fd@2=-1 rknn_create_mem_from_fd@7=stale rknn_create_mem_from_fd@11=garbage",
        "rknn_run@core1=stale",
        "rknn_run@all=-1",
    ],
)
def test_no_fault_changes_a_token(
    rknnrt_bed: RknnrtBed, model: Path, graphs: Path, expected: list[tuple[int, ...]], faults: str
) -> None:
    with load(model, "rknnrt", graphs, 4 << 20) as engine:
        rknnrt_bed.stub.fail(faults)
        assert answers(engine) == expected
        assert isinstance(engine.runtime, StagedAttention)
        assert engine.runtime.cores.failures > 0

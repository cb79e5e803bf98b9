"""A model's tokens through the vendor's wheel are those of the CPU, whatever fails. See `make test-arm64`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.staged import StagedAttention
from tests.board.stub import Stub
from tests.npu.driving import drive
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.tiny import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.arm64

MODEL = TinyLlama(layers=3, head_dim=32, heads=6, kv_heads=2, tied_head=False)

PROMPTS = ([5, 80, 33], list(range(3, 73)), list(range(200, 180, -1)))
"""Three, seventy and twenty tokens: all three graphs are run."""

ANSWER = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", MODEL)


def load(model: Path, runtime: str, graphs: Path | None = None) -> Engine:
    """fp32 activations: int8 ones make steps of the differences in the last digit of fp16."""
    return Engine.load(
        model, runtime=runtime, graphs=graphs, activations="fp32", pool_bytes=4 << 20, cache_dir=model.parent
    )


def answers(engine: Engine, salt: str) -> list[tuple[int, ...]]:
    """The most likely tokens behind each prompt, computed together; `salt` keeps them from sharing older KV."""
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    ids = [engine.add_request(prompt, params, salt=salt) for prompt in PROMPTS]
    outputs = drive(engine)
    return [tuple(token for output in outputs[request] for token in output.token_ids) for request in ids]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    with load(model, "cpu") as engine:
        return answers(engine, "")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    graphs = export_stub_graphs(model.parent, MODEL.kv_heads, MODEL.heads, MODEL.head_dim)
    with load(model, "rknnlite", graphs) as engine:
        yield engine
    assert Stub().contexts == 0


def test_the_tokens_are_those_of_the_cpu(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    assert answers(engine, "well") == expected
    assert len({token for answer in expected for token in answer}) > ANSWER  # no endless repetition
    assert isinstance(engine.runtime, StagedAttention)
    cores = engine.runtime.cores
    assert (cores.failures, cores.on_host) == (0, 0)
    # Step by step: three prompts' first chunks; the rest of the longest, and a batch of the two others; ten batches of
    # all, in the buckets of 64 and 128 tokens; the last token of the longest. Each in three layers.
    assert cores.launches == 3 * (3 + 2 + 2 * (ANSWER - 2) + 1)


@pytest.mark.parametrize(
    "faults",
    [
        "rknn_run@4=-1 rknn_run@9=stale rknn_run@15=garbage rknn_run@22=timeout:10",
        "rknn_outputs_get@4=-9 rknn_outputs_get@9=stale rknn_outputs_get@15=garbage rknn_query@7=garbage",
        "rknn_inputs_set@4=-5 rknn_inputs_set@9=stale rknn_set_input_shapes@3=garbage rknn_set_input_shapes@12=-5",
        "rknn_run@core1=stale",
        "rknn_run@all=-1",
    ],
)
def test_no_fault_changes_a_token(engine: Engine, expected: list[tuple[int, ...]], faults: str) -> None:
    assert isinstance(engine.runtime, StagedAttention)
    failures = engine.runtime.cores.failures
    stub = Stub()
    stub.fail(faults)
    try:
        assert answers(engine, faults) == expected
    finally:
        stub.fail("")
    assert engine.runtime.cores.failures > failures

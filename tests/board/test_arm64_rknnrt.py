"""The vendor's C library, or a stub of it, without its wheel: the same answers on arm64. See `make test-arm64`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from npu.engine import Engine
from npu.rknnrt import LIBRARY
from npu.runtimes import open_runtime
from npu.sampler import SamplingParams
from npu.staged import StagedAttention
from tests.board.stub_board import stub_graphs, stub_world
from tests.npu.driving import drive
from tests.npu.rknnrt_bed import RknnrtBed
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.test_emulated_attention import HEADS
from tests.npu.tiny import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.arm64

MODEL = TinyLlama(layers=2, head_dim=32, heads=6, kv_heads=2, tied_head=False)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RknnrtBed]:
    bed = RknnrtBed(LIBRARY, tmp_path, monkeypatch)
    yield bed
    bed.close()


def test_launches_are_right_on_every_core_and_after_any_fault(bed: RknnrtBed, tmp_path: Path) -> None:
    world = stub_world()
    with closing(open_runtime("rknnrt", world.cache, HEADS, graphs=stub_graphs(tmp_path))) as runtime:
        assert isinstance(runtime, StagedAttention)
        for step, faults in enumerate(("", "", "rknn_run@1=stale", "rknn_run@2=-1", "rknn_set_io_mem@4=-5")):
            bed.stub.fail(faults)
            out, layer = world.attend(runtime, step % 2), step % 2
            assert np.abs(out - world.expected(layer)).max() <= world.bound("output", layer)
        assert (runtime.cores.failures, runtime.cores.on_host) == (3, 0)


def test_the_tokens_are_those_of_the_cpu(bed: RknnrtBed, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", MODEL)
    graphs = export_stub_graphs(tmp_path, MODEL.kv_heads, MODEL.heads, MODEL.head_dim)
    answers = []
    for runtime, resident_bytes in (("cpu", 0), ("rknnrt", 4 << 20)):
        with Engine.load(
            model,
            runtime=runtime,
            graphs=graphs,
            resident_bytes=resident_bytes,
            activations="fp32",
            pool_bytes=4 << 20,
            cache_dir=tmp_path,
        ) as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            ids = [engine.add_request(prompt, params) for prompt in ([5, 80, 33], list(range(3, 53)))]
            outputs = drive(engine)
            answers.append([tuple(token for output in outputs[one] for token in output.token_ids) for one in ids])
    assert answers[0] == answers[1]
    assert isinstance(engine.runtime, StagedAttention)
    assert engine.runtime.cores.failures == 0
    assert engine.runtime.residency is not None
    assert engine.runtime.residency.counts.grown > 0

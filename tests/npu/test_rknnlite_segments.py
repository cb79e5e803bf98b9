"""Dense segments on a board, with a stand-in for the vendor's wheel that computes the graphs."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, DeviceError, RegionError, UsageError
from hostcache.memory_budget import MemoryBudget
from npu.board_device import NPU
from npu.decoder import Decoder
from npu.dense_folder import DenseFolder
from npu.dense_manifest import DenseManifest
from npu.dense_probe import QUESTIONS
from npu.device_lock import DeviceLock
from npu.discovery import discover
from npu.engine import Engine
from npu.machine import Machine
from npu.model import ModelConfig
from npu.model_memory import plan_model
from npu.rknn_manifest import read_manifest
from npu.rknnlite_segments import RknnLiteSegments
from npu.sampler import SamplingParams
from npu.source import open_model
from tests.npu.driving import drive
from tests.npu.rknnlite_stand_in import Board
from tests.npu.small_folder import LAYERS, write_small_folder
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.stub_segments import export_stub_segments
from tests.npu.test_dense_segments import Attention
from tests.npu.tiny import TINY, TinyLlama, write_tiny_llama
from tests.tools.command_line import run_here

Floats = NDArray[np.float32]
SEGMENTS = TINY.layers + 1
PROVING = SEGMENTS * QUESTIONS * 4
"""Runs that loading takes: all questions to be learnt, and for each of three numbers of rows."""
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def dense(model: Path) -> Path:
    return export_stub_segments(model.parent, model)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Board]:
    """A board that says nothing of its NPU, which no other process of this machine can hold."""
    monkeypatch.setattr("npu.device_lock.lock_folders", lambda: [tmp_path])
    monkeypatch.setattr("npu.runtimes.discover", lambda: discover(Machine(tmp_path / "nothing")))
    board = Board()
    board.install(monkeypatch)
    yield board
    assert board.alive == []
    DeviceLock(NPU).release()  # nobody holds it any more


def opened(folder: Path, **options: Any) -> RknnLiteSegments:
    return RknnLiteSegments(folder, read_manifest(DenseManifest, folder), **options)


@contextmanager
def runner(folder: Path, **options: Any) -> Iterator[RknnLiteSegments]:
    segments = opened(folder, **options)
    try:
        yield segments
    finally:
        segments.close()


def residual(rows: int, seed: int = 0) -> list[Floats]:
    """What the first segment reads."""
    return [np.random.default_rng(seed).standard_normal((rows, TINY.hidden), np.float32)]


# --- the way through it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_step_is_that_of_the_decoder_on_the_cpu(board: Board, tmp_path: Path, family: str) -> None:
    """Twenty rows are launches of 15 and 5; a row of each is not theirs. Values around 1, by products in fp16."""
    folder = write_small_folder(tmp_path / "model", family)
    segments = export_stub_segments(tmp_path, folder, rows=(4, 16))
    tokens = np.arange(20, dtype=np.int32) * 3
    positions = np.array([*range(15), *range(5)], np.int32)
    wanted = np.array([19, 0, 14])
    ours, theirs = Attention(), Attention()
    with open_model(folder) as source:
        exact = Decoder.load(source, activations="fp32", cache_dir=tmp_path).forward(tokens, positions, wanted, theirs)
        decoder = DenseFolder(segments, source, cache_dir=tmp_path).load(max_rows=32)
    board.runs.clear()
    logits = decoder.forward(tokens, positions, wanted, ours)
    assert board.runs == [(0, 16), (0, 16)] * LAYERS + [(0, 4)]
    decoder.close()
    for got, want in zip(ours.seen, theirs.seen, strict=True):
        for array, other in zip(got, want, strict=True):
            assert np.abs(array - other).max() < 0.02
    assert np.abs(logits - exact).max() < 0.02
    assert np.abs(exact).max() > 1  # what is compared is not all zero


def test_a_segment_is_loaded_once_on_one_core_and_given_back(board: Board, dense: Path) -> None:
    with runner(dense) as segments:
        assert segments.row_counts == (3, 15, 63)
        assert len(board.alive) == SEGMENTS
        assert len(board.runs) == PROVING
        for rows in (3, 63):
            outputs = segments.run(0, residual(rows))
            assert [output.shape for output in outputs] == [(rows, 64), (rows, 32), (rows, 32)]
    segments.close()
    assert {core for core, _ in board.runs} == {0}
    assert board.calls["init_runtime"] == board.calls["release"] == SEGMENTS


def test_a_model_answers_as_on_the_cpu(
    board: Board, model: Path, dense: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    run = ("run", str(model), "--prompt", "a bearing", "--max-tokens", "4", "--ignore-eos", "--activations", "fp32")
    on_cpu = run_here(capsys, *run, "--runtime", "cpu")
    assert run_here(capsys, *run, "--runtime", "cpu", "--dense", str(dense)) == on_cpu
    assert on_cpu.status == 0
    # The prompt is one launch of each segment, and each of three further tokens another.
    assert len(board.runs) == PROVING + 4 * SEGMENTS


def test_likelihoods_are_those_of_the_cpu_within_fp16(board: Board, model: Path, dense: Path) -> None:
    """Two steps of fp16 between 32 and 64, where the logits of this model reach."""
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, activations="fp32") as engine:
        ids = engine.tokenizer.encode("there is a bearing in the other end")
        exact = engine.score(ids)
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=dense) as engine:
        score = engine.score(ids)
    assert 32 < np.abs(exact.logprobs).max() < 64
    assert np.abs(score.logprobs - exact.logprobs).max() < 2 / 32


def test_attention_and_dense_segments_share_the_npu(board: Board, model: Path, dense: Path, tmp_path: Path) -> None:
    graphs = export_stub_graphs(tmp_path, TINY.kv_heads, TINY.heads, TINY.head_dim)
    options: dict[str, Any] = {"pool_bytes": 1 << 20, "cache_dir": model.parent, "activations": "fp32"}
    with Engine.load(model, **options, runtime="cpu") as engine:
        expected = "".join(engine.generate("a bearing", GREEDY))
    with Engine.load(model, **options, runtime="rknnlite", graphs=graphs, dense=dense) as engine:
        assert len(board.alive) == SEGMENTS + 3 * 3
        assert "".join(engine.generate("a bearing", GREEDY)) == expected
        assert engine.runtime.name == "rknnlite"


def test_numerics_keep_what_was_computed_otherwise_out_of_the_prefix_cache(
    board: Board, model: Path, dense: Path, tmp_path: Path
) -> None:
    int8 = export_stub_segments(tmp_path, model, calibrated_by=np.arange(64, dtype=np.int32))
    names = []
    for folder in (None, dense, int8, dense):
        with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=folder) as engine:
            names.append(engine._runner.numerics())
    assert names[1] == names[3]
    assert len(set(names)) == 3
    with runner(dense) as segments, open_model(model) as source:
        assert segments.numerics.startswith("rknnlite-dense-2.5.0-fp16-")
        rope = ModelConfig.from_gguf(source).rope.identity(TINY.head_dim)
        decoder = DenseFolder(dense, source, cache_dir=model.parent).load(max_rows=4)
        assert decoder.numerics.startswith(segments.numerics)
        assert rope in decoder.numerics
        decoder.close()


def test_memory_is_asked_for_before_anything_is_loaded(
    board: Board, model: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the NPU holds counts in place of the weights that the CPU would."""
    monkeypatch.setattr("npu.model_memory.scarcest_budget", lambda: MemoryBudget(None, limit=1, available=1))
    needed = []
    for folder in (None, dense):
        with pytest.raises(RegionError) as refused:
            Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=folder)
        needed.append(refused.value.values["needed"])
    with open_model(model) as source:
        on_cpu = plan_model(source, "int8", runtime="cpu", pool_asked=1 << 20, ram_bytes=1, reserve_bytes=0)
    assert needed[0] == on_cpu.needed_bytes
    assert needed[1] == needed[0] - on_cpu.weights_bytes + read_manifest(DenseManifest, dense).npu_bytes
    assert board.calls.total() == 0


# --- what goes wrong in a run -----------------------------------------------------------------------------------------

FAULTS = [
    (("set_inputs", Exception("Set inputs failed. error code: RKNN_ERR_FAIL")), "set_inputs failed"),
    (("set_inputs", "stale"), "do not answer this launch"),
    (("run", -1), "run returned -1"),
    (("run", "stale"), "3 of 3 outputs do not answer this launch"),
    (("run", "garbage"), "3 of 3 outputs do not answer this launch"),
    (("get_outputs", Exception("E Get outputs failed")), "get_outputs failed"),
    (("get_outputs", []), "get_outputs returned"),
    (
        ("get_outputs", [np.full((1, size, 1, 4), np.nan, np.float32) for size in (64, 32, 32)]),
        "do not answer this launch",
    ),
]


@pytest.mark.parametrize(("fault", "logged"), FAULTS)
def test_a_run_that_fails_is_done_once_more(
    board: Board, dense: Path, caplog: pytest.LogCaptureFixture, fault: tuple[str, Any], logged: str
) -> None:
    call, deed = fault
    with runner(dense) as segments:
        expected = [output.copy() for output in segments.run(0, residual(3))]
        segments.run(0, residual(3, seed=1))  # what an old result would be
        board.faults[call, board.calls[call] + 1] = deed
        with caplog.at_level(logging.WARNING):
            for got, want in zip(segments.run(0, residual(3)), expected, strict=True):
                np.testing.assert_array_equal(got, want)
    (message,) = caplog.messages
    assert message.startswith("dense segment first is run again: ")
    assert logged in message


@pytest.mark.parametrize("between", [[], [15], [15, 15], [15, 63, 15]])
def test_an_old_result_of_as_many_rows_is_found_out(
    board: Board, dense: Path, caplog: pytest.LogCaptureFixture, between: list[int]
) -> None:
    """Launches of other numbers of rows, which have results of their own, may lie between."""
    with runner(dense) as segments:
        for rows in (3, *between):
            segments.run(1, [*residual(rows), *residual(rows)])
        board.faults["run", board.calls["run"] + 1] = "stale"
        segments.run(1, [*residual(3, seed=1), *residual(3, seed=2)])
    assert "4 of 4 outputs do not answer this launch" in caplog.text


def test_a_failed_step_loses_no_request(board: Board, model: Path, dense: Path) -> None:
    """A prompt is being computed beside a sequence that decodes; both go on as if nothing had been."""

    def answers(engine: Engine, fail: bool) -> dict[int, list[int]]:
        first = engine.add_request("the inn", GREEDY)
        outputs = engine.step()
        second = engine.add_request("a bearing in the rain", GREEDY)
        if fail:
            now = board.calls["run"]
            board.faults |= {("run", now + 2): -1, ("run", now + 3): -2}
            with pytest.raises(DeviceError, match=r"dense segment middle-0 failed twice, .* run returned -2: RKNN_ERR"):
                engine.step()
        outputs += [output for request in drive(engine).values() for output in request]
        tokens: dict[int, list[int]] = {first: [], second: []}
        for output in outputs:
            tokens[output.request_id] += output.token_ids
        return tokens

    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=dense) as engine:
        expected = answers(engine, fail=False)
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=dense) as engine:
        assert answers(engine, fail=True) == expected
    assert [len(tokens) for tokens in expected.values()] == [6, 6]


def test_a_run_that_never_ends_is_waited_for_and_then_an_error(
    board: Board, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    with runner(dense, seconds=0.2) as segments:
        expected = [output.copy() for output in segments.run(0, residual(3))]
        board.faults["run", board.calls["run"] + 1] = lambda: go_on.wait(30)
        with pytest.raises(DeviceError, match=r"failed twice, .*a run has not ended in 0\.2 s: the NPU or its driver"):
            segments.run(0, residual(3))
        runs = len(board.runs)
        go_on.set()
        for got, want in zip(segments.run(0, residual(3)), expected, strict=True):
            np.testing.assert_array_equal(got, want)
        assert len(board.runs) == runs + 1  # nothing had been queued behind it


def test_what_a_run_that_hangs_uses_is_left_to_the_end_of_the_process(
    board: Board, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    segments = opened(dense, seconds=0.2)
    board.faults["run", board.calls["run"] + 1] = lambda: go_on.wait(30)
    with pytest.raises(DeviceError):
        segments.run(0, residual(3))
    segments.close()
    assert "the NPU still works on a dense segment" in caplog.text
    assert len(board.alive) == SEGMENTS
    go_on.set()
    board.alive.clear()


def test_what_fp16_cannot_hold_spoils_its_own_row_alone(board: Board, dense: Path) -> None:
    with runner(dense) as segments:
        expected = [output.copy() for output in segments.run(0, residual(3))]
        (rows,) = residual(3)
        rows[1, 5] = 1e6
        for got, want in zip(segments.run(0, [rows]), expected, strict=True):
            assert not np.isfinite(got[1]).all()
            np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


def test_cycles_that_hold_operands_do_not_outlive_a_run(board: Board, dense: Path) -> None:
    with runner(dense) as segments:
        board.operands.clear()
        gc.disable()
        try:
            for _ in range(3):
                segments.run(0, residual(3))
            assert [ref() is None for ref in board.operands] == [True, True, False]  # the library has the last ones
        finally:
            gc.enable()


# --- what cannot be opened --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("run", 0, "stale"), "answers two questions alike, or by no number"),
        (("run", 0, "garbage"), "answers two questions alike, or by no number"),
        (("run", 3, "stale"), "answers two questions alike, or by no number"),
        (("run", QUESTIONS + 1, "stale"), "do not answer this launch"),
        (("run", 3 * QUESTIONS + 2, "garbage"), "do not answer this launch"),
        (("run", 7, -1), "run returned -1"),
    ],
)
def test_a_segment_that_does_not_compute_is_refused(
    board: Board, dense: Path, fault: tuple[str, int, Any], reason: str
) -> None:
    """The last one is loaded first."""
    call, number, deed = fault
    board.faults[call, number] = deed
    with pytest.raises(DeviceError, match=f"dense segment last does not compute on this NPU: .*{reason}"):
        opened(dense)
    assert board.calls["init_runtime"] == 1


def test_a_context_that_cannot_be_made_takes_the_others_with_it(board: Board, model: Path, dense: Path) -> None:
    board.faults["init_runtime", 2] = -1
    with pytest.raises(DeviceError, match=r"middle-0.* on core 0: init_runtime returned -1"):
        Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=dense)


def test_what_comes_behind_gives_the_npu_back(board: Board, model: Path, dense: Path) -> None:
    with pytest.raises(UsageError, match="needs the model's attention graphs"):
        Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=dense, runtime="rknnlite")
    assert board.calls["release"] == SEGMENTS


def test_a_library_of_another_version_is_refused(board: Board, dense: Path) -> None:
    board.version = "2.3.2"
    with pytest.raises(
        DeviceError, match=r"librknnrt.so is 2\.3\.2, the segments were compiled by rknn-toolkit2 2\.5\.0"
    ):
        opened(dense)
    assert board.runs == []


def test_segments_of_another_model_are_refused(board: Board, dense: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", TinyLlama(seed=1))
    with pytest.raises(
        UsageError, match=r"are of another model than .*other\.gguf: rockpage export dense .*other\.gguf"
    ):
        Engine.load(other, pool_bytes=1 << 20, cache_dir=tmp_path, dense=dense)
    assert board.calls.total() == 0


def test_a_folder_that_cannot_be_used(board: Board, model: Path, tmp_path: Path) -> None:
    def load(folder: Path) -> None:
        Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, dense=folder)

    with pytest.raises(UsageError, match=r"manifest\.json is not there: rockpage export dense writes it"):
        load(tmp_path)
    graphs = export_stub_graphs(tmp_path, TINY.kv_heads, TINY.heads, TINY.head_dim)
    with pytest.raises(UsageError, match="is of 'attention' graphs, not dense"):
        load(graphs)
    damaged = export_stub_segments(tmp_path, model, rows=(4,))
    next(damaged.glob("first*.rknn")).write_bytes(b"")
    with pytest.raises(BadModelFile, match=r"first.*SHA-256"):
        load(damaged)
    assert board.calls.total() == 0


def test_more_than_the_npu_addresses_is_refused(
    board: Board, model: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = read_manifest(DenseManifest, dense).npu_bytes
    monkeypatch.setattr("npu.dense_folder.DOMAIN_BYTES", needed)
    with open_model(model) as source:
        DenseFolder(dense, source, cache_dir=model.parent)
        monkeypatch.setattr("npu.dense_folder.DOMAIN_BYTES", needed - 1)
        with pytest.raises(UsageError, match="of the NPU's memory, and it addresses") as refused:
            DenseFolder(dense, source, cache_dir=model.parent)
    assert refused.value.values == {"npu_bytes": needed}


def test_segments_without_a_row_for_the_proof_are_refused(board: Board, dense: Path) -> None:
    manifest = replace(read_manifest(DenseManifest, dense), rows=(1,))
    with pytest.raises(UsageError, match=r"take 1 row, and one row of a launch is for its proof: .*--rows 4,16,64"):
        RknnLiteSegments(dense, manifest)


def test_an_npu_that_another_process_holds_is_refused(board: Board, dense: Path) -> None:
    with DeviceLock(NPU), pytest.raises(DeviceError, match=r"fdab0000\.npu is in use by process"):
        opened(dense)
    assert board.calls.total() == 0


def test_a_forked_child_leaves_its_parents_npu_alone(
    board: Board, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runner(dense) as segments:
        with monkeypatch.context() as in_child:
            in_child.setattr(os, "getpid", lambda: 0)
            with pytest.raises(UsageError, match="was forked from process"):
                segments.run(0, residual(3))
            copy.copy(segments).close()
        assert len(board.alive) == SEGMENTS
        assert len(segments.run(0, residual(3))) == 3

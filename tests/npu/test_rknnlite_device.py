"""A board's NPU as a device, with a stand-in for the vendor's wheel; tests/board has the real wheel."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import Region
from hostcache.errors import BadModelFile, DeviceError, NotContiguous, UsageError, WrongState
from npu.board_device import NPU
from npu.cores import QUARANTINE_AFTER
from npu.cpu import CpuAttention
from npu.device import AttentionJob
from npu.device_lock import DeviceLock
from npu.discovery import discover
from npu.machine import Machine
from npu.rknnlite_device import RknnLiteDevice
from npu.runtimes import open_runtime
from npu.staged import StagedAttention
from staging import StagingArena
from tests.npu.beds import BEDS
from tests.npu.rknnlite_stand_in import Board
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.test_emulated_attention import GEOMETRY, HEADS, World
from tests.npu.tiny import TINY, write_tiny_llama
from tests.staging.flat import noisy_cache, plan_of
from tests.tools.command_line import run_here

CACHE = noisy_cache(GEOMETRY, blocks=2)
CACHE.buffer.view(np.float16)[:] = np.random.default_rng(1).standard_normal(CACHE.buffer.nbytes // 2)
SHAPE = (GEOMETRY.kv_heads, HEADS, GEOMETRY.head_dim)

DECODE, PREFILL16, PREFILL64 = 4, 52, 196
"""Rows of each graph: tokens of the tile times three heads of a group, one for the canary, padded to four."""


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_stub_graphs(tmp_path_factory.mktemp("rknnlite"), *SHAPE)


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


class Opened:
    """`open_runtime("rknnlite")` over a world, for one `with`."""

    def __init__(self, world: World, graphs: Path) -> None:
        runtime = open_runtime("rknnlite", world.cache, HEADS, graphs=graphs)
        assert isinstance(runtime, StagedAttention)
        self.runtime = runtime

    def __enter__(self) -> StagedAttention:
        return self.runtime

    def __exit__(self, *_: object) -> None:
        self.runtime.close()


def close_to_exact(out: NDArray[np.float32], world: World) -> bool:
    return bool(np.abs(out - world.expected()).max() <= world.bound("output"))


# --- the way through it -----------------------------------------------------------------------------------------------


def test_each_launch_goes_to_its_graph_and_every_core_has_its_share(board: Board, graphs: Path) -> None:
    """Four single rows in two buckets, a tile of 16 tokens and, of a chunk of 70, tiles of 64 and of 6."""
    world = World([30, 60, 100, 200, 90, 150], [1, 1, 1, 1, 16, 70])
    with Opened(world, graphs) as runtime:
        assert close_to_exact(world.attend(runtime), world)
        assert (runtime.cores.launches, runtime.cores.failures, runtime.cores.on_host) == (6, 0, 0)
    assert Counter(rows for _, rows in board.runs) == {DECODE: 3, PREFILL16: 2, PREFILL64: 1}
    assert {core for core, _ in board.runs} == {0, 1, 2}


def test_a_context_is_made_once_for_each_core_and_graph(board: Board, graphs: Path) -> None:
    world = World([30, 100], [1, 20])
    with Opened(world, graphs) as runtime:
        for layer in (0, 1, 0):
            world.attend(runtime, layer)
        assert len(board.alive) == 9
    assert board.calls["init_runtime"] == 9


def test_a_chip_with_two_cores_has_contexts_on_two(
    board: Board, graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = BEDS["fused"].write(tmp_path / "machine")
    monkeypatch.setattr("npu.runtimes.discover", lambda: discover(chip))
    world = World([30, 100, 200], [1, 1, 1])
    with Opened(world, graphs) as runtime:
        assert close_to_exact(world.attend(runtime), world)
        assert len(board.alive) == 6
    assert {core for core, _ in board.runs} == {0, 1}


def test_numerics_name_the_library_and_the_graphs(board: Board, graphs: Path, tmp_path: Path) -> None:
    other = export_stub_graphs(tmp_path, *SHAPE, buckets=(64, 128))
    newer = export_stub_graphs(tmp_path / "newer", *SHAPE, version="2.6.0")
    names = []
    for folder in (graphs, other, graphs):
        device = RknnLiteDevice(folder, *SHAPE, cores=1)
        names.append(device.numerics)
        device.close()
    board.version = "2.6.0"
    device = RknnLiteDevice(newer, *SHAPE, cores=1)
    device.close()
    assert names[0] == names[2] != names[1]
    assert names[0].startswith("rknnlite-2.5.0-")
    assert device.numerics == names[0].replace("2.5.0", "2.6.0")  # the same files: the version is not in them


def test_buckets_and_batches_are_those_of_the_graphs(board: Board, tmp_path: Path) -> None:
    folder = export_stub_graphs(tmp_path, *SHAPE, buckets=(64, 192), batches=(1, 3))
    device = RknnLiteDevice(folder, *SHAPE, cores=1)
    assert (device.buckets, device.batches, device.driver) == ((64, 192), (1, 3), "0.9.8")
    device.close()
    world = World([60] * 4, [1] * 4)
    with Opened(world, folder) as runtime:
        assert close_to_exact(world.attend(runtime), world)
    assert len(board.runs) == 2  # three sequences, and one


def test_cores_work_at_the_same_time(board: Board, graphs: Path) -> None:
    """Three tiles; each run waits until three cores are running."""
    world = World([64 * 3], [64 * 3])
    board.faults["run", 0] = threading.Barrier(3, timeout=30).wait
    with Opened(world, graphs) as runtime:
        assert close_to_exact(world.attend(runtime), world)
        assert runtime.cores.failures == 0


def test_a_buffer_is_filled_while_the_core_runs_another(
    board: Board, graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiles on one core; the first run waits until the second buffer was handed over."""
    world = World([64 * 2], [64 * 2])
    device = RknnLiteDevice(graphs, *SHAPE, cores=1)
    submit, handed_over = device.submit, threading.Semaphore(0)

    def counted(job: AttentionJob, core: int) -> object:
        run = submit(job, core)
        handed_over.release()
        return run

    def wait_for_both() -> None:
        assert all(handed_over.acquire(timeout=30) for _ in range(2))

    monkeypatch.setattr(device, "submit", counted)
    board.faults["run", 1] = wait_for_both
    runtime = StagedAttention(
        world.cache, HEADS, lambda _memory: device, cores=1, buckets=device.buckets, batches=device.batches
    )
    try:
        assert close_to_exact(world.attend(runtime), world)
        assert (runtime.cores.launches, runtime.cores.failures) == (2, 0)
    finally:
        runtime.close()


# --- what goes wrong in a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        (("set_inputs", Exception("Set inputs failed. error code: RKNN_ERR_FAIL")), "set_inputs failed"),
        (("set_inputs", "stale"), "do not answer this launch"),
        (("run", -1), "run returned -1"),
        (("run", "stale"), "2 of 2 heads do not answer this launch"),
        (("run", "garbage"), "2 of 2 heads do not answer this launch"),
        (("get_outputs", Exception("E Get outputs failed")), "get_outputs failed"),
        (("get_outputs", []), "get_outputs returned"),
        (("get_outputs", [np.full((2, 16, 1, 4), np.nan, np.float32)]), "do not answer this launch"),
    ],
)
def test_a_run_that_fails_is_done_by_another_core(
    board: Board, graphs: Path, caplog: pytest.LogCaptureFixture, fault: tuple[str, object], logged: str
) -> None:
    call, deed = fault
    world = World([50], [1])
    with Opened(world, graphs) as runtime:
        first = world.attend(runtime)
        board.faults[call, board.calls[call] + 1] = deed  # type: ignore[assignment] # whatever the wheel might do
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(world.attend(runtime), first)
        assert (runtime.cores.launches, runtime.cores.failures, runtime.cores.on_host) == (2, 1, 0)
    assert [core for core, _ in board.runs][-1] == 1
    assert len(caplog.messages) == 1
    assert logged in caplog.messages[0]


def test_an_old_result_of_the_same_shape_is_found_out(board: Board, graphs: Path) -> None:
    """The vendor's library keeps it: right to the last bit, but the answer to another launch."""
    world = World([50], [1])
    with Opened(world, graphs) as runtime:
        world.attend(runtime, layer=0)
        board.faults["run", 2] = "stale"
        assert close_to_exact(world.attend(runtime, layer=1), world)
        assert runtime.cores.failures == 1


def test_dead_cores_are_quarantined_and_the_others_go_on(board: Board, graphs: Path) -> None:
    world = World([50, 100, 200], [1, 1, 1])
    board.dead = {0, 2}
    with Opened(world, graphs) as runtime:
        for _ in range(QUARANTINE_AFTER):
            assert close_to_exact(world.attend(runtime), world)
        assert runtime.cores.quarantined == [0, 2]
        runs, on_host = len(board.runs), runtime.cores.on_host
        assert close_to_exact(world.attend(runtime), world)
        assert [core for core, _ in board.runs[runs:]] == [1, 1, 1]
        assert runtime.cores.on_host == on_host


def test_without_a_core_that_works_the_host_attends(board: Board, graphs: Path) -> None:
    world = World([50, 100, 200], [1, 20, 1])
    board.dead = {0, 1, 2}
    by_cpu = CpuAttention(world.cache, HEADS)
    expected = world.attend(by_cpu)
    by_cpu.close()
    with Opened(world, graphs) as runtime:
        for _ in range(QUARANTINE_AFTER + 1):
            np.testing.assert_array_equal(world.attend(runtime), expected)
        assert runtime.cores.quarantined == [0, 1, 2]


class Hanging:
    """A board whose first run does not end until it is told to."""

    def __init__(self, board: Board) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        board.faults["run", 1] = self._hang

    def _hang(self) -> None:
        self.began.set()
        assert self.go_on.wait(30)


def test_a_run_that_never_ends_costs_its_core_and_no_token(
    board: Board, graphs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one core and two launches: the first hangs, the second has not begun, and the host does both."""
    world = World([50, 100], [1, 1])
    hanging = Hanging(board)
    device = RknnLiteDevice(graphs, *SHAPE, cores=1, seconds=0.2)
    runtime = StagedAttention(
        world.cache,
        HEADS,
        lambda _memory: device,
        cores=1,
        buckets=(64, 128, 256),
        host=CpuAttention(world.cache, HEADS),
    )
    with caplog.at_level(logging.WARNING):
        assert close_to_exact(world.attend(runtime), world)
    assert hanging.began.is_set()
    assert runtime.cores.quarantined == [0]
    assert runtime.cores.on_host == 2
    assert "a job on core 0 has not ended in 0.2 s" in caplog.text
    assert "a job on core 0 has not begun" in caplog.text
    assert [buffer.state.value for buffer in runtime._arena.buffers] == ["in flight", "free"]

    hanging.go_on.set()
    device._workers[0].submit(lambda: None).result(30)
    assert len(board.runs) == 1  # what had not begun was withdrawn
    assert close_to_exact(world.attend(runtime), world)
    assert [buffer.state.value for buffer in runtime._arena.buffers] == ["free", "free"]
    runtime.close()


def test_what_a_core_that_hangs_holds_is_left_to_the_end_of_the_process(
    board: Board, graphs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To destroy a context that the library works on would be a crash."""
    world = World([50], [1])
    hanging = Hanging(board)
    device = RknnLiteDevice(graphs, *SHAPE, cores=2, seconds=1)
    runtime = StagedAttention(world.cache, HEADS, lambda _memory: device, cores=2, buckets=(64, 128, 256))
    assert close_to_exact(world.attend(runtime), world)
    runtime.close()
    assert "NPU core 0 still works on a job" in caplog.text
    assert {context._core for context in board.alive} == {0}
    hanging.go_on.set()
    board.alive.clear()


# --- what cannot be opened --------------------------------------------------------------------------------------------


def test_a_folder_without_graphs_for_the_model_is_refused(board: Board, graphs: Path, tmp_path: Path) -> None:
    world = World([5], [1])
    with pytest.raises(UsageError, match="needs the model's attention graphs"):
        open_runtime("rknnlite", world.cache, HEADS)
    with pytest.raises(UsageError, match=r"manifest\.json is not there: rockpage export attention writes it"):
        open_runtime("rknnlite", world.cache, HEADS, graphs=tmp_path)
    with pytest.raises(UsageError, match="are for 2 KV heads and 6 heads of 16, the model has 2 and 4 of 16"):
        open_runtime("rknnlite", world.cache, 4, graphs=graphs)
    with pytest.raises(UsageError, match="at least one core, got 0"):
        RknnLiteDevice(graphs, *SHAPE, cores=0)
    assert board.calls.total() == 0


def test_graphs_that_lack_a_launch_are_refused(board: Board, tmp_path: Path) -> None:
    folder = export_stub_graphs(tmp_path, *SHAPE)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][0]["launches"][0]  # the first is decode, of one sequence in the smallest bucket
    path.write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"the graph decode in .* lacks launches of .* \[\(1, 64\)\]: export it again"):
        RknnLiteDevice(folder, *SHAPE)


def test_a_damaged_file_is_refused(board: Board, tmp_path: Path) -> None:
    folder = export_stub_graphs(tmp_path, *SHAPE)
    next(folder.glob("prefill16*.rknn")).write_bytes(b"")
    with pytest.raises(BadModelFile, match=r"prefill16.*SHA-256"):
        RknnLiteDevice(folder, *SHAPE)


def test_graphs_of_another_compiler_are_refused(board: Board, graphs: Path) -> None:
    board.version = "2.3.2"
    with pytest.raises(
        DeviceError,
        match=r"librknnrt.so is 2\.3\.2, the graphs were compiled by rknn-toolkit2 2\.5\.0: put librknnrt.so 2",
    ):
        RknnLiteDevice(graphs, *SHAPE)
    assert board.calls["init_runtime"] == 1  # the first context knows


def test_a_context_that_cannot_be_made_takes_the_others_with_it(board: Board, graphs: Path) -> None:
    world = World([5], [1])
    board.faults["init_runtime", 5] = -1
    with pytest.raises(DeviceError, match="on core 1: init_runtime returned -1"):
        open_runtime("rknnlite", world.cache, HEADS, graphs=graphs)
    world.memory.buffer = np.empty(0, np.uint8)
    world.cache.close()  # the host's runtime let go of it


def test_an_npu_that_another_process_holds_is_refused(board: Board, graphs: Path) -> None:
    with DeviceLock(NPU), pytest.raises(DeviceError, match=r"fdab0000\.npu is in use by process"):
        RknnLiteDevice(graphs, *SHAPE)
    assert board.calls.total() == 0


def test_the_command_runs_a_model_on_the_board(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    folder = export_stub_graphs(tmp_path, TINY.kv_heads, TINY.heads, TINY.head_dim)
    run = ("run", str(model), "--prompt", "a bearing", "--max-tokens", "4", "--ignore-eos", "--activations", "fp32")
    on_cpu = run_here(capsys, *run, "--runtime", "cpu")
    on_board = run_here(capsys, *run, "--runtime", "rknnlite", "--graphs", str(folder))
    assert on_board == on_cpu
    assert on_board.status == 0
    # Two layers; the prompt is one tile, and each of three further tokens a row.
    assert [rows for _, rows in board.runs] == [2 * 16 + 4] * 2 + [4] * 6


# --- jobs, memory, processes ------------------------------------------------------------------------------------------


@pytest.fixture
def arena(board: Board, graphs: Path) -> Iterator[StagingArena]:
    """Over a device of one core."""
    region = Region.anonymous(1 << 20)
    device = RknnLiteDevice(graphs, *SHAPE, cores=1)
    arena = StagingArena(region, 1, device)
    yield arena
    device.close()
    arena.close()


def ready(arena: StagingArena) -> AttentionJob:
    """A decoding sequence of 20 tokens."""
    buffer = arena.acquire()
    buffer.fill(CACHE, plan_of(CACHE, [[0, 1]], (20,), 64, 4, mask_rows=0), 0)
    buffer.query[...] = 0
    buffer.sync_to_device()
    return AttentionJob.over(buffer)


def test_operands_are_checked_for_the_wheel_does_not(board: Board, arena: StagingArena) -> None:
    device = arena.buffers[0]._device
    assert isinstance(device, RknnLiteDevice)
    job = ready(arena)
    with pytest.raises(NotContiguous):
        device.submit(replace(job, query=job.query[:, ::-1]), 0)
    device.submit(job, 0).wait()
    with pytest.raises(WrongState):
        device.submit(job, 0)
    assert len(board.runs) == 1
    job.buffer.release()


def test_cycles_that_hold_operands_do_not_outlive_a_step(board: Board, graphs: Path) -> None:
    world = World([50, 100, 200], [1, 1, 20])
    gc.disable()
    try:
        with Opened(world, graphs) as runtime:
            world.attend(runtime)
        assert [ref() for ref in board.operands] == [None] * 3
    finally:
        gc.enable()


def test_a_forked_child_leaves_its_parents_contexts_alone(
    board: Board, graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RknnLiteDevice(graphs, *SHAPE, cores=1)
    in_child = copy.copy(device)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    in_child.close()
    assert len(board.alive) == 3
    monkeypatch.undo()
    device.close()

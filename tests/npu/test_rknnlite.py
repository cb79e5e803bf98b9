"""One context of the vendor's runtime: every failure is an error that says what was called and what it may mean."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import DeviceError, MissingExtra
from npu.rknnlite import LiteContext
from tests.npu.rknnlite_stand_in import Board
from tests.npu.stub_graphs import StubGraph

GRAPH = StubGraph(rows=4, key_channels=16, head_dim=8, masked=False, launches=((2, 64), (2, 128)))
OUT = (2, 8, 1, 4)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    board = Board()
    board.install(monkeypatch)
    return board


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "decode-0123.rknn"
    path.write_text(GRAPH.write())
    return path


def operands(tokens: int = 64) -> list[NDArray[np.float16]]:
    """Keys are zero, so that the result is the mean of V: 3 in every element."""
    launch = [launch for _, launch in GRAPH.launches].index(tokens)
    q, k, v = (np.zeros(shape, np.float16) for shape in GRAPH.shapes(launch))
    v[...] = 3
    return [q, k, v]


def test_a_context_runs_its_graph_as_often_as_asked_and_knows_the_versions(board: Board, graph: Path) -> None:
    context = LiteContext(graph, 2)
    assert (context.version, context.driver) == ("2.5.0", "0.9.8")
    for tokens in (64, 128, 64):
        np.testing.assert_array_equal(context.run(operands(tokens), OUT), np.full(OUT, 3, np.float32))
    assert board.runs == [(2, 4)] * 3
    assert context._lite.rknn_data is None  # a second copy of the weights
    context.release()
    context.release()
    assert (board.alive, board.calls["release"]) == ([], 1)


@pytest.mark.parametrize(
    ("call", "said", "cause"),
    [
        ("load_rknn", "", "load_rknn returned -1: Catch exception when loading"),
        ("init_runtime", "Exception: Can not find dynamic library on RK3588!", "put librknnrt.so into /usr/lib"),
        ("init_runtime", "Exception: Please specify the target in init_runtime!", "shown /proc/device-tree"),
        ("init_runtime", "E Catch exception when set npu core mode.", "an RK3583 two"),
        ("init_runtime", "Exception: RKNN init failed. error code: RKNN_ERR_MODEL_INVALID", "older than the compiler"),
        ("init_runtime", "Exception: RKNN init failed. error code: RKNN_ERR_DEVICE_UNMATCH", "for another chip"),
        ("init_runtime", "Exception: RKNN init failed. error code: RKNN_ERR_MALLOC_FAIL", "smaller buckets"),
        ("init_runtime", "Exception: RKNN init failed. error code: RKNN_ERR_FAIL", "groups video and render"),
        ("init_runtime", "", r"init_runtime returned -1: nothing was said about it$"),
    ],
)
def test_a_call_that_returns_minus_1_is_an_error_with_the_vendors_words_and_the_likely_cause(
    board: Board, graph: Path, call: str, said: str, cause: str
) -> None:
    board.faults[call, 1] = -1
    board.log = said
    with pytest.raises(DeviceError, match=cause) as refused:
        LiteContext(graph, 1)
    assert str(refused.value).startswith(f"decode-0123.rknn on core 1: {call} returned -1: {said}")
    assert refused.value.values == {"call": call, "outcome": "returned -1"}
    assert board.alive == []  # though the wheel would have gone on with it


def test_what_the_wheel_raises_is_an_error_likewise(board: Board, graph: Path) -> None:
    for call in ("RKNNLite", "load_rknn", "init_runtime", "get_sdk_version"):
        board.faults = {(call, 0): MemoryError("no room")}
        with pytest.raises(DeviceError, match=rf"{call} failed: MemoryError: no room$"):
            LiteContext(graph, 0)
        assert board.alive == []


@pytest.mark.parametrize("version", [None, "garbage"])
def test_a_library_that_does_not_say_its_version_is_refused(board: Board, graph: Path, version: str | None) -> None:
    board.version = version
    with pytest.raises(DeviceError, match="does not say its version"):
        LiteContext(graph, 0)
    assert board.alive == []


def test_a_wheel_that_is_made_in_another_way_is_refused(
    board: Board, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tests.npu.rknnlite_stand_in.Runtime.get_outputs")
    with pytest.raises(DeviceError, match=r"in another way than 2\.5\.0 .*get_outputs.*pip install"):
        LiteContext(graph, 0)
    assert board.alive == []


def test_an_empty_file_is_not_handed_over(board: Board, tmp_path: Path) -> None:
    empty = tmp_path / "empty.rknn"
    empty.touch()
    with pytest.raises(DeviceError, match=r"empty\.rknn is empty, and librknnrt.so would take its bytes for a path"):
        LiteContext(empty, 0)
    assert board.calls["load_rknn"] == 0


def test_a_missing_wheel_is_named(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rknnlite", None)
    with pytest.raises(MissingExtra, match=r"Python 3.10 to 3.12, pip install 'rockpage\[board\]'"):
        LiteContext(graph, 0)


def test_the_priority_is_put_back_whether_the_library_was_loaded_or_not(board: Board, graph: Path) -> None:
    board.niceness = 5
    LiteContext(graph, 0).release()
    assert board.niceness == 5
    board.faults["init_runtime", 0] = -1
    with pytest.raises(DeviceError):
        LiteContext(graph, 0)
    assert board.niceness == 5


@pytest.mark.parametrize(
    ("call", "deed", "error"),
    [
        ("set_inputs", Exception("Set inputs failed. error code: RKNN_ERR_PARAM_INVALID"), "RKNN_ERR_PARAM_INVALID$"),
        ("run", -1, r"run returned -1: RKNN_ERR_FAIL$"),
        ("run", -2, r"run returned -2: RKNN_ERR_TIMEOUT; the NPU did not answer"),
        ("run", -99, r"run returned -99: nothing was said"),
        ("get_outputs", IndexError("invalid index"), r"get_outputs failed: IndexError: invalid index$"),
        ("get_outputs", [], r"get_outputs returned \[\]: float32 \(2, 8, 1, 4\) was asked for$"),
        ("get_outputs", [np.zeros(OUT)], "float64"),
        ("get_outputs", [np.zeros((2, 8, 1, 8), np.float32)], r"\(2, 8, 1, 8\)"),
        ("get_outputs", [np.zeros(OUT, np.float32)] * 2, "was asked for"),
        ("get_outputs", [None], "NoneType"),
    ],
)
def test_a_run_that_fails_is_an_error_and_the_next_one_is_none_the_worse(
    board: Board, graph: Path, call: str, deed: object, error: str
) -> None:
    context = LiteContext(graph, 0)
    board.faults[call, 1] = deed  # type: ignore[assignment] # whatever the wheel might do
    with pytest.raises(DeviceError, match=error):
        context.run(operands(), OUT)
    assert float(context.run(operands(), OUT).min()) == 3


def test_an_error_keeps_no_operand_alive(board: Board, graph: Path) -> None:
    context = LiteContext(graph, 0)
    board.faults["set_inputs", 1] = ValueError("no")
    with pytest.raises(DeviceError) as failed:
        context.run(operands(), OUT)
    own = [frame.filename for frame in traceback.extract_tb(failed.value.__traceback__)]
    assert own[-1].endswith("rknnlite.py")
    assert failed.value.__context__ is None  # the wheel's error, with its frames


def test_a_release_that_fails_is_logged(board: Board, graph: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = LiteContext(graph, 0)
    board.faults["release", 0] = OSError("gone")
    with caplog.at_level(logging.WARNING):
        context.release()
    assert caplog.messages == ["decode-0123.rknn on core 0: release: gone"]


def test_contexts_run_side_by_side(board: Board, graph: Path) -> None:
    """The stand-in waits for the other run, as `rknn_run` lets other threads run while the NPU works."""
    both = threading.Barrier(2, timeout=30)
    board.faults["run", 0] = both.wait
    contexts = [LiteContext(graph, core) for core in (0, 1)]
    threads = [threading.Thread(target=context.run, args=(operands(), OUT)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(board.runs) == [(0, 4), (1, 4)]
    assert not both.broken

"""Opening and closing a board through the vendor's wheel, and runs that hang. See `make test-arm64`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hostcache.errors import DeviceError
from npu.rknnlite_device import RknnLiteDevice
from tests.board.stub import Stub
from tests.board.stub_board import SHAPE, StubBoard, open_files, stub_graphs

pytestmark = pytest.mark.arm64


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_graphs(tmp_path_factory.mktemp("stub"))


def test_a_run_that_hangs_costs_its_core_and_no_token(graphs: Path) -> None:
    with StubBoard(graphs, cores=2, seconds=2) as board:  # which it closes when the run has ended
        assert board.is_right("rknn_run@core0=late:5000", layer=1)
        assert board.runtime.cores.quarantined == [0]
        assert board.is_right("", layer=0)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        *((f"rknn_init@{number}=-4", "MALLOC_FAIL; no memory for the NPU") for number in (1, 2, 6, 9)),
        ("rknn_set_core_mask@7=-1", "core 2: init_runtime returned -1: .*the chip has no such core"),
        ("rknn_query@3=garbage", "librknnrt.so is 3.5.1, the graphs were compiled by rknn-toolkit2 2.5.0"),
    ],
)
def test_a_device_that_cannot_be_opened_is_an_error_and_nothing_is_left(graphs: Path, fault: str, error: str) -> None:
    stub = Stub()
    stub.fail(fault)
    with pytest.raises(DeviceError, match=error):
        RknnLiteDevice(graphs, *SHAPE)
    stub.fail("")
    assert stub.contexts == 0
    RknnLiteDevice(graphs, *SHAPE, cores=1).close()  # nobody holds the NPU


# A fault in each call of a start and of an end, on one core: three contexts -------------------------------------------

ERROR, NOTHING = {True}, {False}
STARTS: dict[str, dict[str, set[bool]]] = {
    "rknn_init": {"-1": ERROR, "timeout:5": ERROR, "late:5": NOTHING, "stale": ERROR, "garbage": ERROR},
    # Without a mask the library chooses the core.
    "rknn_set_core_mask": {"-1": ERROR, "timeout:5": ERROR, "late:5": NOTHING, "stale": NOTHING, "garbage": NOTHING},
    # Three answers for each context: without a version there is no start, shapes are needed for the runs only.
    "rknn_query": {"late:5": NOTHING, **dict.fromkeys(("-1", "timeout:5", "stale", "garbage"), ERROR | NOTHING)},
}
"""Whether a fault may be an error; if it is none, every answer is right."""


@pytest.mark.parametrize(("call", "deed"), [(call, deed) for call, deeds in STARTS.items() for deed in deeds])
def test_a_fault_in_any_call_of_the_start_is_an_error_or_no_wrong_answer(graphs: Path, call: str, deed: str) -> None:
    stub = Stub()
    outcomes = set()
    for number in range(1, 10 if call == "rknn_query" else 4):
        stub.fail(f"{call}@{number}={deed}")
        try:
            board = StubBoard(graphs, cores=1)
        except DeviceError:
            outcomes.add(True)
            assert stub.contexts == 0, number
        else:
            outcomes.add(False)
            with board:
                assert all(board.is_right("", layer) for layer in (0, 1)), number
    assert outcomes == STARTS[call][deed]


@pytest.mark.parametrize("deed", ["-1", "timeout:5", "late:5", "stale", "garbage"])
def test_a_fault_in_any_call_of_the_end_keeps_nobody_from_starting_anew(graphs: Path, deed: str) -> None:
    """In a process of its own, for what the library does not give back stays until the end of it."""
    child = os.fork()
    if not child:
        ended = 1
        try:
            ended = _ended_and_started_anew(graphs, deed)
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _ended_and_started_anew(graphs: Path, deed: str) -> int:
    """0 if it could be, after a fault in each of three calls."""
    stub = Stub()
    for number in (1, 2, 3):
        kept = stub.contexts
        device = RknnLiteDevice(graphs, *SHAPE, cores=1)
        assert stub.contexts == kept + 3
        stub.fail(f"rknn_destroy@{number}={deed}")
        device.close()
        assert stub.contexts == kept + (deed != "late:5")
        stub.fail("")
    return 0


@pytest.mark.parametrize("deed", ["-1", "stale", "garbage"])
def test_graphs_whose_shapes_the_library_does_not_tell_are_no_wrong_answer(graphs: Path, deed: str) -> None:
    """The wheel then takes each for one of a single shape, and sets none. It asks second of three times."""
    Stub().fail(" ".join(f"rknn_query@{number}={deed}" for number in (2, 5, 8)))
    with StubBoard(graphs, cores=1) as board:
        assert board.is_right("", layer=0)
        assert board.is_right("", layer=1)


def test_opening_and_closing_leaves_nothing_behind(graphs: Path) -> None:
    counts = []
    for _ in range(6):
        with StubBoard(graphs, cores=1):
            pass
        counts.append((open_files(), threading.active_count()))
    assert counts[1:] == counts[:1] * 5

"""Opening and closing a board through the vendor's wheel, and runs that hang. See `make test-arm64`."""

from __future__ import annotations

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

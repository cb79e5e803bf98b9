"""Staged attention through the vendor's wheel: right, whatever call of a run fails. See `make test-arm64`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu.cores import QUARANTINE_AFTER
from tests.board.stub_board import LAUNCHES, StubBoard, open_files, stub_graphs

pytestmark = pytest.mark.arm64


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_graphs(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def board(graphs: Path) -> Iterator[StubBoard]:
    with StubBoard(graphs) as board:
        yield board


def test_every_core_has_its_launch_and_all_are_right(board: StubBoard) -> None:
    for layer in (0, 1):
        cores = board.trust()
        assert board.is_right("", layer)
        assert (cores.launches, cores.failures, cores.on_host) == (LAUNCHES, 0, 0)


# A fault in each call of a run ----------------------------------------------------------------------------------------

COSTS_ONE, COSTS_NONE, COSTS_ONE_AT_MOST = (1,), (0,), (0, 1)

REFUSED = {"-1": COSTS_ONE, "timeout:5": COSTS_ONE, "late:5": COSTS_NONE}
COSTS: dict[str, dict[str, tuple[int, ...]]] = {
    # Six answers a launch: some say what the wheel needs, some what it knows.
    "rknn_query": {**REFUSED, "stale": COSTS_ONE, "garbage": COSTS_ONE_AT_MOST},
    # The shapes may be set already: then nothing is lost if they are not set once more.
    "rknn_set_input_shapes": {**REFUSED, "stale": COSTS_ONE_AT_MOST, "garbage": COSTS_ONE},
    "rknn_inputs_set": {**REFUSED, "stale": COSTS_ONE, "garbage": COSTS_ONE},
    "rknn_run": {**REFUSED, "stale": COSTS_ONE, "garbage": COSTS_ONE},
    "rknn_outputs_get": {**REFUSED, "stale": COSTS_ONE, "garbage": COSTS_ONE},
    "rknn_outputs_release": dict.fromkeys(("-1", "timeout:5", "late:5", "stale", "garbage"), COSTS_NONE),
}
"""How many launches a fault may cost."""


@pytest.mark.parametrize(("call", "deed"), [(call, deed) for call, deeds in COSTS.items() for deed in deeds])
def test_a_fault_in_any_call_costs_a_launch_at_most_and_no_token(board: StubBoard, call: str, deed: str) -> None:
    in_a_launch = 6 if call == "rknn_query" else 1
    for number in range(1, LAUNCHES * in_a_launch + 1):
        cores = board.trust()
        assert board.is_right(f"{call}@{number}={deed}", layer=number % 2), number  # in one, an old result were right
        assert cores.failures in COSTS[call][deed], number
        assert (cores.launches, cores.on_host) == (LAUNCHES, 0), number


@pytest.mark.parametrize("deed", ["-1", "stale", "garbage"])
def test_a_dead_core_is_quarantined_and_without_any_the_host_attends(board: StubBoard, deed: str) -> None:
    cores = board.trust()
    for step in range(QUARANTINE_AFTER):
        assert board.is_right(f"rknn_run@core1={deed}", layer=step % 2)
    assert cores.quarantined == [1]
    for step in range(QUARANTINE_AFTER + 1):
        assert board.is_right(f"rknn_run@all={deed}", layer=step % 2)
    assert cores.quarantined == [0, 1, 2]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_thousand_launches_leave_nothing_behind(board: StubBoard) -> None:
    """What the wheel leaves in cycles would be 18 objects a launch, and with operands of this size some 40 kB."""
    cores = board.trust()
    for step in range(20):
        assert board.is_right("", layer=step % 2)
    gc.collect()
    files, objects, memory = open_files(), len(gc.get_objects()), resident()
    for step in range(2000 // LAUNCHES + 1):
        assert board.is_right("", layer=step % 2)
    assert cores.failures == 0
    assert cores.launches > 2000
    assert open_files() == files
    assert len(gc.get_objects()) - objects < 2000
    assert resident() - memory < 2 << 20

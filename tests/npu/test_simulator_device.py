"""The simulator as a device, with a stand-in for the vendor's process; `test_simulator_vendor.py` has the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import DeviceError, UsageError
from npu.attention_graph import AttentionGraph
from npu.cpu import CpuAttention
from npu.fp16 import attention
from npu.runtimes import open_runtime
from npu.staged import StagedAttention
from tests.npu.test_emulated_attention import HEADS, EmulatedRuntime, World


class StandIn:
    """Computes what the vendor's simulator should, and fails when told to."""

    version = "0.0.1"

    def __init__(self, sizes: Mapping[AttentionGraph, Sequence[tuple[int, int]]], python: object) -> None:
        assert python is None
        self.graphs = {graph.kind: graph for graph in sizes}
        self.kinds: list[str] = []
        self.failing = False
        self.closed = False
        stand_ins.append(self)

    def run(
        self,
        kind: str,
        q: NDArray[np.float16],
        k: NDArray[np.float16],
        v: NDArray[np.float16],
        mask: NDArray[np.float16] | None,
    ) -> NDArray[np.float32]:
        if self.failing:
            raise DeviceError("the toolkit's process ended: SIGABRT")
        self.kinds.append(kind)
        assert q.shape[1] == self.graphs[kind].rows
        assert (mask is not None) == self.graphs[kind].masked
        return attention(q, k, v, mask, "output").astype(np.float32)

    def close(self) -> None:
        self.closed = True


stand_ins: list[StandIn] = []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    stand_ins.clear()
    monkeypatch.setattr("npu.simulator_device.Simulator", StandIn)
    return World([30, 100, 90], [1, 1, 20])


def test_the_staged_buffers_go_to_the_graph_that_was_made_for_them(world: World) -> None:
    simulated = open_runtime("simulator", world.cache, HEADS)
    assert simulated.name == "simulator"
    assert (
        simulated.numerics
        == f"simulator-0.0.1-64-128-256-512-1024-2048-4096+{CpuAttention(world.cache, HEADS).numerics}"
    )
    with EmulatedRuntime(world) as emulated:
        # The largest bucket of the test's emulated runtime is smaller, the launches are the same.
        np.testing.assert_array_equal(world.attend(simulated), world.attend(emulated))
    assert stand_ins[0].kinds == ["prefill64", "decode", "decode"]
    simulated.close()
    assert stand_ins[0].closed


def test_a_simulator_that_fails_is_no_wrong_answer(world: World) -> None:
    simulated = open_runtime("simulator", world.cache, HEADS)
    assert isinstance(simulated, StagedAttention)
    stand_ins[0].failing = True
    by_cpu = CpuAttention(world.cache, HEADS)
    np.testing.assert_array_equal(world.attend(simulated), world.attend(by_cpu))
    assert simulated.cores.on_host == 3
    simulated.close()


def test_a_geometry_that_cannot_be_staged_leaves_no_process_behind(world: World) -> None:
    world.cache.geometry = type(world.cache.geometry)(2, 2, 16, itemsize=1)
    with pytest.raises(UsageError):
        open_runtime("simulator", world.cache, HEADS)
    assert all(stand_in.closed for stand_in in stand_ins)

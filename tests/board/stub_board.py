"""Staged attention over the vendor's wheel and the stub, in a world of a few sequences."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from npu.cores import Cores
from npu.cpu import CpuAttention
from npu.rknnlite_device import RknnLiteDevice
from npu.staged import StagedAttention
from tests.board.stub import Stub
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.test_emulated_attention import GEOMETRY, HEADS, World

__all__ = ["LAUNCHES", "SHAPE", "StubBoard", "open_files", "stub_graphs"]

SHAPE = (GEOMETRY.kv_heads, HEADS, GEOMETRY.head_dim)

LAUNCHES = 3
"""Of a step of `stub_world`."""


def stub_graphs(folder: Path) -> Path:
    """Graphs for `stub_world`."""
    return export_stub_graphs(folder, *SHAPE, buckets=(64, 128))


def stub_world() -> World:
    """A launch of two decoding sequences, one of a longer one, and one of a prompt's tile."""
    return World([30, 50, 100, 60], [1, 1, 1, 10])


def open_files() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))


class StubBoard:
    """Staged attention over a device of its own; every step goes over a world of four sequences.

    Attributes:
        stub: the library.
        runtime: with the host's CPU behind it.
    """

    def __init__(self, graphs: Path, *, cores: int = 3, seconds: float = 30) -> None:
        self.stub = Stub()
        self._world = stub_world()
        self._exact = [(self._world.expected(layer), self._world.bound("output", layer)) for layer in (0, 1)]
        device = RknnLiteDevice(graphs, *SHAPE, cores=cores, seconds=seconds)
        self.runtime = StagedAttention(
            self._world.cache,
            HEADS,
            lambda _memory: device,
            cores=cores,
            buckets=device.buckets,
            batches=device.batches,
            host=CpuAttention(self._world.cache, HEADS),
        )

    def is_right(self, faults: str, layer: int) -> bool:
        """Attend one step with faults in it; calls are counted from its start."""
        self.stub.fail(faults)
        expected, bound = self._exact[layer]
        return bool(np.abs(self._world.attend(self.runtime, layer) - expected).max() <= bound)

    def trust(self) -> Cores:
        """Trust all cores again, and count anew."""
        self.runtime.cores = Cores(3)
        return self.runtime.cores

    def __enter__(self) -> StubBoard:
        return self

    def __exit__(self, *_: object) -> None:
        """Close it; nothing of it may be left in the library."""
        self.stub.fail("")
        self.runtime.close()
        assert self.stub.contexts == 0

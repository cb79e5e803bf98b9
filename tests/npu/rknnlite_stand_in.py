"""Stands in for the vendor's Python runtime, rknn-toolkit-lite2 over librknnrt.so, and behaves as 2.5.0 does.

Failures become -1 and a line in the log; a context that could not be set up goes on; a run's code is returned and has
no consequence; results are whatever the context holds; the list of formats is written to; operands hang in cycles.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.npu.stub_graphs import StubGraph
from tests.npu.stub_segments import StubSegment

__all__ = ["Board", "Deed"]

Deed: TypeAlias = "int | str | Exception | Callable[[], object]"
"""What goes wrong in a call: the code it returns; `"stale"`: nothing is done and success is reported; `"garbage"`: what
it hands out is; an exception it raises; or something to do first."""


class Board:
    """A chip, its library, and all contexts that were made on it.

    Attributes:
        version: of the library; None: it says nothing.
        log: what `init_runtime` says before it returns -1, at the end of a traceback; nothing if empty.
        faults: deeds by name of call and its number from 1; number 0 is every call.
        dead: cores whose runs return -1.
        calls: how often each call came.
        runs: `(core, rows)` of each run, in order.
        alive: contexts that were not released.
        operands: copies of the first operand of each run, as long as they live.
        niceness: of the calling thread.
    """

    def __init__(self) -> None:
        self.version: str | None = "2.5.0"
        self.log = "Exception: RKNN init failed. error code: RKNN_ERR_FAIL"
        self.faults: dict[tuple[str, int], Deed] = {}
        self.dead: set[int] = set()
        self.calls: Counter[str] = Counter()
        self.runs: list[tuple[int, int]] = []
        self.alive: list[Runtime] = []
        self.operands: list[weakref.ref[NDArray[np.float16]]] = []
        self.niceness = 0
        self._lock = threading.Lock()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process find the wheel, and take over what says how nice it is."""
        api = ModuleType("rknnlite.api")
        api.RKNNLite = lambda: RKNNLite(self)  # type: ignore[attr-defined] # a stand-in
        monkeypatch.setitem(sys.modules, "rknnlite", ModuleType("rknnlite"))
        monkeypatch.setitem(sys.modules, "rknnlite.api", api)
        monkeypatch.setattr(os, "getpriority", lambda _which, _who: self.niceness)
        monkeypatch.setattr(os, "setpriority", lambda _which, _who, value: setattr(self, "niceness", value))

    def begin(self, call: str) -> Deed | None:
        """Count a call; what is to go wrong in it."""
        with self._lock:
            self.calls[call] += 1
            deed = self.faults.get((call, self.calls[call]), self.faults.get((call, 0)))
        if isinstance(deed, Exception):
            raise type(deed)(*deed.args)  # a new one: it collects frames
        if callable(deed):
            deed()
            return None
        return deed


class Log:
    """The wheel's own."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        def write(*_: object) -> None:
            raise AssertionError("the wheel's words went to stderr, where nobody sees them")

        return write


class RKNNLite:
    """As the wheel's class, as far as it is used."""

    def __init__(self, board: Board) -> None:
        self.rknn_log: Any = Log()
        self.rknn_runtime: Runtime | None = None
        self._board = board
        self.rknn_data: bytes | None = None
        board.begin("RKNNLite")

    def load_rknn(self, path: str) -> int:
        if (deed := self._board.begin("load_rknn")) is not None:
            self.rknn_log.e(f"Catch exception when loading RKNN model [{path}]!", False)
            return int(deed)  # type: ignore[arg-type] # a code
        self.rknn_data = Path(path).read_bytes()
        return 0

    def init_runtime(self, target: None = None, *, core_mask: int) -> int:
        assert target is None  # on the board, anything else is refused
        assert self.rknn_data, "librknnrt.so takes no bytes for a path"
        core = {1: 0, 2: 1, 4: 2}[core_mask]
        self.rknn_runtime = Runtime(self._board, _compiled(self.rknn_data), core)  # even if it then fails
        self._board.niceness = -19
        if (deed := self._board.begin("init_runtime")) is not None:
            if self._board.log:
                self.rknn_log.e("Catch exception when init runtime!", False)
                self.rknn_log.e(f"Traceback (most recent call last):\n  a line\n{self._board.log}\n", False)
            return int(deed)  # type: ignore[arg-type] # a code
        return 0

    def get_sdk_version(self) -> str | None:
        self._board.begin("get_sdk_version")
        if self._board.version is None:
            return None
        return f"====\nRKNN VERSION:\n  API: {self._board.version} (429f97ae6b@2026)\n  DRV: 0.9.8\n====\n"

    def release(self) -> None:
        if self.rknn_runtime is not None:
            self._board.alive.remove(self.rknn_runtime)
            self.rknn_runtime = None
        self._board.begin("release")


class Compiled(Protocol):
    """A graph: what it takes, and what it makes of it.

    Attributes:
        launches: shapes of the inputs it was compiled for, channels last.
    """

    launches: list[list[tuple[int, ...]]]

    def outputs(self, launch: int) -> list[tuple[int, ...]]:
        """Shapes, channels second."""

    def compute(self, inputs: list[NDArray[np.float16]]) -> list[NDArray[np.float32]]:
        """Rounded to fp16, as the NPU writes it."""


class CompiledAttention:
    """Attention, in any of the forms it is exported in."""

    def __init__(self, graph: StubGraph) -> None:
        self.launches = [graph.shapes(number) for number in range(len(graph.launches))]
        self._graph = graph

    def outputs(self, launch: int) -> list[tuple[int, ...]]:
        heads, _ = self._graph.launches[launch]
        return [(heads, self._graph.head_dim, 1, self._graph.rows)]

    def compute(self, inputs: list[NDArray[np.float16]]) -> list[NDArray[np.float32]]:
        q, k, v = (array[:, 0].astype(np.float32) for array in inputs[:3])
        scores = q @ k.swapaxes(1, 2)
        if self._graph.masked:
            scores = scores + inputs[3][:, 0].astype(np.float32)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        out = weights @ v / weights.sum(axis=2, keepdims=True)
        return [out.swapaxes(1, 2)[:, :, np.newaxis].astype(np.float16).astype(np.float32)]


class CompiledSegment:
    """A dense segment."""

    def __init__(self, segment: StubSegment) -> None:
        self._session = segment.session()
        self._names = [value.name for value in self._session.get_inputs()]
        self._rows = segment.rows
        channels = [value.shape[1] for value in self._session.get_inputs()]
        self.launches: list[list[tuple[int, ...]]] = [
            [(1, 1, rows, size) for size in channels] for rows in segment.rows
        ]

    def outputs(self, launch: int) -> list[tuple[int, ...]]:
        return [(1, value.shape[1], 1, self._rows[launch]) for value in self._session.get_outputs()]

    def compute(self, inputs: list[NDArray[np.float16]]) -> list[NDArray[np.float32]]:
        feed = {name: array.transpose(0, 3, 1, 2) for name, array in zip(self._names, inputs, strict=True)}
        return [output.astype(np.float32) for output in self._session.run(None, feed)]


def _compiled(content: bytes) -> Compiled:
    if StubSegment.is_in(content):
        return CompiledSegment(StubSegment.read(content))
    return CompiledAttention(StubGraph.read(content.decode()))


class Runtime:
    """What is behind an `RKNNLite`: a context of the library's. Its outputs keep a buffer for each set of shapes."""

    def __init__(self, board: Board, graph: Compiled, core: int) -> None:
        self._board = board
        self._graph = graph
        self._core = core
        self._launch = 0
        self._inputs: list[NDArray[np.float16]] = []
        launches = range(len(graph.launches))
        self._results = [[np.zeros(shape, np.float32) for shape in graph.outputs(launch)] for launch in launches]
        board.alive.append(self)

    def set_inputs(self, inputs: list[NDArray[np.float16]], data_type: None, data_format: list[Any]) -> None:
        assert data_type is None
        assert data_format == ["nhwc"] * len(inputs)
        data_format[:] = [1] * len(inputs)  # its number of the format
        operands = [array.copy() for array in inputs]
        self._board.operands.append(weakref.ref(operands[0]))
        cycle: list[object] = [*operands]
        cycle.append(cycle)  # as ctypes.cast makes them
        if self._board.begin("set_inputs") is not None:
            return
        shapes = [array.shape for array in inputs]
        if shapes not in self._graph.launches or any(array.dtype != np.float16 for array in inputs):
            raise Exception("Set input shape failed. error code: RKNN_ERR_PARAM_INVALID")
        self._launch = self._graph.launches.index(shapes)
        self._inputs = operands

    def run(self) -> int:
        self._board.runs.append((self._core, self._graph.launches[self._launch][0][2]))
        deed = self._board.begin("run")
        if self._core in self._board.dead:
            deed = -1
        results = self._results[self._launch]
        if deed == "garbage":
            for result in results:
                result[...] = np.random.default_rng(1).standard_normal(result.shape)
        elif deed is None:
            for result, computed in zip(results, self._graph.compute(self._inputs), strict=True):
                result[...] = computed
        return deed if isinstance(deed, int) else 0

    def get_outputs(self) -> list[NDArray[np.float32]] | None:
        deed = self._board.begin("get_outputs")
        copies = [result.copy() for result in self._results[self._launch]]
        return copies if deed is None else deed  # type: ignore[return-value] # whatever a test wants

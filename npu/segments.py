"""A model's graphs as ONNX Runtime sessions, and the buffers between them."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import MissingExtra, UsageError

from .graphs import SegmentGraphs
from .interrupts import held_signals
from .mapped_file import release_mappings
from .model import ModelConfig
from .onnx_graph import WEIGHTS_FILE

if TYPE_CHECKING:
    import onnxruntime  # type: ignore[import-untyped] # it ships no types

__all__ = ["SegmentBinding", "SegmentBuffers", "Segments", "session_options"]

Floats: TypeAlias = NDArray[np.float32]


class Segments:
    """One session per segment: a run costs 6 us, half of what an If node over all of them in one session costs.

    Args:
        graphs: builds the segments.
        layers: decoder blocks of the model.
        folder: where the weights file lies; not needed any more afterwards.
        threads: threads of a product.

    Attributes:
        sessions: `first`, `middle` of each layer but the last, `last`.
        runtime_version: version of ONNX Runtime.

    Raises:
        MissingExtra: onnxruntime or onnx is not installed.
    """

    def __init__(self, graphs: SegmentGraphs, layers: int, folder: Path, threads: int) -> None:
        # Official builds report to their maker, keep a device id in the user's cache folder, and warn on stderr where
        # they cannot (1.32, Privacy.md). Not from a machine's control panel, unless its owner has asked for it.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            with held_signals():  # where a handler raises, its C++ makes another error of it, or aborts
                import onnxruntime  # noqa: PLC0415 - comes with an extra
        except ModuleNotFoundError as error:
            raise MissingExtra("running a model needs onnxruntime: pip install 'rockpage[model]'") from error
        _share_arena()
        options = session_options(folder, threads)

        def session(graph: bytes) -> onnxruntime.InferenceSession:
            loaded = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            # ONNX Runtime (1.32) keeps scales mapped beside packed ones that its kernels read: a tenth of the weights.
            release_mappings(folder / WEIGHTS_FILE)
            return loaded

        # The head is the largest segment by far: loaded first, its peak does not come on top of all the others.
        last = session(graphs.last())
        middle = [session(graphs.middle(layer)) for layer in range(layers - 1)]
        self.sessions = [session(graphs.first()), *middle, last]
        self.runtime_version: str = onnxruntime.__version__
        _alive.add(self)


def session_options(folder: Path, threads: int) -> onnxruntime.SessionOptions:
    """How every session is set up.

    Args:
        folder: where the weights file lies.
        threads: threads of a product.

    Raises:
        UsageError: the folder's name is not UTF-8, which ONNX Runtime cannot open.
    """
    import onnxruntime  # noqa: PLC0415 - comes with an extra

    place = str(folder)
    try:
        place.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the path {place!a} is not UTF-8: set XDG_CACHE_HOME to one that is", path=place) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors; its warnings are about choices made here on purpose
    options.enable_mem_pattern = False  # patterns are kept per shape, and shapes vary
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", place)
    # On aarch64, Arm's KleidiAI quantises the inputs of a 4-bit product over a whole row and not block by block: one
    # outlier spoils all others. A token's log-probability is then off by 0.16 in the mean instead of by 0.06, and
    # perplexity by 4 % (SmolLM2-135M, Q4_1, ONNX Runtime 1.32).
    options.add_session_config_entry("mlas.disable_kleidiai", "1")
    return options


_alive: weakref.WeakSet[Segments] = weakref.WeakSet()


def _never_destroy_sessions() -> None:
    """In a child of fork(): a session's destructor joins threads that only the parent has, and that is a segfault."""
    for segments in _alive:
        for session in segments.sessions:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # a reference that nobody will ever give up


os.register_at_fork(after_in_child=_never_destroy_sessions)


@functools.cache  # the registration lasts as long as the process
def _share_arena() -> None:
    """Let all sessions take their temporaries from one arena instead of each from one of its own."""
    import onnxruntime  # noqa: PLC0415 - comes with an extra

    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    unlimited, as_requested, default = 0, 1, -1
    config = onnxruntime.OrtArenaCfg(unlimited, as_requested, default, default)
    onnxruntime.create_and_register_allocator(memory, config)


class SegmentBuffers:
    """The rows that segments and attention hand to each other. They live as long as the decoder, at one address."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        def rows(width: int) -> Floats:
            return np.zeros((max_rows, width), np.float32)

        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        # `first` reads number 0; segment i behind it reads number (i - 1) % 2 and writes number i % 2.
        self.residuals = (rows(config.hidden), rows(config.hidden))
        self.q, self.k, self.v, self.attended = rows(q_width), rows(kv_width), rows(kv_width), rows(q_width)
        self.cos, self.sin = rows(config.head_dim // 2), rows(config.head_dim // 2)
        self.logit_rows = np.zeros(max_rows, np.int64)

    def of(self, name: str, segment: int) -> Floats:
        """The buffer behind a float32 input or output of a segment."""
        if name == "residual":
            return self.residuals[max(segment - 1, 0) % 2]
        if name == "residual_out":
            return self.residuals[segment % 2]
        buffer: Floats = getattr(self, name)
        return buffer


class SegmentBinding:
    """Every segment bound to the first `rows` rows of the buffers, so that a run passes no arguments."""

    def __init__(self, segments: Segments, buffers: SegmentBuffers, rows: int) -> None:
        self._sessions = segments.sessions
        self._logit_rows = buffers.logit_rows
        self._bindings = [_bind(session, buffers, index, rows) for index, session in enumerate(segments.sessions)]

    def run(self, segment: int) -> None:
        """Run a segment other than the last: its outputs are in the buffers afterwards."""
        self._sessions[segment].run_with_iobinding(self._bindings[segment])

    def run_last(self, logit_rows: NDArray[np.int64], logits: Floats) -> None:
        """Run the last segment for some rows, straight into the caller's `[r, vocab]`."""
        binding, wanted = self._bindings[-1], self._logit_rows[: len(logit_rows)]
        wanted[:] = logit_rows
        binding.bind_input("logit_rows", "cpu", 0, np.int64, wanted.shape, wanted.ctypes.data)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._sessions[-1].run_with_iobinding(binding)


def _bind(
    session: onnxruntime.InferenceSession, buffers: SegmentBuffers, index: int, rows: int
) -> onnxruntime.IOBinding:
    binding = session.io_binding()
    for value in session.get_inputs():
        if value.name != "logit_rows":  # differs from run to run
            array = buffers.of(value.name, index)[:rows]
            binding.bind_input(value.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for value in session.get_outputs():
        if value.name != "logits":
            array = buffers.of(value.name, index)[:rows]
            # q and k leave the rotation with a leading axis of 1.
            shape = (1,) * (len(value.shape) - 2) + array.shape
            binding.bind_output(value.name, "cpu", 0, array.dtype, shape, array.ctypes.data)
    return binding

"""Attention on the CPU, straight through the block table."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hostcache.attention_work import AttendedTokens, AttentionWork
from hostcache.block_layout import BlockLayout
from hostcache.codec import Codec
from hostcache.codec_pools import codecs_down_to
from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry

from ._attention import ffi, lib
from .attention import AttentionBatch
from .checks import check_geometry, check_layer, check_operand, check_process, check_windows, copy_checked

if TYPE_CHECKING:
    from hostcache._cffi import CData

__all__ = ["BlockMemory", "CpuAttention"]

_MAX_THREADS = 256
"""More than any machine this runs on has cores; keeps a slip of the pen from taking 110 KiB of scratch a thread."""

_WORTH_A_THREAD = 1 << 19
"""Multiply-adds that pay for waking a thread: about 10 us of work on an x86-64 core, where a wake-up costs about 5."""


class BlockMemory(Protocol):
    """What a runtime reads of the cache; `PagedKVCache` is one."""

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the KV cache and the layout of a block."""

    @property
    def leanest(self) -> Codec:
        """Blocks are of this codec or of a richer one."""

    @property
    def units(self) -> int:
        """Units in the region; a block's id is the number of its first one."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit: block b starts at `b * unit_bytes`."""

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The region, flat."""

    def layout(self, codec: Codec) -> BlockLayout:
        """Where the bytes of a codec's block lie."""


class _View(NamedTuple):
    """What a step looks like to the layers of one window."""

    windows: CData  # int32 [sequences]
    threads: int
    unit_starts: CData  # int32 [sequences + 1]
    part_starts: CData  # int64 [sequences + 1]
    part_floats: int  # the last of them


class CpuAttention:
    """Causal grouped-query attention in C over blocks of any codec, softmax scale `head_dim ** -0.5`.

    It computes in float32; products of int8 and int4 levels with a query, or with weights, are summed in integers, for
    which the latter become int16. That adds to the error of the codec about 1e-4 of it.

    A query row's result depends on its query, its position and its tokens alone: it is the same bits whatever else is
    in the batch, however the prompt was cut into chunks, and for every number of threads. Slots behind a context are
    never read, and tokens that a row may not see never reach its result. Different `isa` round differently.

    The runtime serves one step at a time; other runtimes over the same cache are independent of it.

    Args:
        cache: where K and V lie; its region stays mapped until `close()`.
        heads: query heads, a multiple of the cache's KV heads.
        threads: threads that compute, the caller's included; the others sleep between calls.
        isa: `"avx2"`, `"avx512"` (with VNNI; for a head_dim that 16 divides), `"neon"`, `"plain"`, or `"auto"` for the
            best of them here.
        windows: of each layer, the newest tokens that its rows see at most, 0: all; empty: no layer has one.

    Attributes:
        name: `"cpu"`.
        isa: what `"auto"` became.
        numerics: the name and the `isa`, whose sums differ in their last bits.
        work: as many tokens as rows look at.

    Raises:
        UsageError: a geometry the kernel cannot compute, threads or an `isa` this machine cannot give, or windows that
            are not one for each layer.
    """

    name = "cpu"

    def __init__(
        self, cache: BlockMemory, heads: int, threads: int = 1, *, isa: str = "auto", windows: Sequence[int] = ()
    ) -> None:
        geometry = cache.geometry
        check_geometry(geometry, heads)
        if not 1 <= threads <= _MAX_THREADS:
            raise UsageError(f"threads must be 1..{_MAX_THREADS}, got {threads}", threads=threads)
        self.work: AttentionWork = AttendedTokens()
        self._layer_windows = check_windows(windows, geometry.layers)
        runtime = lib.rp_attention_open(threads, geometry.head_dim, isa.encode())
        if runtime == ffi.NULL:
            raise _open_error(ffi.errno, threads, isa, geometry.head_dim)

        self.isa = ffi.string(lib.rp_attention_isa(runtime)).decode()
        self.numerics = f"{self.name}-{self.isa}"
        self._runtime = ffi.gc(runtime, lib.rp_attention_close)
        self._geometry = geometry
        self._units = cache.units
        self._leanest = cache.leanest
        self._heads = heads
        self._threads = threads
        self._pool = ffi.from_buffer("uint8_t[]", cache.buffer)
        self._step = ffi.new("rp_attention_step *")
        self._step.pool = self._pool
        self._step.unit_bytes = cache.unit_bytes
        self._step.block_tokens = geometry.block_tokens
        self._step.kv_heads = geometry.kv_heads
        self._step.group = heads // geometry.kv_heads
        self._step.head_dim = geometry.head_dim
        self._step.scale = geometry.head_dim**-0.5
        for codec in codecs_down_to(cache.leanest):
            self._describe(codec, cache.layout(codec))
        self._batch: AttentionBatch | None = None
        self._kept: list[NDArray[Any]] = []  # what the struct points to of this step
        self._views: dict[int, _View] = {}  # by the layers' windows
        self._closed = False
        self._process = os.getpid()

    def begin_step(self, batch: AttentionBatch) -> None:
        """Check `batch` and keep a copy of it; the copy serves every layer.

        Raises:
            UsageError: a block id is outside the pool, a table is shorter than its context, the arrays do not fit
                together, the previous step has not ended, the runtime is closed, or was opened before a fork().
        """
        self._check_open()
        if self._batch is not None:
            raise UsageError("begin_step came before the previous step's end_step: call end_step first")
        checked = copy_checked(batch, self._geometry, self._units, self._leanest)

        step = self._step
        sequences = checked.sequences
        none = np.zeros(sequences, np.int32)
        step.sequences = sequences
        step.table_width = checked.tables.shape[1]
        self._kept = []
        step.query_starts = self._pointer("int32_t[]", checked.query_starts)
        step.context_lens = self._pointer("int32_t[]", checked.context_lens)
        step.tables = self._pointer("int32_t[]", checked.tables)
        step.sinks = self._pointer("int32_t[]", none if checked.sinks is None else checked.sinks)
        step.codecs = self._pointer(
            "uint8_t[]", np.zeros(sequences, np.uint8) if checked.codecs is None else checked.codecs
        )
        step.finished = self._pointer("int32_t[]", np.zeros(sequences * self._geometry.kv_heads, np.int32))
        self._views = {window: self._view(checked.narrowed(window)) for window in set(self._layer_windows)}
        floats = max(view.part_floats for view in self._views.values())
        step.parts = self._pointer("float[]", np.empty(floats, np.float32)) if floats else ffi.NULL
        self._batch = checked

    def attend(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Attend `q` over the cached K and V of `layer`; other Python threads run meanwhile.

        Args:
            layer: layer index.
            q: float32 `[rows, heads, head_dim]`, C-contiguous, rotated, not scaled.
            out: float32 `[rows, heads, head_dim]`, C-contiguous, overwritten.

        Raises:
            UsageError: a shape, a dtype or the layer does not fit, no step was begun, or the runtime is closed.
        """
        self._check_open()
        if self._batch is None:
            raise UsageError("attend came without a step: call begin_step first")
        check_layer(layer, self._geometry.layers)
        shape = (self._batch.rows, self._heads, self._geometry.head_dim)
        check_operand("q", q, shape)
        check_operand("out", out, shape, writable=True)
        view = self._views[self._layer_windows[layer]]
        step = self._step
        step.windows, step.threads, step.unit_starts, step.part_starts = view[:4]
        step.layer = layer
        lib.rp_attend(
            self._runtime,
            step,
            ffi.from_buffer("float[]", q),
            ffi.from_buffer("float[]", out, require_writable=True),
        )

    def end_step(self) -> None:
        """The step is over. Safe to call after a failed `attend`, and twice.

        Raises:
            UsageError: the runtime is closed.
        """
        self._check_open()
        self._batch = None

    def close(self) -> None:
        """Join the threads and let go of the region. Every later call but `close` raises UsageError."""
        if self._closed:
            return
        self._closed = True
        self._batch = None
        ffi.release(self._runtime)
        ffi.release(self._pool)

    def _describe(self, codec: Codec, layout: BlockLayout) -> None:
        """Tell the kernel where a codec's bytes lie."""
        layouts: Any = self._step.layouts
        described = layouts[codec.code]
        described.row_bytes = layout.row_bytes
        described.payload_bytes = layout.payload_bytes
        described.token_bytes = layout.token_bytes
        described.groups = layout.groups
        described.rotation = codec.rotation(self._geometry.head_dim)

    def _pointer(self, kind: str, array: NDArray[Any]) -> CData:
        """To an array that is kept alive until the next step; the struct does not."""
        self._kept.append(array)
        return ffi.from_buffer(kind, array)

    def _view(self, batch: AttentionBatch) -> _View:
        """Windows, as many threads as are worth waking for one layer's K and V, and how the work is cut up.

        Causality is left out of the work, for it halves it at most.
        """
        windows = np.zeros(batch.sequences, np.int32) if batch.windows is None else batch.windows
        seen = batch.context_lens.astype(np.int64)
        if batch.windows is not None and batch.sinks is not None:
            seen = np.where(windows, np.minimum(seen, batch.sinks + windows.astype(np.int64)), seen)
        multiply_adds = int(np.diff(batch.query_starts) @ seen) * 2 * self._heads * self._geometry.head_dim
        unit_starts = np.empty(batch.sequences + 1, np.int32)
        part_starts = np.empty(batch.sequences + 1, np.int64)
        step = self._step
        step.windows = self._pointer("int32_t[]", windows)
        step.threads = min(self._threads, 1 + multiply_adds // _WORTH_A_THREAD)
        step.unit_starts = self._pointer("int32_t[]", unit_starts)
        step.part_starts = self._pointer("int64_t[]", part_starts)
        lib.rp_plan(step)
        return _View(step.windows, step.threads, step.unit_starts, step.part_starts, int(part_starts[-1]))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this attention runtime is closed: make a new one")
        check_process(self._process)


def _open_error(number: int, threads: int, isa: str, head_dim: int) -> UsageError:
    if number == errno.ENOTSUP:
        return UsageError(
            f'isa "{isa}" does not run on this machine, or not with head_dim {head_dim}: use "auto"',
            isa=isa,
            head_dim=head_dim,
        )
    return UsageError(f"{threads} threads could not be started ({os.strerror(number)}): use fewer", threads=threads)

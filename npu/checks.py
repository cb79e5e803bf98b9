"""What an attention runtime checks before it takes a model on, and before it hands memory to code that trusts it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hostcache.codec import FP16, Codec
from hostcache.codec_pools import codecs_down_to
from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry

from ._attention import lib
from .attention import AttentionBatch

__all__ = ["check_geometry", "check_layer", "check_operand", "check_process", "check_windows", "copy_checked"]


def check_geometry(geometry: KVGeometry, heads: int) -> None:
    """See that a model's attention can be computed: every runtime here is the CPU kernel or falls back on it.

    Args:
        geometry: of the model's KV cache.
        heads: query heads.

    Raises:
        UsageError: heads that KV heads do not divide, or a head_dim or an element that the kernel has no path for.
    """
    if heads < 1 or heads % geometry.kv_heads:
        raise UsageError(
            f"{heads} query heads are not a multiple of {geometry.kv_heads} KV heads",
            heads=heads,
            kv_heads=geometry.kv_heads,
        )
    if geometry.head_dim % 8 or geometry.head_dim > lib.RP_MAX_HEAD_DIM:
        raise UsageError(
            f"head_dim {geometry.head_dim} is not a multiple of 8 up to {lib.RP_MAX_HEAD_DIM}: "
            "the attention kernel has no path for it",
            head_dim=geometry.head_dim,
        )
    if geometry.itemsize != np.dtype(np.float16).itemsize:
        raise UsageError(
            f"the attention kernel reads fp16, 2 bytes an element, got itemsize {geometry.itemsize}",
            itemsize=geometry.itemsize,
        )


def check_windows(windows: Sequence[int], layers: int) -> tuple[int, ...]:
    """See that a model's windows are one for each layer.

    Args:
        windows: tokens, 0 for a layer that sees all; empty if no layer has a window.
        layers: of the model.

    Returns:
        One for each layer.

    Raises:
        UsageError: there are more or fewer, or one does not fit int32.
    """
    if windows and len(windows) != layers:
        raise UsageError(
            f"{len(windows)} windows for {layers} layers: pass one for each, 0 for a layer that sees everything",
            windows=len(windows),
            layers=layers,
        )
    for layer, window in enumerate(windows):
        if not 0 <= window <= np.iinfo(np.int32).max:
            raise UsageError(
                f"layer {layer} has a window of {window} tokens: 0 is none, and 2^31 - 1 the most",
                layer=layer,
                window=window,
            )
    return tuple(windows) or (0,) * layers


def copy_checked(batch: AttentionBatch, geometry: KVGeometry, units: int, leanest: Codec = FP16) -> AttentionBatch:
    """Copy `batch` if it is sound, so that nobody can change it behind a kernel that trusts it.

    Args:
        batch: what the engine handed over.
        geometry: of the cache that the tables point into.
        units: units in that cache: a block's id is the number of its first one.
        leanest: codec that the cache was opened for.

    Raises:
        UsageError: a dtype or shape is wrong, `query_starts` falls or does not start at 0, a context is shorter than
            its own rows, a table is shorter than its context, a block id that the context needs is not in the pool, a
            window or a number of sinks is negative, or the cache does not serve a codec.
    """
    starts = _copy_int32("query_starts", batch.query_starts, dimensions=1)
    lens = _copy_int32("context_lens", batch.context_lens, dimensions=1)
    tables = _copy_int32("tables", batch.tables, dimensions=2)
    if len(starts) != len(lens) + 1 or len(tables) != len(lens):
        raise UsageError(
            f"{len(lens)} context_lens want {len(lens) + 1} query_starts and {len(lens)} tables, "
            f"got {len(starts)} and {len(tables)}",
            context_lens=len(lens),
            query_starts=len(starts),
            tables=len(tables),
        )
    rows = np.diff(starts)
    if starts[0] != 0 or (rows < 0).any():
        raise UsageError(
            f"query_starts must rise from 0, got {starts.tolist()}: pass the running sum of each sequence's rows",
            query_starts=starts.tolist(),
        )
    for i in np.flatnonzero(lens < rows):
        raise UsageError(
            f"sequence {i} has {rows[i]} query rows but a context of {lens[i]} tokens: its own rows count as context",
            sequence=int(i),
            rows=int(rows[i]),
            context_len=int(lens[i]),
        )
    needed = -(-lens // geometry.block_tokens)
    width = tables.shape[1]
    for i in np.flatnonzero(needed > width):
        raise UsageError(
            f"sequence {i} needs {needed[i]} blocks for {lens[i]} tokens but its table holds {width}: widen tables",
            sequence=int(i),
            needed=int(needed[i]),
            width=width,
        )
    codecs, spans = _copy_codecs(batch.codecs, len(lens), leanest)
    used = np.arange(width) < needed[:, np.newaxis]
    for i, column in np.argwhere(used & ((tables < 0) | (tables % spans > 0) | (tables > units - spans))):
        span = int(spans[i, 0])
        raise UsageError(
            f"sequence {i} names block {tables[i, column]} at position {column} of its table, "
            f"but the pool has blocks 0..{units - span}" + (f" in steps of {span} for its codec" if span > 1 else ""),
            sequence=int(i),
            column=int(column),
            block=int(tables[i, column]),
            units=units,
        )
    windows = _copy_counts("windows", batch.windows, len(lens))
    return AttentionBatch(starts, lens, tables, windows, _copy_counts("sinks", batch.sinks, len(lens)), codecs)


def check_layer(layer: int, layers: int) -> None:
    """See that a model has a layer.

    Raises:
        UsageError: it has not.
    """
    if not 0 <= layer < layers:
        raise UsageError(f"layer {layer} is not in 0..{layers - 1}", layer=layer)


def check_operand(
    name: str, array: NDArray[np.float32], shape: tuple[int, int, int], *, writable: bool = False
) -> None:
    """See that a kernel may walk `array` as float32 `shape` without gaps.

    Args:
        name: for the message.
        array: q or out of one attention call.
        shape: `[rows, heads, head_dim]` of the step.
        writable: the kernel writes to it.

    Raises:
        UsageError: dtype, shape or strides differ, or it is read-only and must not be.
    """
    if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
        raise UsageError(
            f"{name} must be C-contiguous float32 {shape}, got {array.dtype} {array.shape} with strides "
            f"{array.strides}: pass np.ascontiguousarray({name}, np.float32)",
            name=name,
            dtype=str(array.dtype),
            shape=array.shape,
            expected=shape,
        )
    if writable and not array.flags.writeable:
        raise UsageError(f"{name} is read-only: pass an array that may be written", name=name)


def check_process(opened_in: int) -> None:
    """See that a runtime is used where it was opened.

    fork() copies neither threads nor a device's state, and the pool's pages are empty in the child (see
    `hostcache.Region`): whatever it computed would hang or be wrong.

    Args:
        opened_in: id of the process that opened the runtime.

    Raises:
        UsageError: this is another process, forked off later.
    """
    here = os.getpid()
    if here != opened_in:
        raise UsageError(
            f"process {here} was forked from process {opened_in} after the engine had started, and cannot use it: "
            "load the model after the fork, or start the child with multiprocessing's 'spawn'",
            process=here,
            opened_in=opened_in,
        )


def _copy_counts(name: str, array: NDArray[np.int32] | None, sequences: int) -> NDArray[np.int32] | None:
    if array is None:
        return None
    counts = _copy_int32(name, array, dimensions=1)
    if len(counts) != sequences:
        raise UsageError(
            f"{sequences} sequences want as many {name}, got {len(counts)}: pass 0 for one that has none",
            name=name,
            got=len(counts),
            sequences=sequences,
        )
    for i in np.flatnonzero(counts < 0):
        raise UsageError(
            f"{name}[{i}] is {counts[i]}: it counts tokens, 0 at least",
            name=name,
            sequence=int(i),
            value=int(counts[i]),
        )
    return counts


def _copy_codecs(
    array: NDArray[np.uint8] | None, sequences: int, leanest: Codec
) -> tuple[NDArray[np.uint8] | None, NDArray[np.int32]]:
    """The codec of each sequence, and units of a block of it, `[sequences, 1]`."""
    units = {codec.code: leanest.blocks_per_extent // codec.blocks_per_extent for codec in codecs_down_to(leanest)}
    if array is None:
        return None, np.full((sequences, 1), units[FP16.code], np.int32)
    if array.dtype != np.uint8 or array.shape != (sequences,):
        raise UsageError(
            f"codecs must be uint8 ({sequences},), got {array.dtype} {array.shape}: pass a number for each sequence",
            dtype=str(array.dtype),
            shape=array.shape,
        )
    numbers = array.tolist()
    for i, number in enumerate(numbers):
        if number not in units:
            raise UsageError(
                f"sequence {i} is of codec number {number}, but the pool was opened for {leanest.name} at leanest: "
                f"its codecs have the numbers {sorted(units)}",
                sequence=i,
                codec=number,
            )
    return array.copy(), np.array([units[number] for number in numbers], np.int32).reshape(-1, 1)


def _copy_int32(name: str, array: NDArray[np.int32], *, dimensions: int) -> NDArray[np.int32]:
    if array.dtype != np.int32 or array.ndim != dimensions:
        raise UsageError(
            f"{name} must be int32 with {dimensions} dimension(s), got {array.dtype} {array.shape}",
            name=name,
            dtype=str(array.dtype),
            shape=array.shape,
        )
    return np.array(array, order="C")

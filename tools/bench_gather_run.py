"""The work of `rockpage bench gather`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache, Region
from hostcache.codec import FP16, INT4, INT8, Codec
from staging import GatherPlan, Residency, StagingArena, StagingLayout
from staging._limits import ffi, lib
from staging.coherent import CoherentMemory

from .bench_gather_convert import convert_rows
from .bench_rows import Point, Row, take_turns, timed
from .terminal import tell

__all__ = ["Shape", "rows"]

SWEPT = 96 << 20
"""Bytes of KV that take turns: more than the caches of the machines that this is run on."""

REFERENCE, SMOLLM2 = KVGeometry(24, 2, 128), KVGeometry(30, 3, 64)

MUST = {128: (0.75, 0.85), 64: (0.60, 0.75)}
"""By head_dim: what share of memcpy's speed a gather must reach, and what it ought to."""

APPEND_MUST, APPEND_STRETCH = 4.0, 2.0
"""Times a memcpy of the same rows, what an append may take, and what it ought to."""

BUFFERS = 6
"""Of the arena, two for each of an RK3588's cores, so that it has huge pages, as a runtime has; one is filled."""

BY: Literal["median"] = "median"
"""What is compared: the least time is one in which some of what is read was in a cache after all."""


@dataclass(frozen=True)
class Shape:
    """What is gathered.

    Attributes:
        geometry: of the cache.
        sequences: of a launch.
        tokens: of each.
        run: blocks of a sequence that are neighbours in the pool.
        decode: K carries its tokens' marks, as where sequences decode; else rows of a prompt have a mask beside it.
        codec: of the blocks; what is staged is fp16 always.
    """

    geometry: KVGeometry
    sequences: int
    tokens: int
    run: int = 1
    decode: bool = False
    codec: Codec = FP16

    @property
    def name(self) -> str:
        """With all that tells it from others."""
        blocks = "random blocks" if self.run == 1 else f"runs of {self.run} blocks"
        more = (", marked" if self.decode else "") + (f", {self.codec.name}" if self.codec is not FP16 else "")
        return f"{blocks}, {self.sequences} x {self.tokens} tokens, {self.heads}{more}"

    @property
    def heads(self) -> str:
        """Of the model."""
        return f"{self.geometry.kv_heads} heads x {self.geometry.head_dim}"

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer, as they are staged."""
        return self.sequences * self.geometry.blocks_for(self.tokens) * self.geometry.layer_bytes

    @property
    def launches(self) -> int:
        """How many launches of different sequences it takes to sweep the caches."""
        return max(2, SWEPT // (self.layer_bytes * self.geometry.layers))


GATHERS = (
    *(Shape(REFERENCE, *size) for size in ((1, 512), (1, 2048), (8, 512), (1, 2048, 4), (8, 512, 1, True))),
    *(Shape(SMOLLM2, *size) for size in ((1, 1024), (1, 2048), (8, 512), (1, 2048, 4), (8, 512, 1, True))),
)

CODECS = tuple(Shape(model, 8, 512, codec=codec) for model in (REFERENCE, SMOLLM2) for codec in (INT8, INT4))

APPENDS = tuple(Shape(model, *size) for model in (REFERENCE, SMOLLM2) for size in ((1, 500), (8, 500), (8, 2000)))


GROWING = KVGeometry(6, 2, 128)
"""Fewer layers than the reference has, so that 64 sequences fit everywhere."""

CONTEXTS = tuple(1 << power for power in range(7, 14))
SEQUENCES = tuple(1 << power for power in range(7))
"""What the chart shows: 128 to 8192 tokens of one sequence, 1 to 64 sequences of `EACH`."""

EACH = 512

GROWING_TIMES = 30
"""Of each point at most: they are many, and the last are large."""


def rows(times: int) -> list[Row]:
    """Measure every shape, each so many times; points of the chart less often."""
    found = [gather_row(shape, times) for shape in (*GATHERS, *CODECS)]
    found += [append_row(shape, times) for shape in APPENDS]
    for model in (REFERENCE, SMOLLM2):
        found += convert_rows(model, times)
    few = min(times, GROWING_TIMES)
    found += [gather_row(Shape(GROWING, 1, at), few, Point("context", at, "gather")) for at in CONTEXTS]
    return [*found, *(gather_row(Shape(GROWING, at, EACH), few, Point("sequences", at, "gather")) for at in SEQUENCES)]


class Launches:
    """Sequences in a pool, whose blocks lie as a shape says, and one staging buffer.

    Attributes:
        shape: as given.
        cache: where they lie.
        tables: int32 `[launches, sequences, blocks]`.
        layout: of each launch.
        arena: as large as that of a runtime.
    """

    def __init__(self, shape: Shape) -> None:
        geometry, per_sequence = shape.geometry, shape.geometry.blocks_for(shape.tokens)
        blocks = shape.launches * shape.sequences * per_sequence
        self.shape = shape
        self.cache = PagedKVCache.create(geometry, blocks * geometry.block_bytes, shape.codec)
        self.cache.buffer[:] = 1  # its pages are there from now on
        starts = np.random.default_rng(0).permutation(blocks // shape.run) * shape.run
        ids = (starts[:, np.newaxis] + np.arange(shape.run)).astype(np.int32)
        self.tables = ids.reshape(shape.launches, shape.sequences, per_sequence)
        mask_rows = 0 if shape.decode else 8
        self.layout = StagingLayout(shape.sequences, geometry.kv_heads, shape.tokens, 8, geometry.head_dim, mask_rows)
        nbytes = StagingArena.bytes_for(BUFFERS, self.layout.nbytes)
        self.arena = StagingArena(Region.anonymous(nbytes), BUFFERS, CoherentMemory())

    def plans(self) -> list[GatherPlan]:
        """One of each launch, whole."""
        lengths = np.full(self.shape.sequences, self.shape.tokens, np.int32)
        codecs = np.full(self.shape.sequences, self.shape.codec.code, np.uint8)
        return [
            GatherPlan.build(
                self.shape.geometry,
                self.cache.units,
                table,
                lengths,
                self.layout,
                unit_bytes=self.cache.unit_bytes,
                codecs=codecs,
            )
            for table in self.tables
        ]


def gather_row(shape: Shape, times: int, point: Point | None = None) -> Row:
    """A gather from scratch beside a copy of as many bytes in one piece; a point of the chart has no target."""
    tell(shape.name)
    launches = Launches(shape)
    plans, buffer = launches.plans(), launches.arena.buffers[0]
    layers = shape.geometry.layers
    turns = itertools.cycle([(plan, layer) for plan in plans for layer in range(layers)])
    source = ffi.from_buffer("uint8_t[]", launches.cache.buffer)
    target = ffi.from_buffer("uint8_t[]", buffer.memory)
    # Far from what is gathered at the time, and of the same pages.
    pieces = len(launches.cache.buffer) // shape.layer_bytes
    starts = itertools.cycle([(piece + pieces // 2) % pieces * shape.layer_bytes for piece in range(pieces)])

    def gather() -> float:
        plan, layer = next(turns)
        buffer.acquire()
        seconds = timed(partial(buffer.fill, launches.cache, plan, layer))()
        buffer.release()
        return seconds

    def copy() -> float:
        start = source + next(starts)
        return timed(partial(lib.rp_limit_copy, start, target, shape.layer_bytes))()

    ours, limit = take_turns([gather, copy], times)
    asked = shape.run == 1 and shape.codec is FP16 and point is None
    target_ratio, stretch = MUST[shape.geometry.head_dim] if asked else (None, None)
    return Row(
        shape.name,
        "memcpy",
        ours,
        limit,
        target_ratio,
        stretch,
        "higher",
        by=BY,
        goal=f"gather, random blocks, head_dim {shape.geometry.head_dim}",
        point=point,
    )


def append_row(shape: Shape, times: int) -> Row:
    """A token of each sequence put to what stays staged, beside memcpys of the same rows, layer by layer."""
    tell(f"append, {shape.name}")
    steps = -(-(times + 10) // shape.geometry.layers)
    ours, limit = Growing(shape, steps), Growing(shape, steps)
    grown, copied = take_turns([ours.append, limit.copy], times)
    return Row(
        f"append a token, {shape.sequences} x {shape.tokens} tokens, {shape.heads}",
        "memcpy",
        grown,
        copied,
        APPEND_MUST,
        APPEND_STRETCH,
        by=BY,
        goal=f"append to a staged copy, {shape.sequences} sequence{'s' * (shape.sequences > 1)}",
    )


class Growing:
    """Sequences that get a token in each step; all layers of a step follow each other.

    Attributes:
        cache: where they lie.
        staged: where copies of them stay.
    """

    def __init__(self, shape: Shape, steps: int) -> None:
        geometry, longest = shape.geometry, shape.tokens + steps + 2
        self._geometry = geometry
        self.cache = PagedKVCache.create(
            geometry, shape.sequences * geometry.blocks_for(longest) * geometry.block_bytes
        )
        self.cache.buffer[:] = 1
        self._tables = [self.cache.table() for _ in range(shape.sequences)]
        for _ in range(shape.tokens):  # in turn, as sequences that grow together get their blocks
            for table in self._tables:
                table.append(1)
        bucket = -(-longest // 64) * 64
        self._layout = StagingLayout(shape.sequences, geometry.kv_heads, bucket, 8, geometry.head_dim, 0)
        self._buffer_bytes = StagingArena.bytes_for(1, self._layout.nbytes)
        self.staged = Region.anonymous(geometry.layers * self._buffer_bytes)
        self._residency = Residency(self.cache, self.staged.buffer, 0, CoherentMemory(), own_tokens=1)
        self._source = ffi.from_buffer("uint8_t[]", self.cache.buffer)
        self._target = ffi.from_buffer("uint8_t[]", self.staged.buffer)
        self._steps = self._fills()
        self._copies = self._runs()
        for _ in range(geometry.layers):  # whole, the first time
            self.append()

    def append(self) -> float:
        """Fill the next layer's buffer; returns the seconds."""
        return next(self._steps)

    def copy(self) -> float:
        """Copy what that would, by memcpy."""
        return next(self._copies)

    def _fills(self) -> Iterator[float]:
        while True:
            lengths = self._grow()
            plan = GatherPlan.build(
                self._geometry,
                self.cache.blocks,
                np.stack([table.ids for table in self._tables]),
                lengths,
                self._layout,
            )
            self._residency.begin_step()
            copy = self._residency.lend(plan, lengths, lengths - 1)
            assert copy is not None
            for layer in range(self._geometry.layers):
                buffer = copy.acquire(layer)
                assert buffer is not None
                seconds = timed(partial(buffer.fill, self.cache, plan, layer))()
                buffer.sync_to_device()
                buffer.release()
                yield seconds

    def _runs(self) -> Iterator[float]:
        geometry, layout = self._geometry, self._layout
        token_bytes = geometry.head_dim * geometry.itemsize
        while True:
            last = self._grow() - 1
            block = np.array([table.blocks[-1] for table in self._tables])
            head = np.arange(geometry.kv_heads)
            source = (block * geometry.block_bytes + last % geometry.block_tokens * token_bytes)[:, np.newaxis]
            source = source + head * geometry.row_bytes
            place = np.arange(layout.heads).reshape(-1, geometry.kv_heads) * layout.tokens + last[:, np.newaxis]
            keys = place * (layout.key_channels * geometry.itemsize)
            values = layout.values_offset + place * token_bytes
            size = np.full(source.shape, token_bytes)
            runs = np.concatenate(
                [
                    np.stack(run, axis=2).reshape(-1, 3)
                    for run in ((source, keys, size), (source + geometry.kv_bytes, values, size))
                ]
            )
            for layer in range(geometry.layers):
                shifted = runs + np.array([layer * geometry.layer_bytes, layer * self._buffer_bytes, 0])
                pointer = ffi.from_buffer("int64_t[]", shifted)
                yield timed(partial(lib.rp_limit_copy_runs, self._source, self._target, pointer, len(shifted)))()

    def _grow(self) -> NDArray[np.int32]:
        for table in self._tables:
            table.append(1)
        return np.array([table.length for table in self._tables], np.int32)

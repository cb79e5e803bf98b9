"""Batches of sequences in a pool, attended in turn, so that what is read is in no cache of the CPU."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from hostcache import KVGeometry, PagedKVCache
from hostcache.block_layout import BlockLayout
from hostcache.codec import FP16, Codec
from hostcache.codec_pools import unit_bytes
from npu.attention import AttentionBatch
from npu.cpu import CpuAttention
from staging._limits import ffi, lib

from .bench_rows import timed

__all__ = ["Shape", "Sweep"]

SWEPT = 96 << 20
"""Bytes of KV that take turns: more than the caches of the machines that this is run on."""

SEED = 0

FILLER = 0x24
"""Every byte of a pool: as fp16, element or scale, 0.016; as int8, 36; and no NaN."""


@dataclass(frozen=True)
class Shape:
    """What is attended.

    Attributes:
        geometry: of the cache; all its layers take turns.
        heads: query heads.
        sequences: of the batch.
        context: tokens of each.
        rows: query rows of each.
        codec: of the blocks.
    """

    geometry: KVGeometry
    heads: int
    sequences: int
    context: int
    rows: int = 1
    codec: Codec = FP16

    @property
    def name(self) -> str:
        """With all that tells it from others."""
        what = "decode" if self.rows == 1 else f"{self.rows} rows"
        size = f"{self.sequences} x {self.context} tokens, {self.geometry.kv_heads} heads x {self.geometry.head_dim}"
        return f"{what} {self.codec.name}, {size}"


class Sweep:
    """Batches of different sequences in a cache of their own, ready to be attended in turn, layer after layer.

    A context manager: the cache and the threads are given back at its end.

    Args:
        shape: of a batch.
        isa: of the kernel.
        threads: of it.
        contiguous: each sequence is one block, so that a head's K lies in one piece; else blocks are at random places.

    Attributes:
        shape: as given.
        cache: what is attended.
        out: float32 `[rows, heads, head_dim]`, of the last layer.
        layer_bytes: bytes of K and V of a batch in a layer, scales included.
    """

    def __init__(self, shape: Shape, isa: str, threads: int = 1, *, contiguous: bool = False) -> None:
        self.shape = shape
        geometry = replace(shape.geometry, block_tokens=shape.context) if contiguous else shape.geometry
        blocks = shape.sequences * geometry.blocks_for(shape.context)
        self._layers = geometry.layers
        self.layer_bytes = blocks * BlockLayout(geometry, shape.codec).layer_bytes
        batches = max(1, -(-SWEPT // (self.layer_bytes * self._layers)))
        extents = -(-batches * blocks // shape.codec.blocks_per_extent)
        nbytes = extents * shape.codec.blocks_per_extent * unit_bytes(geometry, shape.codec)
        self.cache = PagedKVCache.create(geometry, nbytes, shape.codec)
        self.cache.buffer[:] = FILLER
        rng = np.random.default_rng(SEED)
        places = np.arange(batches * blocks) if contiguous else rng.permutation(batches * blocks)
        starts = np.arange(shape.sequences + 1, dtype=np.int32) * shape.rows
        lengths = np.full(shape.sequences, shape.context, np.int32)
        codecs = np.full(shape.sequences, shape.codec.code, np.uint8)
        tables = places.astype(np.int32).reshape(batches, shape.sequences, -1)
        self._turns = itertools.cycle([AttentionBatch(starts, lengths, table, codecs=codecs) for table in tables])
        self._pieces = itertools.cycle([batch * self._layers * self.layer_bytes for batch in range(batches)])
        self._runtime = CpuAttention(self.cache, shape.heads, threads, isa=isa)
        q = (shape.sequences * shape.rows, shape.heads, geometry.head_dim)
        self._q = rng.standard_normal(q).astype(np.float32)
        self.out = np.empty_like(self._q)

    def __enter__(self) -> Sweep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runtime.close()
        self.cache.close()

    def attend(self) -> float:
        """Attend the next batch over all layers; returns the seconds of one."""
        self._runtime.begin_step(next(self._turns))
        seconds = timed(self._all_layers)() / self._layers
        self._runtime.end_step()
        return seconds

    def read(self, second: Executor | None = None) -> float:
        """Load as many bytes as all layers of a batch have, in one piece; returns the seconds of one layer's.

        Args:
            second: a thread that reads the second half meanwhile; None: all is read by this one.
        """
        piece = ffi.from_buffer("uint8_t[]", self.cache.buffer) + next(self._pieces)
        nbytes = self._layers * self.layer_bytes
        own = nbytes if second is None else nbytes // 2

        def load() -> None:
            helped = None if second is None else second.submit(lib.rp_limit_read, piece + own, nbytes - own)
            lib.rp_limit_read(piece, own)
            if helped is not None:
                helped.result()

        return timed(load)() / self._layers

    def _all_layers(self) -> None:
        for layer in range(self._layers):
            self._runtime.attend(layer, self._q, self.out)

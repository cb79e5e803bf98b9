"""The work of `rockpage bench attention`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hostcache import KVGeometry, PagedKVCache
from hostcache.block_layout import BlockLayout
from hostcache.codec import FP16, INT4, INT8, Codec
from hostcache.codec_pools import unit_bytes
from npu.attention import AttentionBatch
from npu.cpu import CpuAttention
from staging._limits import ffi, lib

from .bench_rows import Point, Row, Work, take_turns, timed
from .bench_torch import Torch

__all__ = ["Shape", "Sweep", "isas", "rows"]

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


REFERENCE, SMOLLM2 = (KVGeometry(24, 2, 128), 12), (KVGeometry(24, 3, 64), 9)
"""Geometry and query heads: the 1.1B model that figures are given for, and SmolLM2-135M."""

MODELS = (REFERENCE, SMOLLM2)

DECODE = tuple((sequences, context) for context in (512, 2048) for sequences in (1, 4, 8))

PREFILL_ROWS, PREFILL_CONTEXT = 64, 1024

SHORT, LONG = 128, 8192
GROWING = KVGeometry(6, 2, 128), 12
"""Fewer layers, so that 64 sequences fit everywhere."""

MOST_SEQUENCES = 64


def isas(wanted: str | None) -> list[str]:
    """Kernels to measure: the one that is wanted; else the best of this machine, and AVX2, which most have.

    Raises:
        UsageError: this machine does not run it.
    """
    tiny = PagedKVCache.create(KVGeometry(1, 1, 16), 1 << 12)
    names = [CpuAttention(tiny, 1, isa=wanted or "auto").isa]
    if wanted is None and names == ["avx512"]:
        names.append("avx2")
    return names


class Sweep:
    """Batches of different sequences in a cache of their own, ready to be attended in turn, layer after layer.

    Args:
        shape: of a batch.
        isa: of the kernel.
        threads: of it.
        contiguous: each sequence is one block, so that a head's K lies in one piece; else blocks are at random places.

    Attributes:
        cache: what is attended.
        out: float32 `[rows, heads, head_dim]`, of the last layer.
        layer_bytes: bytes of K and V of a batch in a layer, scales included.
    """

    def __init__(self, shape: Shape, isa: str, threads: int = 1, *, contiguous: bool = False) -> None:
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

    def attend(self) -> float:
        """Attend the next batch over all layers; returns the seconds of one."""
        self._runtime.begin_step(next(self._turns))
        seconds = timed(self._all_layers)() / self._layers
        self._runtime.end_step()
        return seconds

    def read(self) -> float:
        """Load as many bytes as all layers of a batch have, in one piece; returns the seconds of one layer's."""
        piece = ffi.from_buffer("uint8_t[]", self.cache.buffer) + next(self._pieces)
        return timed(lambda: lib.rp_limit_read(piece, self._layers * self.layer_bytes))() / self._layers

    def _all_layers(self) -> None:
        for layer in range(self._layers):
            self._runtime.attend(layer, self._q, self.out)


def rows(times: int, isas: Sequence[str], torch: Torch | None) -> list[Row]:
    """Measure every shape, each sweep so many times."""
    found: list[Row] = []
    for isa in isas:
        for model in MODELS:
            for sequences, context in DECODE:
                found += decode_rows(Shape(*model, sequences, context), isa, torch, times)
            found.append(prefill_row(Shape(*model, 1, PREFILL_CONTEXT, PREFILL_ROWS), isa, torch, times))
            found += [threads_row(Shape(*model, 4, context), isa, times) for context in (512, 2048)]
    return [*found, *growth_rows(isas[0], times)]


def decode_rows(shape: Shape, isa: str, torch: Torch | None, times: int) -> list[Row]:
    """Beside torch, the speed of reading, and the same kernel over memory in one piece; long ones in int8 as well."""
    paged, contiguous = Sweep(shape, isa), Sweep(shape, isa, contiguous=True)
    works: list[Work] = [paged.attend, contiguous.attend, paged.read]
    long = shape.context >= DECODE[-1][1]
    if long:
        lean = Sweep(replace(shape, codec=INT8), isa)
        works += [lean.attend, lean.read]
    if torch is not None:
        works.append(_torch_work(shape, torch))
    ours, in_one_piece, read, *more = take_turns(works, times, warm_up=1)
    peer = more.pop() if torch is not None else None

    name, kind = f"{shape.name}, {isa}", f"head_dim {shape.geometry.head_dim}, {isa}"
    found = [
        Row(name, "torch", ours, peer, 3.0, 4.0, "higher", goal=f"decode fp16, {kind}"),
        Row(name, "read limit", ours, read, 0.42, 0.55, "higher", goal=f"decode fp16 by the speed of reading, {kind}"),
        Row(name, "one piece", ours, in_one_piece, 1.10, 1.03, by="median", goal=f"paged, {kind}"),
    ]
    if long:
        int8, int8_read = more
        lean_name = f"{replace(shape, codec=INT8).name}, {isa}"
        found += [
            Row(lean_name, "fp16", int8, ours, 1.1, 1.4, "higher", goal=f"decode int8, {kind}"),
            Row(
                lean_name,
                "read limit",
                int8,
                int8_read,
                0.28,
                None,
                "higher",
                goal=f"decode int8 by the speed of reading, {kind}",
            ),
        ]
    return found


def prefill_row(shape: Shape, isa: str, torch: Torch | None, times: int) -> Row:
    """A tile of a prompt beside torch."""
    works: list[Work] = [Sweep(replace(shape, geometry=replace(shape.geometry, layers=4)), isa).attend]
    if torch is not None:
        works.append(_torch_work(replace(shape, geometry=replace(shape.geometry, layers=4)), torch))
    ours, *peer = take_turns(works, times, warm_up=1)
    goal = f"prefill, head_dim {shape.geometry.head_dim}, {isa}"
    return Row(f"{shape.name}, {isa}", "torch", ours, peer[0] if peer else None, 1.5, 2.5, "higher", goal=goal)


def threads_row(shape: Shape, isa: str, times: int) -> Row:
    """Two threads beside one."""
    two, one = take_turns([Sweep(shape, isa, threads).attend for threads in (2, 1)], times, warm_up=1)
    return Row(f"{shape.name}, {isa}, 2 threads", "1 thread", two, one, 1.5, 1.8, "higher", goal=f"2 threads, {isa}")


def growth_rows(isa: str, times: int) -> list[Row]:
    """Time of a layer as contexts and sequences grow, for each codec; beside the read limit of its bytes."""
    contexts = [(1, SHORT << power) for power in range((LONG // SHORT).bit_length())]
    batches = [(1 << power, 512) for power in range(MOST_SEQUENCES.bit_length())]
    found = []
    for axis, sizes in (("context", contexts), ("sequences", batches)):
        for codec in (FP16, INT8, INT4):
            for sequences, context in sizes:
                shape = Shape(*GROWING, sequences, context, codec=codec)
                sweep = Sweep(shape, isa)
                ours, read = take_turns([sweep.attend, sweep.read], times, warm_up=1)
                at = context if axis == "context" else sequences
                goal = f"growth with {axis}, {codec.name}"
                found.append(
                    Row(
                        f"{shape.name}, {isa}",
                        "read limit",
                        ours,
                        read,
                        better="higher",
                        goal=goal,
                        point=Point(axis, at, codec.name),
                    )
                )
    return found


def _torch_work(shape: Shape, torch: Torch) -> Work:
    sweep, layers = torch.attention(shape.geometry, shape.heads, shape.sequences, shape.context, shape.rows)
    return _per_layer(sweep, layers)


def _per_layer(sweep: Callable[[], object], layers: int) -> Work:
    once = timed(sweep)
    return lambda: once() / layers

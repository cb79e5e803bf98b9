"""The work of `rockpage bench attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from hostcache import KVGeometry, PagedKVCache
from hostcache.codec import FP16, INT4, INT8
from npu.cpu import CpuAttention

from .bench_attention_sweep import Shape, Sweep
from .bench_attention_threads import threads_rows
from .bench_onnx import PRECISIONS, GroupQueryAttention, OnnxRuntime
from .bench_rows import Point, Row, Timing, Work, take_turns, timed
from .bench_torch import Torch
from .terminal import tell

__all__ = ["Peers", "isas", "rows"]

REFERENCE, SMOLLM2 = (KVGeometry(24, 2, 128), 12), (KVGeometry(24, 3, 64), 9)
"""Geometry and query heads: the 1.1B model that figures are given for, and SmolLM2-135M."""

MODELS = (REFERENCE, SMOLLM2)

DECODE = tuple((sequences, context) for context in (512, 2048) for sequences in (1, 4, 8))

THREADED = ((4, 2048), (8, 2048))
"""What two threads share: so much that waking the second takes no part of it."""

PREFILL_ROWS, PREFILL_CONTEXT = 64, 1024

SHORT, LONG = 128, 8192
GROWING = KVGeometry(6, 2, 128), 12
"""Fewer layers, so that 64 sequences fit everywhere."""

MOST_SEQUENCES = 64


@dataclass(frozen=True)
class Peers:
    """Those that are installed.

    Attributes:
        torch: None: it is missing.
        onnx: None: it is missing.
    """

    torch: Torch | None
    onnx: OnnxRuntime | None


def isas(wanted: str | None) -> list[str]:
    """Kernels to measure: the one that is wanted; else the best of this machine, and AVX2, which most have.

    Raises:
        UsageError: this machine does not run it.
    """
    with (
        closing(PagedKVCache.create(KVGeometry(1, 1, 64), 1 << 12)) as tiny,
        closing(CpuAttention(tiny, 1, isa=wanted or "auto")) as runtime,
    ):
        names = [runtime.isa]
    if wanted is None and names == ["avx512"]:
        names.append("avx2")
    return names


def rows(times: int, isas: Sequence[str], peers: Peers) -> list[Row]:
    """Measure every shape, each sweep so many times; GroupQueryAttention beside the first isa alone, for it is slow."""
    found: list[Row] = []
    for isa in isas:
        for model in MODELS:
            for sequences, context in DECODE:
                shape = Shape(*model, sequences, context)
                tell(f"{shape.name}, {isa}")
                found += decode_rows(shape, isa, peers.torch, times)
                if isa == isas[0]:
                    found += onnx_rows(shape, isa, peers.onnx, times)
            tell(f"a prompt's rows and 2 threads, {isa}")
            found.append(prefill_row(Shape(*model, 1, PREFILL_CONTEXT, PREFILL_ROWS), isa, peers.torch, times))
            for sequences, context in THREADED:
                found += threads_rows(Shape(*model, sequences, context), isa, times)
    return [*found, *growth_rows(isas[0], times)]


def decode_rows(shape: Shape, isa: str, torch: Torch | None, times: int) -> list[Row]:
    """Beside torch, the speed of reading, and the same kernel over memory in one piece; long ones in int8 as well."""
    long = shape.context >= DECODE[-1][1]
    with ExitStack() as sweeps:
        paged = sweeps.enter_context(Sweep(shape, isa))
        contiguous = sweeps.enter_context(Sweep(shape, isa, contiguous=True))
        works: list[Work] = [paged.attend, contiguous.attend, paged.read]
        if long:
            lean = sweeps.enter_context(Sweep(replace(shape, codec=INT8), isa))
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


def onnx_rows(shape: Shape, isa: str, onnx: OnnxRuntime | None, times: int) -> list[Row]:
    """Beside GroupQueryAttention, in each precision that it has."""
    with Sweep(shape, isa) as sweep:
        works: list[Work] = [sweep.attend]
        if onnx is not None:
            works += [_onnx_work(shape, onnx, precision) for precision in PRECISIONS]
        ours, *theirs = take_turns(works, times, warm_up=1)
    peers: list[Timing | None] = [*theirs] or [None] * len(PRECISIONS)
    return [
        Row(f"{shape.name}, {isa}", f"ONNX Runtime {precision}", ours, peer, better="higher")
        for precision, peer in zip(PRECISIONS, peers, strict=True)
    ]


def prefill_row(shape: Shape, isa: str, torch: Torch | None, times: int) -> Row:
    """A tile of a prompt beside torch."""
    few = replace(shape, geometry=replace(shape.geometry, layers=4))
    with Sweep(few, isa) as sweep:
        works: list[Work] = [sweep.attend]
        if torch is not None:
            works.append(_torch_work(few, torch))
        ours, *peer = take_turns(works, times, warm_up=1)
    goal = f"prefill, head_dim {shape.geometry.head_dim}, {isa}"
    return Row(f"{shape.name}, {isa}", "torch", ours, peer[0] if peer else None, 1.5, 2.5, "higher", goal=goal)


def growth_rows(isa: str, times: int) -> list[Row]:
    """Time of a layer as contexts and sequences grow, for each codec; beside the read limit of its bytes."""
    contexts = [(1, SHORT << power) for power in range((LONG // SHORT).bit_length())]
    batches = [(1 << power, 512) for power in range(MOST_SEQUENCES.bit_length())]
    found = []
    tell("growth")
    for axis, sizes in (("context", contexts), ("sequences", batches)):
        for codec in (FP16, INT8, INT4):
            for sequences, context in sizes:
                shape = Shape(*GROWING, sequences, context, codec=codec)
                with Sweep(shape, isa) as sweep:
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


def _onnx_work(shape: Shape, onnx: OnnxRuntime, precision: str) -> Work:
    kind = PRECISIONS[precision]
    peer = GroupQueryAttention(onnx, shape.geometry, shape.heads, shape.sequences, shape.context, dtype=kind)
    return _per_layer(peer.attend, peer.layers)


def _per_layer(sweep: Callable[[], object], layers: int) -> Work:
    once = timed(sweep)
    return lambda: once() / layers

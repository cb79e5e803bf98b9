"""Compiles a geometry's attention graphs for the NPU and refuses what would not run there as one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hostcache.errors import DeviceError
from staging import DEFAULT_BUCKETS, Buckets

from .attention_graph import AttentionGraph
from .attention_manifest import AttentionFile, AttentionManifest, CompiledLaunch
from .launch import BATCHES
from .rknn_cache import CompileCache, Compiled, Compiler, require_on_npu
from .rknn_log import FUSED_ATTENTION
from .rknn_manifest import GraphFile, claim_folder, write_manifest
from .rknn_toolkit import CompileJob

__all__ = ["Sizes", "attention_job", "export_attention", "launch_sizes", "require_fused"]

Sizes: TypeAlias = "tuple[tuple[int, int], ...]"
"""Launches of a graph: `(batch, tokens)` each."""


def launch_sizes(
    graphs: Sequence[AttentionGraph], buckets: Sequence[int] = DEFAULT_BUCKETS, batches: Sequence[int] = BATCHES
) -> dict[AttentionGraph, Sizes]:
    """The launches that `npu.launch.LaunchPlanner` makes: a batch as long as it takes no more than one sequence could.

    Args:
        graphs: of one geometry.
        buckets: tokens.
        batches: sequences of a decode launch.

    Raises:
        UsageError: the buckets are not ascending multiples of 4, or a batch is not positive.
        DimensionTooLarge: a launch of one sequence is beyond what the NPU's registers hold.
    """
    buckets = Buckets(buckets).sizes
    room = max(graph.layout(1, buckets[-1]).nbytes for graph in graphs)
    return {
        graph: tuple(
            (batch, tokens)
            for batch in (batches if not graph.masked else (1,))
            for tokens in buckets
            if graph.layout(batch, tokens).nbytes <= room
        )
        for graph in graphs
    }


def attention_job(graph: AttentionGraph, sizes: Sizes) -> CompileJob:
    """How to compile a graph: each launch is a set of shapes of the same file.

    Raises:
        MissingExtra: the `onnx` package is not installed.
    """
    shapes = tuple(tuple(graph.input_shapes(batch, tokens).values()) for batch, tokens in sizes)
    return CompileJob(graph.kind, graph.onnx(), shapes)


def require_fused(job: CompileJob, compiled: Compiled) -> None:
    """Refuse a graph that is anything but one operator on the NPU for each set of shapes.

    Raises:
        DeviceError: there are other operators, some on the CPU, the compiler complained, or left out a set of shapes.
    """
    require_on_npu(job, compiled)
    for table in compiled.tables:
        operators = [layer.op for layer in table.layers]
        if operators != [FUSED_ATTENTION]:
            raise DeviceError(
                f"{job.name} with {table.shapes} became {', '.join(operators)} in place of one {FUSED_ATTENTION}: "
                "this version of the compiler does not fuse it",
                operators=operators,
                shapes=table.shapes,
            )


def export_attention(
    sizes: dict[AttentionGraph, Sizes],
    folder: Path,
    compiler: Compiler,
    cache: CompileCache,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> AttentionManifest:
    """Compile graphs into a folder and write its manifest.

    Args:
        sizes: graphs of one geometry with their launches, from `launch_sizes`.
        folder: made if missing; an older export of attention in it is replaced.
        compiler: the vendor's.
        cache: where compiled graphs are kept.
        report: told the name of each graph before it is compiled.

    Raises:
        MissingExtra: the `onnx` package is not installed.
        DeviceError: the compiler failed, or a graph is not one operator on the NPU.
        UsageError: the folder holds an export of another kind.
        OSError: the folder or the cache cannot be written.
    """
    claim_folder(folder, AttentionManifest.holds)
    files, sources = [], {}
    for graph, launches in sizes.items():
        report(graph.kind)
        job = attention_job(graph, launches)
        compiled = cache.compile(compiler, job)
        require_fused(job, compiled)
        files.append(_entry(graph, launches, compiled))
        sources[files[-1].rknn.file] = compiled.path
    manifest = AttentionManifest(compiler.version, graph.kv_heads, graph.group, graph.head_dim, tuple(files))
    write_manifest(folder, manifest, sources)
    return manifest


def _entry(graph: AttentionGraph, sizes: Sizes, compiled: Compiled) -> AttentionFile:
    tables = {table.shapes: table for table in compiled.tables}
    return AttentionFile(
        graph.kind,
        graph.tile,
        graph.rows,
        tuple(graph.input_shapes(*sizes[0])),
        GraphFile.of(graph.kind, compiled),
        tuple(
            CompiledLaunch(batch, tokens, tables[tuple(graph.input_shapes(batch, tokens).values())])
            for batch, tokens in sizes
        ),
    )

"""`rockpage export`: a model's graphs for the NPU, compiled by the vendor's compiler."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Subparsers, add_command
from .engine_options import add_model_option, model_path
from .units import format_mib

if TYPE_CHECKING:
    from npu.attention_manifest import AttentionManifest

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage export attention model.gguf --out model-npu

The compiler is rknn-toolkit2, in an environment of its own: make .venv-rknn, and
export ROCKPAGE_RKNN_PYTHON=$PWD/.venv-rknn/bin/python"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage export`."""
    parser = add_command(subparsers, "export", run, summary="compile a model's graphs for the NPU", example=EXAMPLE)
    parser.add_argument("kind", choices=("attention",), metavar="KIND", help="attention: of the model's geometry")
    add_model_option(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the .rknn files and manifest.json")
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="the Python that has rknn-toolkit2 (default: $ROCKPAGE_RKNN_PYTHON, or the one that runs this)",
    )
    attention = parser.add_argument_group("attention")
    attention.add_argument(
        "--buckets",
        type=parse_counts,
        metavar="N,N,..",
        help="tokens that contexts are padded to, ascending (default: powers of two, 64 to 4096)",
    )
    attention.add_argument(
        "--batches",
        type=parse_counts,
        metavar="N,N,..",
        help="decoding sequences that share a launch (default: powers of two, 1 to 16)",
    )


def parse_counts(text: str) -> tuple[int, ...]:
    """Read `64,128,256`.

    Raises:
        argparse.ArgumentTypeError: something in the list is not a positive number.
    """
    fields = text.split(",")
    if not all(field.isdecimal() and len(field) < 10 and int(field) for field in fields):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of positive numbers, such as 64,128,256")
    return tuple(int(field) for field in fields)


def run(args: argparse.Namespace) -> int:
    """Print what each graph became, or one JSON object with `folder, toolkit, target, graphs`; 0.

    Raises:
        RockpageError: the model cannot be read, the toolkit is missing, or the compiler failed.
        OSError: the folder or the cache cannot be written.
    """
    from npu.attention_export import export_attention, launch_sizes
    from npu.attention_graph import attention_graphs
    from npu.launch import BATCHES
    from npu.model import ModelConfig
    from npu.rknn_cache import CompileCache
    from npu.rknn_toolkit import RknnToolkit
    from npu.source import open_model
    from npu.weights_cache import default_cache_dir
    from staging import DEFAULT_BUCKETS

    with open_model(model_path(args)) as source:
        config = ModelConfig.from_gguf(source)
    graphs = attention_graphs(config.kv_heads, config.heads, config.head_dim)
    sizes = launch_sizes(graphs, args.buckets or DEFAULT_BUCKETS, args.batches or BATCHES)
    cache = CompileCache(default_cache_dir() / "rknn")
    with RknnToolkit(args.python) as toolkit:
        manifest = export_attention(sizes, Path(args.out), toolkit, cache, report=_announce)
    print(json.dumps(_as_dict(manifest, args.out)) if args.json else _as_text(manifest, args.out))
    return 0


def _announce(name: str) -> None:
    """Say what is being compiled to somebody who waits."""
    if sys.stderr.isatty():
        sys.stderr.write(f"compiling {name}\n")


def _as_dict(manifest: AttentionManifest, out: str) -> dict[str, object]:
    graphs = [
        {
            "kind": file.kind,
            "file": file.rknn.file,
            "bytes": file.rknn.nbytes,
            "internal_bytes": file.internal_bytes,
            "launches": [[launch.batch, launch.tokens] for launch in file.launches],
        }
        for file in manifest.files
    ]
    return {"folder": out, "toolkit": manifest.toolkit, "target": manifest.target, "graphs": graphs}


def _as_text(manifest: AttentionManifest, out: str) -> str:
    lines = ["graph      rows  launches  sequences       file     memory it takes on the NPU"]
    lines += [
        f"{file.kind:10} {file.rows:4}  {len(file.launches):8}  {max(launch.batch for launch in file.launches):9}"
        f"  {format_mib(file.rknn.nbytes):>9}  {format_mib(file.internal_bytes):>9}"
        for file in manifest.files
    ]
    return "\n".join([*lines, f"{out}: for {manifest.target}, by rknn-toolkit2 {manifest.toolkit}"])

"""`rockpage export`: a model's graphs for the NPU, compiled by the vendor's compiler."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from npu.sizes import format_size

from .command import Help, Parser, Subparsers, add_command
from .demo import QUESTIONS, SYSTEM
from .engine_options import add_model_option, model_path
from .inputs import read_text

if TYPE_CHECKING:
    from npu.attention_manifest import AttentionManifest
    from npu.dense_export import Calibration
    from npu.dense_manifest import DenseManifest
    from npu.gguf import GGUFFile
    from npu.huggingface import HuggingFaceFolder
    from npu.model import ModelConfig
    from npu.rknn_toolkit import RknnToolkit

    OpenModel: TypeAlias = GGUFFile | HuggingFaceFolder

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage export attention model.gguf --out attention-npu
rockpage export dense model.gguf --precision w8a8 --out dense-npu

The compiler is rknn-toolkit2, in an environment of its own:
make .venv-rknn && export ROCKPAGE_RKNN_PYTHON=$PWD/.venv-rknn/bin/python"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage export`."""
    parser = add_command(subparsers, "export", run, summary="compile a model's graphs for the NPU", example=EXAMPLE)
    kinds = parser.add_subparsers(title="graphs", metavar="KIND", dest="kind", required=True)
    attention = _add_kind(kinds, "attention", "attention over staged blocks: one fused operator of the NPU")
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
    dense = _add_kind(kinds, "dense", "all else but the embedding")
    dense.add_argument(
        "--precision",
        choices=("fp16", "w8a8"),
        help="w8a8 is int8 but for the residual stream, the MLP's output and the head (default: fp16)",
    )
    dense.add_argument(
        "--rows",
        type=parse_counts,
        metavar="N,N,..",
        help="of a launch, one of them its proof (default: 4,16,64; w8a8: 16)",
    )
    dense.add_argument("--calibration", metavar="FILE", help="text that w8a8 is fitted to (default: the demo's)")


def _add_kind(kinds: Subparsers, name: str, summary: str) -> Parser:
    """Register a kind of graphs, with the options that all kinds have."""
    parser = kinds.add_parser(
        name, help=summary, description=f"Compile {summary}.", formatter_class=Help, allow_abbrev=False
    )
    add_model_option(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the .rknn files and manifest.json")
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="the Python that has rknn-toolkit2 (default: $ROCKPAGE_RKNN_PYTHON, or the one that runs this)",
    )
    # Also understood in front of the kind.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead")
    return parser


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
    """Print what each graph became, or one JSON object; 0, or 1 if dense graphs are more than the NPU can address.

    Raises:
        RockpageError: the model cannot be read, the toolkit is missing, or the compiler failed.
        OSError: the folder or the cache cannot be written.
    """
    from npu.model import ModelConfig
    from npu.rknn_toolkit import RknnToolkit
    from npu.source import open_model

    with open_model(model_path(args)) as source:
        config = ModelConfig.from_gguf(source)
        export = _export_attention if args.kind == "attention" else _export_dense
        with RknnToolkit(args.python) as toolkit:
            return export(args, source, config, toolkit)


def _export_attention(args: argparse.Namespace, _: OpenModel, config: ModelConfig, toolkit: RknnToolkit) -> int:
    from npu.attention_export import export_attention, launch_sizes
    from npu.attention_graph import attention_graphs
    from npu.launch import BATCHES
    from npu.rknn_cache import CompileCache
    from staging import DEFAULT_BUCKETS

    graphs = attention_graphs(config.kv_heads, config.heads, config.head_dim)
    sizes = launch_sizes(graphs, args.buckets or DEFAULT_BUCKETS, args.batches or BATCHES)
    manifest = export_attention(sizes, Path(args.out), toolkit, CompileCache.default(), report=_announce)
    print(json.dumps(_attention_dict(manifest, args.out)) if args.json else _attention_text(manifest, args.out))
    return 0


def _export_dense(args: argparse.Namespace, source: OpenModel, config: ModelConfig, toolkit: RknnToolkit) -> int:
    from npu.dense_export import dense_rows, export_dense
    from npu.dense_manifest import DOMAIN_BYTES
    from npu.rknn_cache import CompileCache
    from npu.weights_cache import default_cache_dir, model_digest

    rows = dense_rows(args.rows, int8=args.precision == "w8a8")
    calibration = _calibration(args, source, config)
    manifest = export_dense(
        source,
        config,
        Path(args.out),
        toolkit,
        CompileCache.default(),
        model_sha256=model_digest(source, default_cache_dir()),
        rows=rows,
        calibration=calibration,
        report=_announce,
    )
    print(json.dumps(_dense_dict(manifest, args.out)) if args.json else _dense_text(manifest, args.out))
    return 0 if manifest.npu_bytes <= DOMAIN_BYTES else 1


def _calibration(args: argparse.Namespace, source: OpenModel, config: ModelConfig) -> Calibration | None:
    from hostcache.errors import UsageError
    from npu.dense_export import Calibration
    from npu.text import tokenizer_of

    if args.precision != "w8a8":
        if args.calibration is not None:
            raise UsageError("--calibration goes with --precision w8a8: fp16 needs none")
        return None
    text = read_text(None, args.calibration) if args.calibration else "\n".join((SYSTEM, *QUESTIONS))
    return Calibration(source, config, tokenizer_of(source).encode(text))


def _announce(name: str) -> None:
    """Say what is being compiled to somebody who waits."""
    if sys.stderr.isatty():
        sys.stderr.write(f"compiling {name}\n")


def _attention_dict(manifest: AttentionManifest, out: str) -> dict[str, object]:
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


def _attention_text(manifest: AttentionManifest, out: str) -> str:
    lines = ["graph      rows  launches  sequences       file     memory it takes on the NPU"]
    lines += [
        f"{file.kind:10} {file.rows:4}  {len(file.launches):8}  {max(launch.batch for launch in file.launches):9}"
        f"  {format_size(file.rknn.nbytes):>9}  {format_size(file.internal_bytes):>9}"
        for file in manifest.files
    ]
    return "\n".join([*lines, f"{out}: for {manifest.target}, by rknn-toolkit2 {manifest.toolkit}"])


def _dense_dict(manifest: DenseManifest, out: str) -> dict[str, object]:
    from npu.dense_manifest import DOMAIN_BYTES

    segments = [
        {"name": segment.name, "file": segment.rknn.file, "bytes": segment.rknn.nbytes, "npu_bytes": segment.npu_bytes}
        for segment in manifest.segments
    ]
    return {
        "folder": out,
        "toolkit": manifest.toolkit,
        "target": manifest.target,
        "precision": manifest.precision,
        "rows": manifest.rows,
        "npu_bytes": manifest.npu_bytes,
        "domain_bytes": DOMAIN_BYTES,
        "segments": segments,
    }


def _dense_text(manifest: DenseManifest, out: str) -> str:
    from npu.dense_manifest import DOMAIN_BYTES

    rows = ", ".join(map(str, manifest.rows))
    files = sum(segment.rknn.nbytes for segment in manifest.segments)
    fits = "of" if manifest.npu_bytes <= DOMAIN_BYTES else "MORE than"
    return (
        f"{len(manifest.segments)} segments in {manifest.precision}, for {rows} rows: {format_size(files)} of files\n"
        f"{format_size(manifest.npu_bytes)} of the NPU's memory, {fits} the {format_size(DOMAIN_BYTES)} it addresses\n"
        f"{out}: for {manifest.target}, by rknn-toolkit2 {manifest.toolkit}"
    )

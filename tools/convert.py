"""`rockpage convert`: a model with smaller weights, in one GGUF file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .command import Subparsers, add_command

if TYPE_CHECKING:
    from npu.convert import Conversion

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage convert Qwen2.5-0.5B-Instruct --weights int4 --out small.gguf
rockpage run small.gguf --chat --prompt "Why does a bearing run hot?\""""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage convert`."""
    parser = add_command(
        subparsers, "convert", run, summary="write a model with 8-bit or 4-bit weights", example=EXAMPLE
    )
    parser.add_argument("source", metavar="SRC", help="Hugging Face folder or GGUF file")
    parser.add_argument(
        "--weights",
        choices=("int4", "int8"),
        required=True,
        help="int4 is Q4_1, with embedding and head in Q8_0; int8 is Q8_0",
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="the GGUF file to write; it must not be there yet")


def run(args: argparse.Namespace) -> int:
    """Print what became of the tensors, or one JSON object with `source_bytes, bytes, parts`.

    Raises:
        RockpageError: the source cannot be used, or the output is there already.
        OSError: the output cannot be written.
    """
    from npu.carried_metadata import carried_metadata
    from npu.convert import convert_model
    from npu.model import ModelConfig
    from npu.source import open_model

    with open_model(args.source) as source:
        ModelConfig.from_gguf(source)  # what could not be run afterwards is refused now
        done = convert_model(source, carried_metadata(source), args.weights, Path(args.out))
    print(json.dumps(_as_dict(done)) if args.json else _as_text(done, args.out))
    return 0


def _as_dict(done: Conversion) -> dict[str, object]:
    parts = [
        {
            "type": part.type.name,
            "copied": part.copied,
            "tensors": part.tensors,
            "bytes": part.nbytes,
            "relative_error": part.loss.relative,
        }
        for part in done.parts
    ]
    return {"source_bytes": done.source_bytes, "bytes": done.nbytes, "parts": parts}


def _as_text(done: Conversion, out: str) -> str:
    lines = [
        f"{part.tensors:5} tensors {part.type.name:6} {format_size(part.nbytes):>12}  "
        + ("copied" if part.copied else f"relative error {part.loss.relative:.2%}" if part.loss.total else "exact")
        for part in done.parts
    ]
    return "\n".join([*lines, f"{out}: {format_size(done.nbytes)}, from {format_size(done.source_bytes)}"])

"""`rockpage selftest`: prove on a board what no other machine can, in a report to send back."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Subparsers, add_command
from .engine_options import add_model_option, add_threads_option, model_path

if TYPE_CHECKING:
    from npu.selftest_report import Report, Step

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage selftest --board --graphs model-npu model.gguf --out report.json
rockpage selftest

Takes some minutes, and changes no settings. The report names no host, user
or prompt. Exit status: 0 all is proved; 1 something failed, or could not be
tried that is needed; 2 there is no board's NPU, or bad input."""

WIDTH = 100

INDENT = " " * 9


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage selftest`."""
    parser = add_command(
        subparsers, "selftest", run, summary="prove that a board's NPU computes what it should", example=EXAMPLE
    )
    add_model_option(parser)
    parser.add_argument("--board", action="store_true", help="test this board's NPU (default: the emulated one)")
    parser.add_argument("--graphs", metavar="DIR", help="with --board: the model's, from rockpage export attention")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object there, too")
    add_threads_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print each step as it ends and a verdict, or one JSON object; 0 or 1, see `--help`.

    Raises:
        UsageError: --graphs without --board, or no folder for --out.
        DeviceError: --board where there is no NPU that the vendor's driver runs.
        ModelError: the model, or the folder of graphs, is damaged or missing.
        OSError: the report cannot be written.
    """
    from hostcache.whole_file import replace_file
    from npu.selftest import Subject, selftest
    from npu.source import open_model

    if args.model is not None:
        open_model(args.model).close()  # it is run when minutes have passed, as the report is written
    if args.out is not None:
        _require_folder(Path(args.out).parent)
    subject = Subject(
        model=lambda: model_path(args),
        board=args.board,
        graphs=None if args.graphs is None else Path(args.graphs),
        threads=args.threads,
    )
    report = selftest(subject, report=(lambda _: None) if args.json else _print_step)
    as_json = json.dumps(report.as_dict(), allow_nan=False)
    if args.out is not None:
        replace_file(Path(args.out), f"{as_json}\n".encode(), 0o666)
    print(as_json if args.json else _summary(report))
    return report.exit_status


def _require_folder(folder: Path) -> None:
    from hostcache.errors import UsageError

    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UsageError(f"{folder} is no folder that this user may write to: give another --out", folder=str(folder))


def _print_step(step: Step) -> None:
    lines = [f"{step.status:<8} {step.name}: {step.found}", *(INDENT + detail for detail in step.details)]
    for line in lines:
        print("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=INDENT)), flush=True)


def _summary(report: Report) -> str:
    named = {**report.chip, **report.versions}
    known = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
    where = "on the emulated NPU" if report.emulated else "on this board"
    return "\n".join(["", *textwrap.wrap(known, WIDTH), f"{report.verdict} {where}"])

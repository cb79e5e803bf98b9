"""`rockpage doctor`: what keeps rockpage from a board's NPU, what costs speed, and what to do about it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Subparsers, add_command
from .plan import add_plan_options, make_plan

if TYPE_CHECKING:
    from npu.board import Board
    from npu.doctor import Diagnosis
    from npu.doctor_check import Check, Status

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage doctor
rockpage doctor model.gguf --pool 256MiB --graphs attention-npu

exit status: 0 healthy; 1 degraded: it runs, with less than it could, such
as without an NPU; 2 unusable: the board's NPU cannot be used, or the model
does not fit"""

WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "unknown", "info", "ok")

WIDEST = 110
"""Columns of a text that a person likes to read."""

INDENT = " " * 9


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage doctor`."""
    parser = add_command(
        subparsers, "doctor", run, summary="say what keeps this machine from running well; only reads", example=EXAMPLE
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="what is to run: a GGUF file or a Hugging Face folder"
    )
    parser.add_argument("--graphs", metavar="DIR", help="its graphs, whose compiler's version should be the runtime's")
    add_plan_options(parser)
    parser.set_defaults(ram=None)  # the machine's own: that is what is looked at


def run(args: argparse.Namespace) -> int:
    """Print what was found, or one JSON object with `verdict, exit_status, board, checks`; 0, 1 or 2, see `--help`.

    Raises:
        UsageError: both MODEL and --geometry, or one of --geometry and --weights without the other.
        ModelError: the model, or the folder of graphs, is damaged or of a kind rockpage does not run.
    """
    from npu.attention_manifest import AttentionManifest
    from npu.doctor import diagnose
    from npu.rknn_manifest import read_manifest

    named = (args.model, args.geometry, args.weights)
    plan = make_plan(args) if any(value is not None for value in named) else None
    toolkit = read_manifest(AttentionManifest, Path(args.graphs)).toolkit if args.graphs is not None else None
    diagnosis = diagnose(plan, toolkit)
    print(json.dumps(_as_dict(diagnosis)) if args.json else _as_text(diagnosis))
    return diagnosis.exit_status


def _as_dict(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "verdict": diagnosis.verdict,
        "exit_status": diagnosis.exit_status,
        "board": _board_as_dict(diagnosis.board),
        "checks": [
            {"name": c.name, "status": c.status, "found": c.found, "why": c.why, "fix": c.fix} for c in diagnosis.checks
        ],
    }


def _board_as_dict(board: Board) -> dict[str, object]:
    npu = board.npu
    return {
        "model": board.model,
        "soc": board.soc.name if board.soc else None,
        "container": board.container,
        "npu": npu
        and {
            "name": npu.name,
            "driver": npu.driver,
            "version": npu.version,
            "cores": npu.cores,
            "nodes": [node.stable_path for node in npu.nodes],
        },
    }


def _as_text(diagnosis: Diagnosis) -> str:
    checks = sorted(diagnosis.checks, key=lambda check: WORST_FIRST.index(check.status))
    return "\n".join([*(line for check in checks for line in _lines(check)), "", diagnosis.verdict])


def _lines(check: Check) -> list[str]:
    """What was found; and for what is wrong, why that matters and what to do."""
    texts = [f"{check.status:<8} {check.name}: {check.found}"]
    if check.status in ("fail", "warn"):
        texts += [f"{INDENT}why: {check.why}"]
    if check.fix:
        texts += [f"{INDENT}fix: {check.fix}"]
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
    ]

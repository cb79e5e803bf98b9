"""`rockpage bench`: what our own work costs beside a limit or a peer, measured in one process and in turn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from . import (
    bench_attention,
    bench_books,
    bench_codec,
    bench_e2e,
    bench_gather,
    bench_growth,
    bench_latency,
    bench_prefix,
)
from .bench_kind import Kind
from .command import Help, Parser, Subparsers, add_command

if TYPE_CHECKING:
    from .bench_kind import Measured

__all__ = ["KINDS", "add_parser", "run"]

EXAMPLE = """\
rockpage bench gather
rockpage bench attention --chart growth.png
rockpage bench cache --peer ~/nano-vllm
rockpage bench schedule --peer ~/nano-vllm --block-tokens 256 --json
rockpage bench latency model.gguf
rockpage bench --all --report bench.md

The peer is a checkout of https://github.com/GeeeekExplorer/nano-vllm; it needs
the package xxhash. Exit 1 if a ratio misses its target."""

KINDS: tuple[Kind, ...] = (
    bench_gather.KIND,
    bench_attention.KIND,
    bench_codec.KIND,
    bench_books.CACHE,
    bench_books.SCHEDULE,
    bench_prefix.KIND,
    bench_e2e.KIND,
    bench_growth.KIND,
    bench_latency.KIND,
)


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage bench`."""
    summary = "measure what our own work costs, beside a limit or a peer"
    parser = add_command(subparsers, "bench", run, summary=summary, example=EXAMPLE)
    parser.add_argument("--all", action="store_true", help="measure all kinds, by their defaults")
    parser.add_argument("--report", metavar="FILE", help="with --all: write a Markdown file")
    # Kinds have options of the same names, which would hide these.
    parser.add_argument("--peer", dest="all_peer", type=Path, metavar="DIR", help="with --all: a checkout of nano-vllm")
    parser.add_argument(
        "--model", dest="all_model", metavar="MODEL", help="with --all: GGUF file or folder (default: demo's)"
    )
    kinds = parser.add_subparsers(title="what", metavar="KIND", dest="kind")
    for kind in KINDS:
        _add_kind(kinds, kind)


def _add_kind(kinds: Subparsers, kind: Kind) -> Parser:
    """Register what can be measured."""
    parser = kinds.add_parser(
        kind.name,
        help=kind.summary,
        description=f"Measure {kind.summary}.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    # Also understood in front of the kind.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    if kind.grows:
        parser.add_argument("--chart", metavar="FILE", help="draw a PNG of what grows; needs the extra chart")
    kind.add_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print a line for each case, or one JSON object with `rows`; 1: a ratio misses its target.

    Raises:
        UsageError: no kind is named, or an option makes no sense.
        MissingExtra: what a kind or a chart needs is not installed.
        OSError: a file cannot be written.
    """
    from hostcache.errors import UsageError

    if args.all != (args.kind is None):
        raise UsageError(f"name one of {', '.join(kind.name for kind in KINDS)}, or write --all")
    if args.all:
        return _run_all(args)
    for name in ("report", "all_peer", "all_model"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.removeprefix('all_')} belongs behind {args.kind}, or to --all")
    (kind,) = (kind for kind in KINDS if kind.name == args.kind)
    if kind.run is not None:
        return kind.run(args)
    chart = getattr(args, "chart", None)
    if chart is not None:
        from .replay_chart import require_charts

        require_charts(chart)
    measured = kind.measure(args)
    if chart is not None:
        from .bench_chart import draw

        draw(chart, measured.rows, f"rockpage bench {kind.name}")
    _show(measured, as_json=args.json)
    return int(any(row.misses_target for row in measured.rows))


def _show(measured: Measured, *, as_json: bool) -> None:
    from .bench_text import as_text

    if as_json:
        rows = [row.as_json() for row in measured.rows]
        print(json.dumps({"rows": rows, "note": "; ".join(measured.notes) or None}))
    else:
        print("\n".join([*(as_text(measured.rows) if measured.rows else ()), *measured.notes]))


def _run_all(args: argparse.Namespace) -> int:
    """Measure all kinds; what cannot be measured here is named, and does not keep the others from it."""
    from hostcache.errors import RockpageError

    from .bench_kind import Measured
    from .bench_report import machine, report

    results: dict[str, Measured] = {}
    kinds = argparse.ArgumentParser().add_subparsers(parser_class=Parser)
    for kind in KINDS:
        options = _add_kind(kinds, kind).parse_args([])
        for name in ("peer", "model"):
            if name in options:
                setattr(options, name, getattr(args, f"all_{name}"))
        try:
            results[kind.name] = kind.measure(options)
        except RockpageError as error:
            results[kind.name] = Measured([], [f"not measured: {error}"])
        if not args.json:
            print(f"{kind.name}:")
            _show(results[kind.name], as_json=False)
    if args.json:
        kinds_json = {name: [row.as_json() for row in measured.rows] for name, measured in results.items()}
        notes = {name: list(measured.notes) for name, measured in results.items() if measured.notes}
        print(json.dumps({"kinds": kinds_json, "notes": notes}))
    if args.report is not None:
        Path(args.report).write_text(report(results, machine()), encoding="utf-8")
    return int(any(row.misses_target for measured in results.values() for row in measured.rows))

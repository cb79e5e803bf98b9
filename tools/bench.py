"""`rockpage bench`: what our own work costs beside a peer's, measured in one process and in turn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import bench_latency
from .command import Help, Parser, Subparsers, add_command

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage bench cache --peer ~/nano-vllm
rockpage bench schedule --peer ~/nano-vllm --block-tokens 256 --json
rockpage bench latency model.gguf

The peer is a checkout of https://github.com/GeeeekExplorer/nano-vllm; it needs
the package xxhash. Exit 1 if a ratio is above its target."""

CACHE = "finding a prefix, publishing a block, appending a token"
SCHEDULE = "what happens between two runs of the model, for 1 to 128 sequences"
LATENCY = "what a budget for a step does to those who wait for tokens"


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage bench`."""
    summary = "measure what our own work costs, beside a peer's"
    parser = add_command(subparsers, "bench", run, summary=summary, example=EXAMPLE)
    kinds = parser.add_subparsers(title="what", metavar="KIND", dest="kind", required=True)
    cache, schedule = (_add_kind(kinds, *kind) for kind in (("cache", CACHE), ("schedule", SCHEDULE)))
    for kind in (cache, schedule):
        kind.add_argument("--peer", type=Path, metavar="DIR", help="a checkout of nano-vllm (default: none)")
        kind.add_argument("--block-tokens", type=int, default=16, metavar="N", help="of both (default: %(default)s)")
        kind.add_argument("--rounds", type=int, default=15, metavar="N", help="that begin anew (default: %(default)s)")
        kind.add_argument("--times", type=int, default=100, metavar="N", help="in a round (default: %(default)s)")
    schedule.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens of a sequence (default: %(default)s)"
    )
    latency = _add_kind(kinds, "latency", LATENCY)
    latency.set_defaults(run=bench_latency.run)
    bench_latency.add_options(latency)


def _add_kind(kinds: Subparsers, name: str, description: str) -> Parser:
    """Register what can be measured."""
    kind = kinds.add_parser(
        name, help=description, description=f"Measure {description}.", formatter_class=Help, allow_abbrev=False
    )
    # Also understood in front of the kind.
    kind.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    return kind


def run(args: argparse.Namespace) -> int:
    """Print a line for each case, or one JSON object with `rows`; 1: a ratio is above its target.

    Raises:
        UsageError: a number is not positive, or the peer is no checkout.
        MissingExtra: the peer lacks xxhash.
    """
    from hostcache.errors import UsageError

    from . import bench_cache, bench_schedule
    from .bench_peer import NO_PEER, PEER, NanoVllm
    from .bench_rows import as_text, compare

    for option in ("block_tokens", "rounds", "times", "context"):
        if vars(args).get(option, 1) < 1:
            raise UsageError(f"--{option.replace('_', '-')} must be 1 or more, got {getattr(args, option)}")
    peer = None if args.peer is None else NanoVllm.load(args.peer)
    if args.kind == "cache":
        cases = bench_cache.cases(peer, args.block_tokens)
    else:
        cases = bench_schedule.cases(peer, args.block_tokens, args.context)
    rows = [compare(case, args.rounds, args.times) for case in cases]
    if args.json:
        print(json.dumps({"rows": [row.as_json(PEER) for row in rows], "note": NO_PEER if peer is None else None}))
    else:
        print("\n".join([*as_text(rows, PEER), *([NO_PEER] if peer is None else [])]))
    return int(any(row.misses_target for row in rows))

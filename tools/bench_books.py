"""`rockpage bench cache` and `schedule`: what the books cost, beside nano-vllm's."""

from __future__ import annotations

import argparse
from pathlib import Path

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser

__all__ = ["CACHE", "SCHEDULE"]


def _add_options(kind: Parser) -> None:
    kind.add_argument("--peer", type=Path, metavar="DIR", help="a checkout of nano-vllm (default: none)")
    kind.add_argument("--block-tokens", type=int, default=16, metavar="N", help="of both (default: %(default)s)")
    kind.add_argument("--rounds", type=int, default=15, metavar="N", help="that begin anew (default: %(default)s)")
    kind.add_argument("--times", type=int, default=100, metavar="N", help="in a round (default: %(default)s)")


def _add_schedule_options(kind: Parser) -> None:
    _add_options(kind)
    kind.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens of a sequence (default: %(default)s)"
    )


def _measure(args: argparse.Namespace) -> Measured:
    """Measure either.

    Raises:
        UsageError: a number is not positive, or the peer is no checkout.
        MissingExtra: the peer lacks xxhash.
    """
    from . import bench_cache, bench_schedule
    from .bench_peer import NO_PEER, NO_VLLM, PEER, NanoVllm
    from .bench_rows import compare

    require_at_least(args, 1, "block_tokens", "rounds", "times", "context")
    peer = None if args.peer is None else NanoVllm.load(args.peer)
    if "context" in args:
        cases = bench_schedule.cases(peer, args.block_tokens, args.context)
    else:
        cases = bench_cache.cases(peer, args.block_tokens)
    rows = [compare(case, PEER, args.rounds, args.times) for case in cases]
    return Measured(rows, [NO_VLLM] if peer else [NO_PEER, NO_VLLM])


CACHE = Kind("cache", "finding a prefix, publishing a block, appending a token", _add_options, _measure)
SCHEDULE = Kind(
    "schedule",
    "what happens between two runs of the model, for 1 to 128 sequences",
    _add_schedule_options,
    _measure,
)

"""`rockpage bench growth`: how a step grows with the sequences that decode, and with what they hold.

All sequences share a prompt, which is computed once: so 64 of 8192 tokens need a pool of a few hundred MiB, and their
steps attend as much as if nothing were shared. The peer is our own step of half the size, twice: what grows in
proportion, or less, takes no longer.
"""

from __future__ import annotations

import argparse

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser
from .engine_options import add_model_option, model_path

__all__ = ["KIND"]


def _add_options(parser: Parser) -> None:
    add_model_option(parser)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--times", type=int, default=8, metavar="N", help="steps of a case (default: %(default)s)")


def _measure(args: argparse.Namespace) -> Measured:
    """Measure all sizes up to the model's context.

    Raises:
        UsageError: a number is not positive.
        RockpageError: the model cannot be loaded.
    """
    from pathlib import Path

    from .bench_growth_run import rows

    require_at_least(args, 1, "threads", "times")
    return Measured(rows(Path(model_path(args)), args.threads, args.times))


KIND = Kind("growth", "how a step grows with sequences and context", _add_options, _measure, grows=True)

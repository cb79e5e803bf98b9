"""`rockpage bench prefix`: sessions that begin with the same prompt, beside llama.cpp with its sharing on.

The prompt has 256 tokens, each of 8 sessions 16 of its own behind it, and all are answered with 32. What is timed
is all of it, from the first request to the last token. Ours are requests, of which nobody says that they share
anything. llama.cpp is told: its prompt is computed once, `llama_memory_seq_cp` gives it to all sequences, and their own
tokens and answers are computed in batches of all.
"""

from __future__ import annotations

import argparse

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser
from .engine_options import add_model_option, model_path

__all__ = ["KIND"]


def _add_options(parser: Parser) -> None:
    add_model_option(parser)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of both (default: %(default)s)")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="all of it (default: %(default)s)")


def _measure(args: argparse.Namespace) -> Measured:
    """Measure it.

    Raises:
        UsageError: a number is not positive.
        RockpageError: the model cannot be loaded.
    """
    from pathlib import Path

    from .bench_prefix_run import measure

    require_at_least(args, 1, "threads", "times")
    return measure(Path(model_path(args)), args.threads, args.times)


KIND = Kind("prefix", "sessions that begin alike, beside llama.cpp", _add_options, _measure)

"""`rockpage bench e2e`: a model's tokens per second and its memory, beside llama.cpp on the same file.

Both sides get the same tokens, compute logits where a token is sampled and nowhere else, and take the most likely one.
Ours is a step of `Engine`, scheduler, sampling and text included. Decoding sequences hold 128 tokens and more; what is
prefilled, nobody has seen before. What a process takes is measured in one of its own, behind 8 sequences that fill a
context of 4096 tokens together: what is resident, and what belongs to no file and so to it alone.
"""

from __future__ import annotations

import argparse

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser
from .engine_options import add_model_option, model_path

__all__ = ["KIND"]


def _add_options(parser: Parser) -> None:
    add_model_option(parser)
    parser.add_argument("--also", metavar="FILE", help="another file, such as one of Q4_0; its rows have no targets")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of both (default: %(default)s)")
    parser.add_argument("--times", type=int, default=30, metavar="N", help="steps of a case (default: %(default)s)")


def _measure(args: argparse.Namespace) -> Measured:
    """Measure all cases.

    Raises:
        UsageError: a number is not positive.
        RockpageError: a model cannot be loaded.
    """
    from pathlib import Path

    from .bench_e2e_run import measure

    require_at_least(args, 1, "threads", "times")
    return measure(Path(model_path(args)), args.also and Path(args.also), args.threads, args.times)


KIND = Kind("e2e", "a model's speed and memory, beside llama.cpp", _add_options, _measure)

"""`rockpage bench codec`: what int8 and int4 KV cost in quality and in time, beside fp16.

A model reads texts with its KV in fp16, int8 and int4, side by side. Mean KL is that of its predictions with fp16 from
those with the codec, over all positions; the worst token is the one whose own logarithm of probability moves furthest.
Activations are float32 unless told otherwise, so that nothing else moves; int8 ones move a prediction by as much as
int8 KV does. The time is that of a scatter of one layer's K and V.
"""

from __future__ import annotations

import argparse

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser
from .engine_options import add_model_option, add_threads_option

__all__ = ["KIND"]


def _add_options(parser: Parser) -> None:
    add_model_option(parser)
    add_threads_option(parser)
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="that is read (default: those of the tests, two chapters and two short texts)",
    )
    parser.add_argument(
        "--piece",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="of a text that are read at a time, each without the others (default: %(default)s)",
    )
    parser.add_argument(
        "--activations", choices=("fp32", "int8"), default="fp32", metavar="TYPE", help="fp32 or int8 (default: fp32)"
    )
    parser.add_argument("--times", type=int, default=300, metavar="N", help="of each scatter (default: %(default)s)")


def _measure(args: argparse.Namespace) -> Measured:
    """Measure quality on the texts, and the scatter.

    Raises:
        UsageError: a number is too small, or there are no texts.
        ModelError: the model cannot be loaded.
        MissingExtra: what runs it is not installed.
        OSError: a file cannot be read.
    """
    from .bench_codec_run import quality_figures, scatter_rows, texts_of
    from .engine_options import model_path

    require_at_least(args, 2, "piece")
    require_at_least(args, 1, "times")
    figures = quality_figures(
        model_path(args), texts_of(args.text), piece=args.piece, activations=args.activations, threads=args.threads
    )
    return Measured([*figures, *scatter_rows(args.times)])


KIND = Kind("codec", "what int8 and int4 KV cost in quality and time, beside fp16", _add_options, _measure)

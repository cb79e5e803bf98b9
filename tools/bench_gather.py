"""`rockpage bench gather`: staging beside what memory itself can do.

A launch's K and V are gathered out of the pool's blocks, by `StagingBuffer.fill`, or a token of each sequence is put to
what stayed staged, by `ResidentBuffer.fill`. The limit is C's memcpy of as many bytes in one piece, or of the same
rows, out of the same pool into the same buffer. What is read is in no cache: all layers of many launches take turns.
Besides, what fp32 to fp16 and back costs, where whole arrays are converted.
"""

from __future__ import annotations

import argparse

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser

__all__ = ["KIND"]


def _add_options(parser: Parser) -> None:
    parser.add_argument("--times", type=int, default=300, metavar="N", help="of each case (default: %(default)s)")


def _measure(args: argparse.Namespace) -> Measured:
    """Measure all shapes.

    Raises:
        UsageError: a number is not positive.
    """
    from .bench_gather_run import rows

    require_at_least(args, 1, "times")
    return Measured(rows(args.times))


KIND = Kind("gather", "staging a launch, beside memcpy of the same bytes", _add_options, _measure, grows=True)

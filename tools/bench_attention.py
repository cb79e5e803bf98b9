"""`rockpage bench attention`: the C kernel straight through the block table, beside torch and what memory allows.

All layers of a cache take turns, so that what is read is in no cache of the CPU. Torch's scaled_dot_product_attention
has float32 K and V in one piece and the query rows of a KV head side by side, its fastest form. ONNX Runtime's
GroupQueryAttention has K and V in one piece, in float32 and in float16, and appends the step's token. The read limit is
one thread that loads the same bytes, in one piece, and does nothing with them. Two threads are asked to gain only what
a second core can give: where plain reading within the cores' own caches gains less, there was no free core.
"""

from __future__ import annotations

import argparse

from .bench_kind import Kind, Measured, require_at_least
from .command import Parser

__all__ = ["KIND"]


def _add_options(parser: Parser) -> None:
    parser.add_argument("--times", type=int, default=9, metavar="N", help="of each sweep (default: %(default)s)")
    parser.add_argument(
        "--isa",
        choices=("plain", "avx2", "avx512", "neon"),
        metavar="NAME",
        help="plain, avx2, avx512 or neon (default: this machine's best, and avx2)",
    )


def _measure(args: argparse.Namespace) -> Measured:
    """Measure all shapes.

    Raises:
        UsageError: a number is not positive, or this machine does not run the isa.
    """
    from .bench_attention_run import Peers, isas, rows
    from .bench_onnx import NO_ONNX, OnnxRuntime
    from .bench_torch import NO_TORCH, Torch

    require_at_least(args, 1, "times")
    peers = Peers(Torch.load(), OnnxRuntime.load())
    notes = [note for note, peer in ((NO_TORCH, peers.torch), (NO_ONNX, peers.onnx)) if peer is None]
    return Measured(rows(args.times, isas(args.isa), peers), notes)


KIND = Kind(
    "attention",
    "attention over the block table, beside torch and the speed of reading",
    _add_options,
    _measure,
    grows=True,
)

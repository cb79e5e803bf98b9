"""`rockpage replay`: days of traffic through the real scheduler and pool, on a virtual clock, without a model."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from .command import Subparsers, add_command
from .plan import parse_count, parse_geometry
from .units import parse_size

if TYPE_CHECKING:
    from .replay_measure import Measurement
    from .replay_setup import Setup
    from .replay_source import TraceSource
    from .replay_workload import Workload

__all__ = ["add_parser", "run"]

NAMES = ("industrial", "mixed")
"""Of the workloads; `--help` must not import them."""

FILE_CONTEXT = 4096
"""Tokens of context for a trace from a file, if nothing else is asked for."""

DEFAULT_DAYS, DEFAULT_LOAD, DEFAULT_SEED = 1.0, 0.7, 1

MOST_LOAD = 1000.0
MOST_DAYS = 3660.0

EXAMPLE = """\
rockpage replay --trace industrial --days 0.1 --load 0.7,1.5,0.7
rockpage replay trace.jsonl --context 2560 --compare"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage replay`."""
    parser = add_command(
        subparsers,
        "replay",
        run,
        summary="replay days of traffic in minutes, without a model",
        usage="[OPTIONS] [FILE]",
        example=EXAMPLE,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a trace, one request a line; - is stdin")
    parser.add_argument("--trace", choices=NAMES, metavar="NAME", help="in place of FILE: industrial or mixed")
    parser.add_argument("--days", type=_days, metavar="N", help="how long, with --trace (default: 1)")
    parser.add_argument(
        "--load",
        type=_loads,
        metavar="X[,X...]",
        help="with --trace: requests over what the machine can do; several: one after the other (default: 0.7)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the random numbers of --trace (default: 1)")
    parser.add_argument("--save", metavar="FILE", help="write the requests of --trace to a file, too")
    parser.add_argument(
        "--pool", type=parse_size, default="512MiB", metavar="SIZE", help="the KV pool (default: %(default)s)"
    )
    parser.add_argument(
        "--kv",
        choices=("fp16", "int8", "int4"),
        default="fp16",
        metavar="CODEC",
        help="how sessions store it: fp16, int8 or int4 (default: %(default)s)",
    )
    parser.add_argument(
        "--swap",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="memory for the KV of preempted sequences (default: none)",
    )
    parser.add_argument(
        "--geometry",
        type=parse_geometry,
        metavar="FIELDS",
        help="of the KV (default: layers=28,kv_heads=8,head_dim=128)",
    )
    parser.add_argument(
        "--cost",
        type=_cost,
        metavar="FIELDS",
        help="seconds for a step, a row in it, a token of KV read (default: step=0.0819,row=0.00742,token=5.2e-6)",
    )
    parser.add_argument(
        "--context",
        type=parse_count,
        metavar="TOKENS",
        help=f"most that a session may hold (default: {FILE_CONTEXT}, or what --trace needs)",
    )
    parser.add_argument(
        "--max-sequences", type=parse_count, default=16, metavar="N", help="sequences at once (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-chunk",
        type=parse_count,
        default=64,
        metavar="N",
        help="prompt tokens of a sequence in a step (default: %(default)s)",
    )
    parser.add_argument(
        "--step-ms",
        type=parse_count,
        default=500,
        metavar="N",
        help="milliseconds between two tokens of a sequence, if prompts can wait for it (default: %(default)s)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="also with contiguous caches, and with prompts computed in one step"
    )
    parser.add_argument("--chart", metavar="FILE", help="draw a PNG; needs the extra chart")


def run(args: argparse.Namespace) -> int:
    """Replay the trace and print what was found.

    Raises:
        UsageError: the trace or an option cannot be used.
        OSError: a file cannot be written.
        MissingExtra: a chart is asked for, and matplotlib is missing.
    """
    from .replay_chart import draw_chart, require_charts
    from .replay_report import as_json, as_text
    from .replay_setup import contiguous, unchunked
    from .replay_trace import write_trace

    if args.chart is not None:
        require_charts(args.chart)
    workload = _workload(args)
    setup = _setup(args, workload)
    source = _source(args, workload, setup)
    if args.save is not None:
        with open(args.save, "w", encoding="utf-8") as stream:
            write_trace(stream, source.requests())
    setups = {"paged": setup}
    if args.compare:
        setups |= {"contiguous": contiguous(setup), "unchunked": unchunked(setup)}
    runs = {name: _replay(source, each) for name, each in setups.items()}
    if args.json:
        compared = {name: as_json(measured) for name, measured in runs.items() if name != "paged"}
        pool = {"kv": setup.codec.name, "pool_blocks": setup.blocks}
        print(json.dumps({**pool, **as_json(runs["paged"]), "compared": compared}))
    else:
        print(as_text(runs))
    if args.chart is not None:  # last: where the disk is full, the figures were worth the replay
        draw_chart(args.chart, runs, source.title)
    return 0


def _workload(args: argparse.Namespace) -> Workload | None:
    """The workload that is named; None: there is a file.

    Raises:
        UsageError: both, neither, or an option that the file has no use for.
    """
    from hostcache.errors import UsageError

    from .replay_workload import WORKLOADS

    if (args.file is None) == (args.trace is None):
        raise UsageError("replay takes either a FILE or --trace NAME")
    if args.trace is not None:
        return WORKLOADS[args.trace]
    for name in ("days", "load", "seed", "save"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} goes with --trace: a file says itself what arrives when")
    if args.file == "-" and args.compare:
        raise UsageError("stdin can be read once, --compare reads the trace three times: give it as a file")
    return None


def _setup(args: argparse.Namespace, workload: Workload | None) -> Setup:
    """What the options say the traffic is to meet."""
    from hostcache import KVGeometry, SchedulerConfig
    from hostcache.codec import codec_named
    from hostcache.errors import UsageError
    from npu.memory_plan import blocks_in, extent_bytes

    from .replay_cost import PUBLISHED, PUBLISHED_GEOMETRY, MachineCost
    from .replay_setup import Setup

    fields = dict(args.geometry or PUBLISHED_GEOMETRY)
    fields.pop("heads", None)
    geometry = KVGeometry(**fields)
    codec = codec_named(args.kv)
    blocks = blocks_in(geometry, codec, args.pool)
    if blocks < 1:
        extent = extent_bytes(geometry, codec)
        raise UsageError(f"a pool of {args.pool} bytes does not hold one block of {extent} bytes")
    config = SchedulerConfig(
        context_length=args.context or (FILE_CONTEXT if workload is None else workload.context_length),
        max_rows=max(SchedulerConfig.max_rows, args.max_sequences),
        max_sequences=args.max_sequences,
        prefill_chunk=args.prefill_chunk,
        step_seconds=args.step_ms / 1000,
    )
    cost = PUBLISHED if args.cost is None else MachineCost(**args.cost)
    return Setup(geometry, blocks, config, cost, swap_bytes=args.swap, codec=codec)


def _source(args: argparse.Namespace, workload: Workload | None, setup: Setup) -> TraceSource:
    from .replay_source import DAY, FileTrace, MadeTrace
    from .replay_workload import capacity

    if workload is None:
        return FileTrace(args.file)
    most = capacity(workload, setup.cost, setup.config, setup.blocks, setup.geometry.block_tokens)
    rates = [most * load for load in args.load or [DEFAULT_LOAD]]
    days = DEFAULT_DAYS if args.days is None else args.days
    return MadeTrace(workload, rates, days * DAY, DEFAULT_SEED if args.seed is None else args.seed)


def _replay(source: TraceSource, setup: Setup) -> Measurement:
    from .replay_measure import Measurement
    from .replay_run import Replay

    measurement = Measurement(setup.blocks, setup.geometry.block_tokens, source.bounds)
    Replay(setup, measurement).run(source.requests())
    return measurement


def _days(text: str) -> float:
    return _number(text, MOST_DAYS)


def _loads(text: str) -> list[float]:
    return [_number(part, MOST_LOAD) for part in text.split(",")]


def _number(text: str, most: float) -> float:
    """Read a positive number.

    Raises:
        argparse.ArgumentTypeError: anything else, or more than `most`.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and up to {most:g}")
    return value


def _cost(text: str) -> dict[str, float]:
    """Read `step=0.08,row=0.007,token=5e-6`.

    Raises:
        argparse.ArgumentTypeError: a field is missing, repeated, unknown, or not a number of seconds.
    """
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    if sorted(name for name, _ in pairs) != ["row", "step", "token"]:
        raise argparse.ArgumentTypeError(f"'{text}' must give step, row and token, in seconds, each once")
    try:
        return {name: float(value) for name, value in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' must give seconds, such as step=0.08,row=0.007,token=5e-6"
        ) from error

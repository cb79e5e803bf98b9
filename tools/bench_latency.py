"""`rockpage bench latency`: what a budget for a step does to those who wait for tokens.

Sessions decode, and long documents arrive among them. Without chunks, a document is computed in one step, and the
sessions stand still for as long; with chunks and no budget, for as long as the chunk takes; with a budget, for as long
as that says, or as the smallest tile takes.

All settings run in turn in one process. What a step with the smallest tile costs is measured in each run, behind each
document, so that the limit that the gaps are held to is that of the machine as it is at the time. On a busy machine
that is not enough, as others take the core for moments: the column "core" shows the share of the time in which it was
ours. With `--clock cpu` and one thread, all times are those in which it was.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from .bench_kind import Kind, Measured, require_at_least
from .engine_options import add_model_option, model_path

if TYPE_CHECKING:
    from .latency_report import Row

__all__ = ["KIND", "add_options", "measure", "run"]

CHUNK = 256
"""Most prompt tokens in a step under a budget: `rockpage run`'s `max_rows`."""

TIMES_TILE = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Budgets if none are given: so many times what a step with the smallest tile took in the run without chunks."""


def run(args: argparse.Namespace) -> int:
    """Print a line for each setting, or one JSON object: `rows`, what is asked of each budget, and `settings`.

    Returns:
        1: a budget is not kept, or what it costs the document is too much.

    Raises:
        RockpageError: the model, the traffic or the machine cannot be used.
        OSError: a file cannot be read or written.
    """
    from hostcache.errors import UsageError

    from .replay_chart import require_charts

    if args.clock == "cpu" and args.threads != 1:
        raise UsageError(f"--clock cpu adds up all threads' time: it takes --threads 1, not {args.threads}")
    require_at_least(args, 1, "rounds")
    if args.plot is not None:
        require_charts(args.plot)
    rows = _measure(args)
    if args.json:
        limits = [limit.as_json() for row in rows for limit in row.limits]
        print(json.dumps({"rows": limits, "settings": [row.as_json() for row in rows], "note": None}))
    else:
        from .latency_report import as_text

        print(as_text(rows))
    if args.plot is not None:
        from .latency_report import draw

        draw(args.plot, rows)
    return 0 if all(row.holds for row in rows) else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the traffic, and what is measured of it."""
    add_model_option(parser)
    parser.add_argument("--runtime", default="cpu", metavar="NAME", help="cpu or emulated (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="that decode (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="that arrive (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="of a document (default: %(default)s)")
    parser.add_argument(
        "--budgets",
        type=_milliseconds,
        metavar="MS[,MS...]",
        help="default: 1, 1.5, 2, 3 and 4 times a step with the smallest tile",
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of all settings (default: %(default)s)")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="what times are measured by (default: %(default)s)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw a PNG; needs the extra chart")


def measure(args: argparse.Namespace) -> Measured:
    """What is asked of each budget, for the report of all kinds.

    Raises:
        RockpageError: as `run`.
    """
    return Measured([limit for row in _measure(args) for limit in row.limits])


def _measure(args: argparse.Namespace) -> list[Row]:
    """Run the settings in turn, as often as there are rounds."""
    from .latency_report import Row
    from .latency_run import Machine, Setting, Traffic, Waits, measure
    from .terminal import tell

    model = model_path(args)
    traffic = Traffic(args.sessions, args.documents, args.tokens)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    machine = Machine(args.runtime, args.threads, clock)
    unchunked = Row(Setting("unchunked"), Waits())
    tell(unchunked.setting.name)
    measure(model, unchunked.setting, traffic, machine, unchunked.waits)
    budgets = args.budgets or [unchunked.tile_seconds * times for times in TIMES_TILE]
    settings = [Setting("chunks of 64", 64)]
    settings += [Setting(f"{budget * 1000:.0f} ms", CHUNK, budget) for budget in budgets]
    rows = [unchunked, *(Row(setting, Waits(), unchunked.waits) for setting in settings)]
    for number in range(args.rounds):
        for row in rows[1:] if number == 0 else rows:
            tell(f"{row.setting.name}, round {number + 1} of {args.rounds}")
            measure(model, row.setting, traffic, machine, row.waits)
    return rows


def _milliseconds(text: str) -> list[float]:
    """Read `50,100` as seconds.

    Raises:
        argparse.ArgumentTypeError: a part is not a number above 0.
    """
    try:
        budgets = [float(part) / 1000 for part in text.split(",")]
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget < float("inf") for budget in budgets):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of milliseconds above 0, such as 50,100")
    return budgets


KIND = Kind("latency", "what a budget for a step does to those who wait for tokens", add_options, measure, run=run)

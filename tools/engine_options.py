"""Options of every subcommand that runs a model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .command import Parser
from .units import parse_size

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from npu.engine import Engine
    from npu.loading import LoadOptions

__all__ = [
    "add_engine_options",
    "add_model_option",
    "add_threads_option",
    "model_path",
    "open_engine",
    "require_model",
]

MOST_THREADS = 4
"""Threads by default: RK3588 has four fast cores; the slow ones only hold them up."""


def add_model_option(parser: argparse._ActionsContainer) -> None:
    """Add MODEL, a GGUF file or a Hugging Face folder; without it the demo's model is used.

    `--model FILE`, which other programs have, is understood too.
    """
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,  # when it is not there, it leaves alone what --model has set
        metavar="MODEL",
        help="GGUF file or Hugging Face folder (default: demo's)",
    )
    parser.add_argument("--model", help=argparse.SUPPRESS)


def add_engine_options(parser: Parser) -> argparse._ArgumentGroup:
    """Add MODEL and how to run it.

    Returns:
        The group of the usual options, for those of one subcommand; what few need is in a rare group.
    """
    group = parser.add_argument_group("how it runs")
    add_model_option(group)
    group.add_argument(
        "--runtime",
        choices=("auto", "cpu", "emulated", "simulator", "rknnlite", "rknnrt"),
        default="auto",
        metavar="NAME",
        help="auto, or cpu, emulated, simulator, rknnlite, rknnrt",
    )
    group.add_argument("--graphs", metavar="DIR", help="from rockpage export attention, for a board's NPU")
    group.add_argument(
        "--pool", type=parse_size, metavar="SIZE", help="memory for KV (default: 192MiB, or less if short)"
    )
    group.add_argument(
        "--kv",
        choices=("fp16", "int8", "int4"),
        metavar="CODEC",
        help="how KV is stored: fp16, int8 or int4 (default: fp16, or int8 if --context does not fit into the pool)",
    )
    add_threads_option(group)
    group.add_argument(
        "--context", type=int, metavar="TOKENS", help="of a sequence, at most (default: the model's limit)"
    )
    _add_rare_options(parser.add_rare_group("how it runs, in detail"))
    return group


def _add_rare_options(group: argparse._ArgumentGroup) -> None:
    """What a board's owner, or whoever measures, sets."""
    group.add_argument("--dense", metavar="DIR", help="from rockpage export dense, for a board's NPU")
    group.add_argument(
        "--placement",
        choices=("device", "cost"),
        metavar="HOW",
        help="to the NPU goes what fits (device) or gains (cost)",
    )
    group.add_argument(
        "--resident",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="memory to keep sequences staged in (default: none)",
    )
    group.add_argument(
        "--emulate-rounding",
        choices=("op", "output"),
        default="output",
        metavar="WHAT",
        help="emulated NPU rounds: op or output (default: %(default)s)",
    )
    group.add_argument(
        "--activations",
        choices=("int8", "fp32"),
        default="int8",
        metavar="TYPE",
        help="int8 is fast, fp32 exact (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        default=64,
        metavar="TOKENS",
        help="of a prompt, computed in a step (default: %(default)s)",
    )
    group.add_argument("--step-ms", type=float, metavar="MS", help="longest pause of answers while prompts begin")


def add_threads_option(parser: argparse._ActionsContainer) -> None:
    """Add how many threads compute on the CPU."""
    parser.add_argument(
        "--threads",
        type=int,
        default=default_threads(),
        metavar="N",
        help=f"default: the cores there are, {MOST_THREADS} at most; here %(default)s",
    )


def default_threads() -> int:
    """The cores this process may use, four at most."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def model_path(args: argparse.Namespace) -> Path:
    """The model that the arguments name, or the demo's, fetched if need be.

    Raises:
        ModelError: the demo's model could not be fetched.
    """
    if args.model is not None:
        return Path(args.model)
    from .demo_model import demo_model_path

    return demo_model_path()


def require_model(args: argparse.Namespace, text_option: str) -> None:
    """Refuse a MODEL that is not there before anything waits for stdin: it may be meant as the text.

    Args:
        args: what was parsed.
        text_option: where the text belongs.

    Raises:
        UsageError: there is no such file or folder.
    """
    from hostcache.errors import UsageError

    if args.model is None:
        return
    try:
        os.stat(args.model)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot open model file {args.model}: {reason}; if it is the text, write {text_option} before it",
            path=args.model,
            reason=reason,
        ) from error


def open_engine(args: argparse.Namespace, **more: Unpack[LoadOptions]) -> Engine:
    """Load the model and take the pool as the arguments say; the caller closes it.

    A pool that is smaller than usual for want of memory is explained on stderr, and so is KV that is not fp16 if nobody
    asked for that.

    Args:
        args: what `add_engine_options` had parsed.
        more: what the subcommand's own options say.

    Raises:
        RockpageError: see `npu.engine.Engine.load`.
        OSError: the file cannot be read.
    """
    from npu.interrupts import held_signals

    with held_signals():  # C code that is being initialised takes no exception from a signal's handler
        from npu.engine import Engine

    options: LoadOptions = {
        "runtime": args.runtime,
        "rounding": args.emulate_rounding,
        "graphs": args.graphs,
        "dense": args.dense,
        "placement": args.placement,
        "resident_bytes": args.resident,
        "activations": args.activations,
        "kv": args.kv,
        "pool_bytes": args.pool,
        "threads": args.threads,
        "context_length": args.context,
        "prefill_chunk": args.prefill_chunk,
        "step_seconds": None if args.step_ms is None else args.step_ms / 1000,
    }
    options.update(more)
    engine = Engine.load(model_path(args), **options)
    pool, kv = engine.pool_choice, engine.kv_choice
    if pool is not None and pool.reduced and sys.stderr is not None:
        sys.stderr.write(f"rockpage: a pool of {format_size(pool.nbytes)}, {pool.reason}\n")
    if kv is not None and kv.reduced and sys.stderr is not None:
        sys.stderr.write(f"rockpage: KV in {kv.codec.name}, {kv.reason}; --kv names another\n")
    return engine

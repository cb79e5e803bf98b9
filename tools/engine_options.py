"""Options of every subcommand that runs a model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .inputs import read_text
from .units import parse_size

if TYPE_CHECKING:
    from npu.engine import Engine
    from npu.sampler import SamplingParams
    from npu.structured import Structure

__all__ = [
    "add_engine_options",
    "add_model_option",
    "add_sampling_options",
    "add_threads_option",
    "model_path",
    "open_engine",
    "require_model",
    "sampling",
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


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and how to run it."""
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
        "--pool", type=parse_size, metavar="SIZE", help="memory for KV (default: 192MiB, or less if short)"
    )
    add_threads_option(group)
    group.add_argument(
        "--context", type=int, metavar="TOKENS", help="of a sequence, at most (default: the model's limit)"
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


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are chosen and when an answer ends."""
    group = parser.add_argument_group("the answer")
    numbers: tuple[tuple[str, type, float, str, str], ...] = (
        ("--max-tokens", int, 256, "N", "end it after N tokens"),
        ("--temperature", float, 0.0, "T", "0: the likeliest token; more: freer"),
        ("--top-k", int, 0, "K", "choose among the K likeliest; 0: all"),
        ("--top-p", float, 1.0, "P", "among the likeliest that reach P"),
        ("--min-p", float, 0.0, "P", "among those P times the likeliest"),
        ("--typical-p", float, 1.0, "P", "among the least surprising, P of all"),
        ("--repetition-penalty", float, 1.0, "R", "above 1: avoid what was there before"),
        ("--frequency-penalty", float, 0.0, "R", "avoid tokens by how often, -2 to 2"),
        ("--presence-penalty", float, 0.0, "R", "avoid tokens that occurred, -2 to 2"),
    )
    for name, kind, default, metavar, text in numbers:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)g)")
    group.add_argument(
        "--logit-bias",
        type=_parse_bias,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="add -100 to 100 to a token's logit; may be repeated",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the random choices (default: a fresh one)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end it before TEXT; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on behind a token that ends answers")
    group.add_argument("--json-schema", metavar="FILE", help="only JSON that this schema accepts; - is stdin")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and N runners-up")


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


def open_engine(args: argparse.Namespace) -> Engine:
    """Load the model and take the pool as the arguments say; the caller closes it.

    A pool that is smaller than usual for want of memory is explained on stderr.

    Raises:
        RockpageError: see `npu.engine.Engine.load`.
        OSError: the file cannot be read.
    """
    from npu.interrupts import held_signals

    with held_signals():  # C code that is being initialised takes no exception from a signal's handler
        from npu.engine import Engine

    engine = Engine.load(
        model_path(args),
        runtime=args.runtime,
        rounding=args.emulate_rounding,
        graphs=args.graphs,
        dense=args.dense,
        placement=args.placement,
        resident_bytes=args.resident,
        activations=args.activations,
        pool_bytes=args.pool,
        threads=args.threads,
        context_length=args.context,
        prefill_chunk=args.prefill_chunk,
        step_seconds=None if args.step_ms is None else args.step_ms / 1000,
    )
    choice = engine.pool_choice
    if choice is not None and choice.reduced and sys.stderr is not None:
        sys.stderr.write(f"rockpage: a pool of {format_size(choice.nbytes)}, {choice.reason}\n")
    return engine


def sampling(args: argparse.Namespace) -> SamplingParams:
    """What `add_sampling_options` asked for.

    Raises:
        UsageError: a value is out of range, the schema cannot be read, or nobody would see the log-probabilities.
    """
    from hostcache.errors import UsageError
    from npu.sampler import SamplingParams

    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json: a streamed text has no room for numbers", logprobs=args.logprobs)
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        typical_p=args.typical_p,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logit_bias=dict(args.logit_bias),
        structure=_structure(args.json_schema),
        logprobs=args.logprobs,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _structure(schema_file: str | None) -> Structure | None:
    if schema_file is None:
        return None
    from npu.structured import Structure

    return Structure.json_schema(read_text(None, schema_file))


def _parse_bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit."""
    token, separator, amount = text.partition("=")
    try:
        if separator:
            return int(token), float(amount)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number: write ID=VALUE, such as 198=-100")

"""Options of every subcommand that runs a model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

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
    "sampling",
]

MOST_THREADS = 4
"""Threads by default: RK3588 has four fast cores; the slow ones only hold them up."""


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, a GGUF file or a Hugging Face folder; without it the demo's model is used."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a GGUF file or a Hugging Face folder (default: the demo's model)"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and how to run it."""
    add_model_option(parser)
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "--runtime",
        choices=("auto", "cpu", "emulated", "simulator", "rknnlite"),
        default="auto",
        help="attention straight through the block table (cpu), or staged: on the emulated NPU, the vendor's"
        " simulator, or a board's NPU (rknnlite). auto is rknnlite where there is one and --graphs are given, else"
        " cpu (default: %(default)s)",
    )
    group.add_argument(
        "--graphs", metavar="DIR", help="for rknnlite: the model's graphs, from rockpage export attention --out DIR"
    )
    group.add_argument(
        "--placement",
        choices=("device", "cost"),
        help="staged attention runs on the NPU as far as contexts fit (device), or where it costs less (cost), see"
        " rockpage calibrate (default: cost with auto, else device)",
    )
    group.add_argument(
        "--resident",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="memory in which decoding sequences stay staged; for NPUs that read it in place (default: none)",
    )
    group.add_argument(
        "--emulate-rounding",
        choices=("op", "output"),
        default="output",
        help="the emulated NPU rounds to fp16 after every operation, or only its outputs (default: %(default)s)",
    )
    group.add_argument(
        "--activations",
        choices=("int8", "fp32"),
        default="int8",
        help="of the dense parts: int8 is fast, fp32 exact (default: %(default)s)",
    )
    group.add_argument(
        "--pool", type=parse_size, default="192MiB", metavar="SIZE", help="memory for KV (default: %(default)s)"
    )
    add_threads_option(group)
    group.add_argument(
        "--context", type=int, metavar="TOKENS", help="most tokens of a sequence (default: the model's limit)"
    )
    group.add_argument(
        "--prefill-chunk", type=int, default=64, metavar="TOKENS", help="prompt tokens a step (default: %(default)s)"
    )


def add_threads_option(parser: argparse._ActionsContainer) -> None:
    """Add how many threads compute on the CPU."""
    parser.add_argument("--threads", type=int, default=default_threads(), metavar="N", help="(default: %(default)s)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are chosen and when an answer ends."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 keeps all (default: %(default)s)")
    group.add_argument("--typical-p", type=float, default=1.0, metavar="P", help="1 keeps all (default: %(default)s)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="(default: %(default)s)")
    for name in ("--frequency-penalty", "--presence-penalty"):
        group.add_argument(name, type=float, default=0.0, metavar="R", help="-2 to 2 (default: %(default)s)")
    group.add_argument(
        "--logit-bias",
        type=_parse_bias,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="added to the logit of a token, -100 to 100; may be repeated",
    )
    group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that this schema accepts; - is stdin")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, with N alternatives for each token"
    )
    group.add_argument("--seed", type=int, metavar="N", help="(default: a fresh one)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind an end token")


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


def open_engine(args: argparse.Namespace) -> Engine:
    """Load the model and take the pool as the arguments say; the caller closes it.

    Raises:
        RockpageError: see `npu.engine.Engine.load`.
        OSError: the file cannot be read.
    """
    from npu.interrupts import held_signals

    with held_signals():  # C code that is being initialised takes no exception from a signal's handler
        from npu.engine import Engine

    return Engine.load(
        model_path(args),
        runtime=args.runtime,
        rounding=args.emulate_rounding,
        graphs=args.graphs,
        placement=args.placement,
        resident_bytes=args.resident,
        activations=args.activations,
        pool_bytes=args.pool,
        threads=args.threads,
        context_length=args.context,
        prefill_chunk=args.prefill_chunk,
    )


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

"""Options of how an answer's tokens are chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import Parser
from .inputs import read_text

if TYPE_CHECKING:
    from npu.sampler import SamplingParams
    from npu.structured import Structure

__all__ = ["add_sampling_options", "sampling"]


_Number = tuple[str, type, float, str, str]
"""An option with a number: name, type, default, metavar, help."""

USUAL: tuple[_Number, ...] = (
    ("--max-tokens", int, 256, "N", "end it after N tokens"),
    ("--temperature", float, 0.0, "T", "0: the likeliest token; more: freer"),
    ("--top-k", int, 0, "K", "choose among the K likeliest; 0: all"),
    ("--top-p", float, 1.0, "P", "among the likeliest that reach P"),
    ("--min-p", float, 0.0, "P", "among those P times the likeliest"),
)

RARE: tuple[_Number, ...] = (
    ("--typical-p", float, 1.0, "P", "among the least surprising, P of all"),
    ("--repetition-penalty", float, 1.0, "R", "above 1: avoid what was there before"),
    ("--frequency-penalty", float, 0.0, "R", "avoid tokens by how often, -2 to 2"),
    ("--presence-penalty", float, 0.0, "R", "avoid tokens that occurred, -2 to 2"),
)


def add_sampling_options(parser: Parser) -> argparse._ArgumentGroup:
    """Add how tokens are chosen and when an answer ends.

    Returns:
        The group of the usual options, for those of one subcommand; what few need is in a rare group.
    """
    group = parser.add_argument_group("the answer")
    _add_numbers(group, USUAL)
    group.add_argument("--seed", type=int, metavar="N", help="of the random choices (default: a fresh one)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end it before TEXT; may be repeated"
    )
    group.add_argument("--json-schema", metavar="FILE", help="only JSON that this schema accepts; - is stdin")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and N runners-up")
    rare = parser.add_rare_group("the answer, in detail")
    _add_numbers(rare, RARE)
    rare.add_argument(
        "--logit-bias",
        type=_parse_bias,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="add -100 to 100 to a token's logit; may be repeated",
    )
    rare.add_argument("--ignore-eos", action="store_true", help="go on behind a token that ends answers")
    return group


def _add_numbers(group: argparse._ArgumentGroup, numbers: tuple[_Number, ...]) -> None:
    for name, kind, default, metavar, text in numbers:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)g)")


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

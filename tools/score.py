"""`rockpage score`: how likely the model finds a text, token by token."""

from __future__ import annotations

import argparse
import json

from .command import Subparsers, add_command
from .engine_options import add_engine_options, open_engine, require_model
from .inputs import read_ids, read_text

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage score --text-file story.txt
rockpage score model.gguf --ids-file ids.json --activations fp32 --json"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage score`."""
    parser = add_command(
        subparsers,
        "score",
        run,
        summary="say how likely a text is: log-probabilities and perplexity",
        usage="[OPTIONS] [MODEL]",
        example=EXAMPLE,
    )
    source = parser.add_argument_group("the text").add_mutually_exclusive_group()
    source.add_argument("--text-file", metavar="FILE", help="UTF-8 text; - is stdin, which is also the default")
    source.add_argument("--ids-file", metavar="FILE", help="token ids as a JSON list")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print perplexity, or one JSON object with `ids, logprobs, top1, perplexity`.

    Raises:
        RockpageError: the text, an option or the model cannot be used.
        OSError: a file cannot be read.
    """
    require_model(args, "--text-file")
    text = read_text(None, args.text_file) if args.ids_file is None else None
    ids = read_ids(args.ids_file) if args.ids_file is not None else []
    with open_engine(args) as engine:
        if text is not None:
            ids = engine.tokenizer.encode(text).tolist()
        score = engine.score(ids)
    if args.json:
        print(
            json.dumps(
                {
                    "ids": ids,
                    "logprobs": score.logprobs.tolist(),
                    "top1": score.top1.tolist(),
                    "perplexity": score.perplexity,
                }
            )
        )
    else:
        print(f"{len(ids)} tokens, perplexity {score.perplexity:.4f}")
    return 0

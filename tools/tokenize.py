"""`rockpage tokenize`: text to token ids."""

from __future__ import annotations

import argparse
import json

from .command import Subparsers, add_command
from .engine_options import add_model_option, model_path, require_model
from .inputs import read_text

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage tokenize --text "Hello, world!"
rockpage tokenize model.gguf --text-file prompt.txt --special --json"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage tokenize`."""
    parser = add_command(subparsers, "tokenize", run, summary="turn text into token ids", example=EXAMPLE)
    parser.add_argument("--text", metavar="TEXT", help="the text itself")
    parser.add_argument("--text-file", metavar="FILE", help="UTF-8 text; - is stdin, which is also the default")
    parser.add_argument("--special", action="store_true", help="parse special tokens such as <|im_start|>")
    add_model_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print one token a line, id and text, or one JSON object with `ids`.

    Raises:
        RockpageError: the text or the model cannot be used.
        OSError: a file cannot be read.
    """
    from npu.source import open_model
    from npu.text import tokenizer_of

    require_model(args, "--text")
    text = read_text(args.text, args.text_file)
    with open_model(model_path(args)) as source:
        tokenizer = tokenizer_of(source)
    ids = tokenizer.encode(text, special=args.special).tolist()
    if args.json:
        print(json.dumps({"ids": ids}))
    else:
        for token in ids:
            print(f"{token:>8}  {tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r}")
    return 0

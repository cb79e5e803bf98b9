"""`rockpage run`: answer one prompt, streaming."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from .command import Subparsers, add_command
from .engine_options import add_engine_options, add_sampling_options, open_engine, require_model, sampling
from .inputs import read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from npu.engine import Engine
    from npu.logprobs import TokenLogprobs
    from npu.tokenizer import Tokenizer

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage run --chat --prompt "What is a mutex?"
echo "Once upon a time" | rockpage run --max-tokens 50 --runtime emulated"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage run`."""
    parser = add_command(
        subparsers,
        "run",
        run,
        summary="answer one prompt, from an option, a file or stdin",
        usage="[OPTIONS] [MODEL]",
        example=EXAMPLE,
    )
    group = parser.add_argument_group("the prompt")
    group.add_argument("--prompt", metavar="TEXT", help="to be continued, or with --chat answered")
    group.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - is stdin, which is also the default")
    group.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    group.add_argument("--system", metavar="TEXT", help="what to tell the model first; implies --chat")
    group.add_argument("--explain-placement", action="store_true", help="say at the end where attention ran, and why")
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the answer to stdout, or print one JSON object at the end.

    Raises:
        RockpageError: the prompt, an option or the model cannot be used.
        OSError: the answer cannot be written.
    """
    from hostcache.errors import UsageError
    from npu.explain import explain_placement

    params = sampling(args)
    require_model(args, "--prompt")
    text = read_text(args.prompt, args.prompt_file)
    if not text:
        raise UsageError("the prompt is empty: give --prompt, --prompt-file, or text on stdin")
    chat = args.chat or args.system is not None
    with open_engine(args) as engine:
        prompt = _prompt_ids(engine, text, args.system, chat=chat)
        started = time.perf_counter()
        first_token = None
        pieces: list[str] = []
        tokens: list[int] = []
        logprobs: list[dict[str, Any]] = []
        reason = None
        request = engine.add_request(prompt, params)
        try:
            while reason is None:
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    if first_token is None:
                        first_token = time.perf_counter()
                    tokens += output.token_ids
                    logprobs += (_described(entry, engine.tokenizer) for entry in output.logprobs)
                    pieces.append(output.text)
                    reason = output.finish_reason
                    if not args.json:
                        sys.stdout.write(output.text)
                        sys.stdout.flush()
        finally:
            engine.abort(request)
        ended = time.perf_counter()
        remarks = explain_placement(engine.runtime) if args.explain_placement else []
        if not (chat or args.json) and len(tokens) == 1 and tokens[0] in engine.tokenizer.eos_ids:
            remarks.insert(0, "the model ended the text at once; --chat puts it as a question")
    if not args.json:
        sys.stdout.write("\n")
        sys.stdout.flush()  # in front of what follows, if both go to one place
    if remarks and sys.stderr is not None:
        sys.stderr.write("\n".join(remarks) + "\n")
    if not args.json:
        return 0
    first_token = first_token or ended
    decoding = ended - first_token
    answer = {
        "text": "".join(pieces),
        "ids": tokens,
        "finish_reason": reason.value,
        "prompt_tokens": len(prompt),
        "output_tokens": len(tokens),
        "ttft_s": first_token - started,
        "tokens_per_s": (len(tokens) - 1) / decoding if decoding > 0 else 0.0,
    }
    if params.logprobs is not None:
        answer["logprobs"] = logprobs
    print(json.dumps(answer))
    return 0


def _prompt_ids(engine: Engine, text: str, system: str | None, *, chat: bool) -> NDArray[np.int32]:
    """The prompt as ids; in a chat, only the template's own text can become control tokens."""
    if not chat:
        return engine.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return engine.encode_chat(messages)


def _described(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """A sampled token and its alternatives; the texts are for a reader, half a character in them is U+FFFD."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.decode([token], special=True), "logprob": logprob}

    return one(entry.token, entry.logprob) | {"top": [one(token, logprob) for token, logprob in entry.top]}

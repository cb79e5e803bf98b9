"""`rockpage run`: answer one prompt, streaming."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from .command import Subparsers, add_command
from .conversation import Conversation
from .engine_options import add_engine_options, add_sampling_options, open_engine, require_model, sampling
from .inputs import read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hostcache.request import FinishReason
    from npu.engine import Engine
    from npu.logprobs import TokenLogprobs
    from npu.sampling_params import SamplingParams
    from npu.stream import RequestOutput
    from npu.tokenizer import Tokenizer

__all__ = ["add_parser", "run"]

EXAMPLE = 'rockpage run --chat --prompt "What is a mutex?"'


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
    group.add_argument("--session", metavar="FILE", help="go on from FILE if it is there, and save to it")
    group.add_argument("--explain-placement", action="store_true", help="say at the end where attention ran, and why")
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the answer to stdout, or print one JSON object at the end.

    Raises:
        RockpageError: the prompt, the session, an option or the model cannot be used.
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
        conversation = Conversation(engine, args.session, chat=chat, system=args.system)
        prompt = conversation.ask(text)
        answer = _answer(engine, prompt, params, show=None if args.json else sys.stdout)
        conversation.keep(prompt, answer.tokens, answer.text)
        remarks = explain_placement(engine.runtime) if args.explain_placement else []
        ended_at_once = len(answer.tokens) == 1 and answer.tokens[0] in engine.tokenizer.eos_ids
        if ended_at_once and not (conversation.chat or args.json):
            remarks.insert(0, "the model ended the text at once; --chat puts it as a question")
    if not args.json:
        sys.stdout.write("\n")
        sys.stdout.flush()  # in front of what follows, if both go to one place
    if remarks and sys.stderr is not None:
        sys.stderr.write("\n".join(remarks) + "\n")
    if args.json:
        described = {
            "text": answer.text,
            "ids": answer.tokens,
            "finish_reason": answer.finish_reason.value,
            "prompt_tokens": len(prompt),
            "session_tokens": conversation.known,
            "output_tokens": len(answer.tokens),
            "ttft_s": answer.ttft_seconds,
            "tokens_per_s": answer.tokens_per_second,
        }
        if params.logprobs is not None:
            described["logprobs"] = [_described(entry, engine.tokenizer) for entry in answer.logprobs]
        print(json.dumps(described))
    return 0


@dataclass(frozen=True)
class _Answer:
    """What came of a prompt, and how fast."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason
    ttft_seconds: float
    decoding_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Behind the first token; 0 if there was no other."""
        return (len(self.tokens) - 1) / self.decoding_seconds if self.decoding_seconds > 0 else 0.0


def _answer(engine: Engine, prompt: NDArray[np.int32], params: SamplingParams, show: TextIO | None) -> _Answer:
    """Run one request to its end, with its text on `show` as it comes.

    Raises:
        RockpageError: it was refused, or failed.
        OSError: `show` cannot be written.
    """
    times = [time.perf_counter()]
    outputs: list[RequestOutput] = []
    reason = None
    request = engine.add_request(prompt, params)
    try:
        while reason is None:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                times.append(time.perf_counter())
                outputs.append(output)
                reason = output.finish_reason
                if show is not None:
                    show.write(output.text)
                    show.flush()
    finally:
        engine.abort(request)
    return _Answer(
        "".join(output.text for output in outputs),
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs],
        reason,
        ttft_seconds=times[1] - times[0],
        decoding_seconds=times[-1] - times[1],
    )


def _described(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """A sampled token and its alternatives; the texts are for a reader, half a character in them is U+FFFD."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.decode([token], special=True), "logprob": logprob}

    return one(entry.token, entry.logprob) | {"top": [one(token, logprob) for token, logprob in entry.top]}

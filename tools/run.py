"""`rockpage run`: answer one prompt, streaming."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from .answers import Answer, answer, require_choice, search
from .command import Subparsers, add_command
from .context_options import add_context_options, context_remarks, queue_options
from .conversation import Conversation
from .engine_options import add_engine_options, open_engine, require_model
from .inputs import read_text
from .sampling_options import add_sampling_options, sampling
from .units import parse_size

if TYPE_CHECKING:
    from npu.loading import LoadOptions
    from npu.logprobs import TokenLogprobs
    from npu.sampling_params import SamplingParams
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
    engine = add_engine_options(parser)
    engine.add_argument("--swap", type=parse_size, default=0, metavar="SIZE", help="for KV of answers that give way")
    engine.add_argument("--swap-folder", metavar="DIR", help="swap to a file in DIR, not to memory")
    engine.add_argument("--keep-prefixes", metavar="DIR", help="keep prompts' KV in DIR, and find it there again")
    engine.add_argument(
        "--speculate", type=int, default=0, metavar="N", help="guess N tokens from what was said before"
    )
    answers = add_sampling_options(parser)
    answers.add_argument("--answers", type=int, default=1, metavar="N", help="draw N answers, with seeds that follow")
    answers.add_argument("--beams", type=int, metavar="N", help="search N wide for the likeliest answer")
    add_context_options(answers)


def run(args: argparse.Namespace) -> int:
    """Stream the answer to stdout, or print one JSON object at the end.

    Raises:
        RockpageError: the prompt, the session, the folder, an option or the model cannot be used.
        OSError: the answer cannot be written.
    """
    from npu.explain import explain_placement

    params = sampling(args)
    require_choice(args.answers, args.beams, params)
    queued = queue_options(args)
    _require_keepable(args)
    require_model(args, "--prompt")
    text = _prompt_text(args)
    chat = args.chat or args.system is not None
    options: LoadOptions = {
        "planned_sessions": max(args.answers, args.beams or 1),
        "swap_bytes": args.swap,
        "swap_folder": args.swap_folder,
        "prefix_folder": args.keep_prefixes,
        "speculate": args.speculate,
    }
    with open_engine(args, **options) as engine:
        conversation = Conversation(engine, args.session, chat=chat, system=args.system)
        if conversation.lost is not None and sys.stderr is not None:
            sys.stderr.write(f"{conversation.lost}; a new session begins\n")
        prompt = conversation.ask(text)
        if args.beams is None:
            show = None if args.json else sys.stdout
            answered = answer(engine, prompt, params, count=args.answers, show=show, **queued)
        else:
            answered = search(engine, prompt, args.beams, args.max_tokens)
        best = answered.answers[0]
        conversation.keep(prompt, best.tokens, best.text)
        if args.keep_prefixes is not None:
            engine.sessions.keep(conversation.beginning(prompt))
        remarks = explain_placement(engine.runtime) if args.explain_placement else []
        ended_at_once = len(best.tokens) == 1 and best.tokens[0] in engine.tokenizer.eos_ids
        if ended_at_once and not (conversation.chat or args.json):
            remarks.insert(0, "the model ended the text at once; --chat puts it as a question")
        if not args.json:
            remarks += context_remarks(answered.answers, engine.scheduler.config.context_length)
    if not args.json:
        sys.stdout.write("\n" if args.beams is None else f"{best.text}\n")
        sys.stdout.flush()  # in front of what follows, if both go to one place
    if remarks and sys.stderr is not None:
        sys.stderr.write("\n".join(remarks) + "\n")
    if args.json:
        answers = [_described_answer(one, engine.tokenizer, params) for one in answered.answers]
        several = args.answers > 1 or args.beams is not None
        described = {
            **({"answers": answers} if several else answers[0]),
            "kv": engine.codec().name,
            "prompt_tokens": len(prompt),
            "session_tokens": conversation.known,
            "cached_tokens": answered.cached_tokens,
            "output_tokens": answered.output_tokens,
            "ttft_s": answered.ttft_seconds,
            "tokens_per_s": answered.tokens_per_second,
        }
        if args.speculate:
            stats = engine.scheduler.stats
            described |= {"guessed_tokens": stats.drafted_tokens, "accepted_tokens": stats.accepted_tokens}
        print(json.dumps(described))
    return 0


def _require_keepable(args: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, what could not be kept at the end.

    Raises:
        UsageError: several answers for one session, or a folder in which nothing can be made.
    """
    from hostcache.errors import UsageError

    if args.session is not None and (args.answers > 1 or args.beams is not None):
        raise UsageError("a session goes on from one answer: leave out --answers and --beams, or --session")
    if args.keep_prefixes is None:
        return
    try:
        os.makedirs(args.keep_prefixes, mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=args.keep_prefixes).close()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(
            f"prefixes cannot be kept in {args.keep_prefixes}: {getattr(error, 'strerror', None) or error}; "
            "name a folder of your own",
            folder=args.keep_prefixes,
        ) from error


def _prompt_text(args: argparse.Namespace) -> str:
    """What is asked.

    Raises:
        UsageError: nothing.
    """
    from hostcache.errors import UsageError

    text = read_text(args.prompt, args.prompt_file)
    if not text:
        raise UsageError("the prompt is empty: give --prompt, --prompt-file, or text on stdin")
    return text


def _described_answer(one: Answer, tokenizer: Tokenizer, params: SamplingParams) -> dict[str, Any]:
    """An answer for JSON."""
    assert one.finish_reason is not None
    described: dict[str, Any] = {"text": one.text, "ids": one.tokens, "finish_reason": one.finish_reason.value}
    if one.unseen_tokens:
        described["unseen_tokens"] = one.unseen_tokens
    if params.logprobs is not None:
        described["logprobs"] = [_described(entry, tokenizer) for entry in one.logprobs]
    if one.logprob is not None:
        described["logprob"] = one.logprob
    return described


def _described(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """A sampled token and its alternatives; the texts are for a reader, half a character in them is U+FFFD."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.decode([token], special=True), "logprob": logprob}

    return one(entry.token, entry.logprob) | {"top": [one(token, logprob) for token, logprob in entry.top]}

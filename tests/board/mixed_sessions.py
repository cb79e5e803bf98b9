"""Serves sixteen sessions at once from one pool and tells what that took: JSON on stdout.

Run it in a process of its own: `python -m tests.board.mixed_sessions MODEL CACHE_DIR POOL_BYTES SESSIONS`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npu.engine import Engine
from npu.sampler import SamplingParams
from tests.footprint import Footprint
from tools.demo import QUESTIONS, SYSTEM, Peak

__all__ = ["ALL", "AT_ONCE", "THREADS", "answer_tokens"]

LICENSE = Path(__file__).parents[2] / "LICENSE"

ALL = 20
"""Sessions."""

AT_ONCE = 16
"""Sessions that run together; one joins at every step until they are so many, and when one has ended."""

LENGTHS = (16, 600, 24, 300, 40, 150, 64, 220, 33, 100, 400, 80, 17, 48)
"""Tokens of the prompts that share nothing."""

COMPARED = (2, 6, 19)
"""Sessions that are served once more, alone: the longest, one behind the shared prompt, the last to join."""

THREADS = 2


@dataclass(frozen=True)
class Session:
    """A prompt, int32 ids, and how its answer is chosen."""

    prompt: NDArray[np.int32]
    params: SamplingParams


def answer_tokens(number: int) -> int:
    """Tokens of a session's answer: 20 to 43, so that they end one after the other."""
    return 20 + 5 * number % 24


def sessions(engine: Engine) -> list[Session]:
    """Six behind one system prompt among fourteen with text of their own; every second answer is drawn."""
    system = {"role": "system", "content": SYSTEM}
    chats = [engine.encode_chat([system, {"role": "user", "content": question}]) for question in QUESTIONS]
    text = engine.tokenizer.encode(LICENSE.read_text(encoding="utf-8"))
    others = [text[100 * part :][:length] for part, length in enumerate(LENGTHS)]
    prompts = [chats[0], *others[:5]]  # so that the first of them is computed when the next ones come
    for chat, other in zip(chats[1:], others[5:], strict=False):
        prompts += [chat, other]
    prompts += others[len(prompts) - len(chats) :]
    return [
        Session(
            prompt,
            SamplingParams(
                max_tokens=answer_tokens(number),
                temperature=0.8 if number % 2 else 0.0,
                top_p=0.95 if number % 2 else 1.0,
                seed=number,
                ignore_eos=True,  # random weights end an answer anywhere
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def serve(engine: Engine, queue: list[Session], peak: Peak) -> tuple[list[list[int]], int]:
    """Serve all, so many at once; their tokens, and how many ran together at most."""
    waiting = list(enumerate(queue))
    numbers: dict[int, int] = {}  # sessions by request
    tokens: list[list[int]] = [[] for _ in queue]
    unfinished = most = 0
    while waiting or unfinished:
        if waiting and unfinished < AT_ONCE:
            number, session = waiting.pop(0)
            numbers[engine.add_request(session.prompt, session.params)] = number
            unfinished += 1
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens[numbers[output.request_id]] += output.token_ids
            unfinished -= output.finish_reason is not None
        most = max(most, len(engine.scheduler.running))
        peak.observe(engine)
    return tokens, most


def main(model: str, cache_dir: str, pool_bytes: str, count: str) -> None:
    started = time.monotonic()
    with Engine.load(model, pool_bytes=int(pool_bytes), threads=THREADS, cache_dir=cache_dir) as engine:
        loaded = time.monotonic()
        peak, queue = Peak(), sessions(engine)[: int(count)]
        tokens, most = serve(engine, queue, peak)
        served = time.monotonic()
        footprint = Footprint.of_this_process()
        engine.prefix.invalidate()  # whoever is compared computes its prompt itself
        alone = {number: serve(engine, [queue[number]], Peak())[0][0] for number in COMPARED if number < len(queue)}
        block_bytes = engine.cache.geometry.block_bytes
    report = {
        "load_s": loaded - started,
        "serve_s": served - loaded,
        "prompt_tokens": [len(session.prompt) for session in queue],
        "tokens": tokens,
        "alone": alone,
        "most_at_once": most,
        "kv_bytes_used": peak.used * block_bytes,
        "blocks_shared": peak.shared,
        "footprint": footprint.as_dict(),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The case of `rockpage bench prefix`."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from npu.engine import Engine
from npu.sampler import SamplingParams

from .bench_e2e_run import Prompt, open_sides, random_prompts, speed_row
from .bench_kind import Measured
from .bench_rows import take_turns, timed
from .llama_peer import NO_PEER, LlamaCpp

__all__ = ["measure", "our_answers", "peer_answers"]

SHARED, OWN, ANSWER, SESSIONS = 256, 16, 32, 8  # tokens but for the last


def measure(model: Path, threads: int, times: int) -> Measured:
    """Measure it so many times.

    Raises:
        RockpageError: the model cannot be loaded.
    """
    (shared,), own = random_prompts(1, SHARED), random_prompts(SESSIONS, OWN)
    salts = count()  # each time nobody has seen the prompt before
    with open_sides(model, threads) as sides:
        works = [timed(lambda: our_answers(sides.ours, shared, own, salt=str(next(salts))))]
        if (peer := sides.theirs) is not None:
            works.append(timed(lambda: peer_answers(peer, shared, own)))
        timings = take_turns(works, times, warm_up=1)
    row = speed_row(f"{SESSIONS} sessions, {SHARED} tokens in common", timings, 1.5, 2.0)
    return Measured([row], [NO_PEER] if peer is None else [])


def our_answers(engine: Engine, shared: Prompt, own: list[Prompt], salt: str) -> list[list[int]]:
    """The tokens of each answer; what one session computes of the shared prompt, the others find."""
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    answers = {engine.add_request([*shared, *tail], params, salt=salt): list[int]() for tail in own}
    while not engine.idle:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def peer_answers(peer: LlamaCpp, shared: Prompt, own: list[Prompt]) -> list[list[int]]:
    """The same of llama.cpp."""
    peer.forget()
    peer.compute([(0, shared)])
    peer.share(0, range(1, len(own)))
    newest = peer.compute(list(enumerate(own)))
    answers = [[token] for token in newest]
    for _ in range(ANSWER - 1):
        newest = peer.compute([(number, [token]) for number, token in enumerate(newest)])
        for answer, token in zip(answers, newest, strict=True):
            answer.append(token)
    return answers

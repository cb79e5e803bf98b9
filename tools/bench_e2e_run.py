"""The cases of `rockpage bench e2e`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hostcache.errors import MissingExtra
from npu.engine import Engine
from npu.sampler import SamplingParams

from .bench_kind import Measured
from .bench_memory import CONTEXT, SEQUENCES, memory_rows
from .bench_rows import WARM_UP, Row, Timing, Work, take_turns, timed
from .llama_peer import NO_PEER, PEER, LlamaCpp

__all__ = ["Decoding", "Prompt", "Sides", "measure", "open_sides", "prefill_works", "random_prompts", "speed_row"]

PROMPT = 128
"""Tokens that a sequence holds when it begins to decode."""

PREFILL = 256
STEPS_OF_A_PROMPT = 4
"""A prompt takes as long as many steps: it is measured as many times less often."""

POOL_BYTES = 96 << 20


Prompt: TypeAlias = list[int]


@dataclass(frozen=True)
class Sides:
    """Who is compared; `theirs` is None where the peer is not installed."""

    ours: Engine
    theirs: LlamaCpp | None


@contextmanager
def open_sides(model: Path, threads: int) -> Iterator[Sides]:
    """Load a model on both sides.

    Raises:
        RockpageError: the model cannot be loaded.
    """
    options = {"runtime": "cpu", "pool_bytes": POOL_BYTES, "max_rows": PREFILL, "prefill_chunk": PREFILL}
    with Engine.load(model, threads=threads, **options) as ours:  # type: ignore[arg-type] # options by name
        try:
            theirs = LlamaCpp(model, sequences=SEQUENCES, context=CONTEXT, threads=threads)
        except MissingExtra:
            theirs = None
        try:
            yield Sides(ours, theirs)
        finally:
            if theirs is not None:
                theirs.close()


def measure(model: Path, also: Path | None, threads: int, times: int) -> Measured:
    """Measure all cases.

    Args:
        model: whose rows have targets.
        also: another file, whose rows have none; None: there is none.
        threads: of both sides.
        times: steps of a case.

    Raises:
        RockpageError: a model cannot be loaded.
    """
    with open_sides(model, threads) as sides:
        rows = speed_rows(sides, times)
        missing = sides.theirs is None
    if also is not None:
        with open_sides(also, threads) as sides:
            rows += [
                replace(row, case=f"{row.case}, {also.name}", target=None, stretch=None)
                for row in speed_rows(sides, times)
            ]
    return Measured([*rows, *memory_rows(model, threads)], [NO_PEER] if missing else [])


def speed_rows(sides: Sides, times: int) -> list[Row]:
    """What a model's speed is, as steps of so many sequences and as a prompt."""
    rows = []
    for sequences, target, stretch in ((1, 1.2, 1.5), (SEQUENCES, 1.7, 2.5)):
        race = Decoding(sides, sequences, WARM_UP + times)
        name = f"decode, {sequences} sequence{'s' * (sequences > 1)}"
        rows.append(speed_row(name, take_turns(race.works, times), target, stretch))
        race.end()
    timings = take_turns(prefill_works(sides), max(1, times // STEPS_OF_A_PROMPT), warm_up=1)
    rows.append(speed_row(f"prefill of {PREFILL} tokens", timings, 1.6, 3.0))
    return rows


def speed_row(case: str, timings: Sequence[Timing], target: float, stretch: float) -> Row:
    """A row of ours and the peer's, if that was there."""
    ours, *theirs = timings
    return Row(case, PEER, ours, theirs[0] if theirs else None, target, stretch, better="higher")


class Decoding:
    """Sequences that decode on both sides; the peer is given the tokens that ours chose.

    Args:
        sides: who is compared.
        sequences: how many.
        steps: of each side, at most.

    Attributes:
        answers: the tokens of ours so far, by request.
        works: a step of ours and, if it is there, of the peer.
        agreed: whether the peer would have chosen the same, of each token.
    """

    def __init__(self, sides: Sides, sequences: int, steps: int) -> None:
        self._engine, self._peer = sides.ours, sides.theirs
        prompts = random_prompts(sequences, PROMPT)
        params = SamplingParams(max_tokens=2 * sequences + steps + 1, ignore_eos=True)
        self.answers = {self._engine.add_request(prompt, params): list[int]() for prompt in prompts}
        while not all(self.answers.values()):
            self._step()
        self._starts = [len(answer) for answer in self.answers.values()]  # the first ones wait for the others
        self._steps = 0  # of the peer's
        self.agreed: list[bool] = []
        self.works = [timed(self._step)]
        if self._peer is not None:
            self._peer.forget()
            for number, (prompt, answer) in enumerate(zip(prompts, self.answers.values(), strict=True)):
                self._peer.compute([(number, [*prompt, *answer[:-1]])])
            self.works.append(timed(partial(self._peer_step, self._peer)))

    def end(self) -> None:
        """Give back what ours holds."""
        for request_id in self.answers:
            self._engine.abort(request_id)

    def _step(self) -> None:
        for output in self._engine.step():
            self.answers[output.request_id] += output.token_ids

    def _peer_step(self, peer: LlamaCpp) -> None:
        """The peer is a step ahead of ours at most: then its choice is compared with nothing."""
        places = [start + self._steps for start in self._starts]
        answers = list(zip(places, self.answers.values(), strict=True))
        chosen = peer.compute([(number, answer[at - 1 : at]) for number, (at, answer) in enumerate(answers)])
        self._steps += 1
        self.agreed += [
            answer[at] == token for (at, answer), token in zip(answers, chosen, strict=True) if at < len(answer)
        ]


def prefill_works(sides: Sides) -> list[Work]:
    """A prompt of its own each time, up to the first token behind it."""

    def ours(prompt: Prompt) -> None:
        request_id = sides.ours.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        while not sides.ours.step():
            pass
        sides.ours.abort(request_id)

    def theirs(peer: LlamaCpp, prompt: Prompt) -> None:
        peer.forget()
        peer.compute([(0, prompt)])

    prompts = [iter(random_prompts(1000, PREFILL)) for _ in range(2)]
    works = [timed(lambda: ours(next(prompts[0])))]
    if (peer := sides.theirs) is not None:
        works.append(timed(lambda: theirs(peer, next(prompts[1]))))
    return works


def random_prompts(count: int, tokens: int) -> list[Prompt]:
    """Ids that are in every vocabulary of some size; those of another length begin otherwise."""
    prompts: list[Prompt] = np.random.default_rng(tokens).integers(16, 256, (count, tokens)).tolist()
    return prompts

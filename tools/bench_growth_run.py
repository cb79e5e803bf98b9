"""The cases of `rockpage bench growth`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npu.engine import Engine
from npu.sampler import SamplingParams

from .bench_e2e_run import Prompt, random_prompts
from .bench_rows import WARM_UP, Point, Row, Timing, take_turns, timed

__all__ = ["PEER", "rows", "step_timing"]

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
LEAST, MOST = (8, 512), (64, 8192)
"""Sequences and context: what stands still while the other grows, and the largest of both."""

PEER = "twice the half"
ROUNDS = 3
POOL_BYTES = 512 << 20


def rows(model: Path, threads: int, times: int) -> list[Row]:
    """A row for each size, the first of each line without a peer: there is no half of it.

    Raises:
        RockpageError: the model cannot be loaded.
    """
    with Engine.load(model, runtime="cpu", pool_bytes=POOL_BYTES, threads=threads) as engine:
        room = engine.scheduler.config.context_length - WARM_UP - times - 2
        (text,) = random_prompts(1, MOST[1])
        contexts = [context for context in (*CONTEXTS[:-1], min(MOST[1], room)) if context <= room]

        def line(name: str, axis: str, sizes: Sequence[tuple[int, int]], place: int) -> list[Row]:
            rounds = [[step_timing(engine, *size, text, times) for size in sizes] for _ in range(ROUNDS)]
            timings = [_least(column) for column in zip(*rounds, strict=True)]
            found = []
            for number, (size, timing) in enumerate(zip(sizes, timings, strict=True)):
                half = None
                if number:
                    growth = size[place] / sizes[number - 1][place]
                    before = timings[number - 1]
                    half = Timing(before.minimum * growth, before.median * growth)
                case = f"{size[0]} sequence{'s' * (size[0] > 1)} of {size[1]} tokens"
                point = Point(axis, size[place], name)
                # A tenth above: neighbours on the machine move even least times by some percent.
                found.append(Row(case, PEER, timing, half, target=1.1, goal=f"growth with {axis}", point=point))
            return found

        held = min(LEAST[1], room)
        most = contexts[-1]
        return [
            *line(f"{held} tokens", "sequences", [(count, held) for count in SEQUENCES], 0),
            *line(f"{LEAST[0]} sequences", "context", [(LEAST[0], context) for context in contexts], 1),
            *line(f"{most} tokens", "sequences", [(count, most) for count in (32, MOST[0])], 0),
        ]


def _least(timings: Sequence[Timing]) -> Timing:
    """Sizes cannot take turns step by step; what was disturbed in one round, was not in another."""
    return Timing(min(timing.minimum for timing in timings), min(timing.median for timing in timings))


def step_timing(engine: Engine, sequences: int, context: int, text: Prompt, times: int) -> Timing:
    """A step of so many sequences that share so much of a text, but for the last token."""
    params = SamplingParams(max_tokens=WARM_UP + times + 2 * sequences, ignore_eos=True)
    ids = [engine.add_request([*text[: context - 1], 16 + number], params) for number in range(sequences)]
    answered: set[int] = set()
    while len(answered) < sequences:
        answered |= {output.request_id for output in engine.step()}
    (timing,) = take_turns([timed(engine.step)], times)
    for request_id in ids:
        engine.abort(request_id)
    return timing

"""Prompt lookup: what it proposes, and that answers are the same with and without it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from hostcache.errors import UsageError
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.speculation import PromptLookup
from npu.stream import RequestOutput
from tests.npu.driving import drive
from tests.npu.tiny import TinyLlama, write_tiny_llama


def proposed(tokens: list[int], most: int = 4, **sizes: int) -> list[int]:
    return [int(token) for token in PromptLookup(most, **sizes).propose(np.array(tokens, np.int32))]


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]) == [4, 5, 6, 7]
    assert proposed([1, 2, 3, 4, 1, 2], most=1) == [3]
    assert proposed([5, 5, 5]) == [5]  # behind the first two stands one, and then the sequence ends


def test_the_longest_match_goes_first_and_then_the_newest() -> None:
    assert proposed([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3], most=1) == [70]  # three match; the newer two do not count
    assert proposed([2, 3, 70, 9, 2, 3, 80, 1, 2, 3], most=1) == [80]


def test_nothing_is_proposed_when_too_little_matches() -> None:
    assert proposed([1, 2, 3, 1]) == []  # one token only
    assert proposed([1, 2, 3, 1], shortest=1) == [2, 3, 1]
    assert proposed([4]) == proposed([]) == []
    assert proposed([1, 2, 3, 4, 5]) == []


@pytest.mark.parametrize(("most", "longest", "shortest"), [(0, 3, 2), (-1, 3, 2), (4, 1, 2), (4, 3, 0)])
def test_numbers_out_of_range_are_refused(most: int, longest: int, shortest: int) -> None:
    with pytest.raises(UsageError, match=f"behind {shortest} to {longest} that match, not {most}"):
        PromptLookup(most, longest=longest, shortest=shortest)


def traffic(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves, sampled in every way that looks at what was said before."""
    chance = random.Random(seed)
    requests = []
    for _ in range(6):
        phrase = [chance.randrange(3, 60) for _ in range(chance.randint(2, 9))]
        prompt = phrase * chance.randint(1, 4) + phrase[: chance.randint(1, 2)]
        params = SamplingParams(
            temperature=chance.choice((0.0, 0.0, 0.2, 1.0)),
            seed=chance.randrange(1000),
            repetition_penalty=chance.choice((1.0, 1.3)),
            frequency_penalty=chance.choice((0.0, 0.5)),
            logprobs=chance.choice((None, 2)),
            max_tokens=chance.randint(1, 40),
            stop=chance.choice(((), ("the", "x"))),
            ignore_eos=chance.random() < 0.7,
        )
        requests.append((prompt, params))
    return requests


@dataclasses.dataclass
class Answers:
    """Of all requests, in the order they were asked; and what it took."""

    tokens: list[list[int]]
    texts: list[str]
    ends: list[object]
    logprobs: list[list[tuple[int, float]]]
    steps: int
    preemptions: int
    accepted: int


def answers(model: Path, seed: int, speculate: int, pool_blocks: int) -> Answers:
    """Every third request is answered three times, from forks of its prompt."""
    with Engine.load(
        model,
        pool_bytes=pool_blocks * 16 * 2 * 2 * 2 * 16 * 2,  # tokens, K and V, layers, heads, dimensions, bytes
        cache_dir=model.parent,
        speculate=speculate,
        watch_memory=False,
    ) as engine:
        ids: list[int] = []
        for index, (prompt, params) in enumerate(traffic(seed)):
            ids += engine.add_branches(prompt, 3 if index % 3 == 0 else 1, params)
        outputs: dict[int, list[RequestOutput]] = {request: [] for request in ids}
        while not engine.idle:
            for output in engine.step():
                outputs[output.request_id].append(output)
        assert engine.cache.pool.used == 0
        stats = engine.scheduler.stats
        entries = [[entry for output in outputs[request] for entry in output.logprobs] for request in ids]
        return Answers(
            [[token for output in outputs[request] for token in output.token_ids] for request in ids],
            ["".join(output.text for output in outputs[request]) for request in ids],
            [outputs[request][-1].finish_reason for request in ids],
            [[(entry.token, entry.logprob) for entry in each] for each in entries],
            stats.steps,
            stats.preemptions,
            stats.accepted_tokens,
        )


@pytest.mark.parametrize("pool_blocks", [8, 200])
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same_with_and_without(tmp_path: Path, seed: int, pool_blocks: int) -> None:
    """Over models of random weights; the small pool preempts. Those with a tied head repeat what they say."""
    repeats = seed % 2 == 0
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(seed=seed, tied_head=repeats))
    plain, guessed = (answers(model, seed, speculate, pool_blocks) for speculate in (0, 5))
    assert guessed.tokens == plain.tokens
    assert guessed.texts == plain.texts
    assert guessed.ends == plain.ends
    assert guessed.logprobs == plain.logprobs
    assert plain.accepted == 0
    assert (plain.preemptions > 0) == (guessed.preemptions > 0) == (pool_blocks == 8)
    if repeats:
        assert guessed.accepted > 0
        assert guessed.steps < plain.steps


def test_what_is_accepted_behind_a_stop_string_is_no_part_of_the_answer(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(seed=2))
    prompt = [40, 41, 42, 40, 41, 42, 40]
    runs = []
    for speculate in (0, 5):
        with Engine.load(model, pool_bytes=1 << 20, cache_dir=tmp_path, speculate=speculate) as engine:
            free = SamplingParams(max_tokens=24, ignore_eos=True, repetition_penalty=1.05)
            text = "".join(engine.generate(prompt, free))
            stopped = []
            for cut in range(2, len(text)):
                request = engine.add_request(prompt, dataclasses.replace(free, stop=(text[:cut],)))
                tokens = [token for output in drive(engine)[request] for token in output.token_ids]
                stopped.append(tokens)
            runs.append(stopped)
            accepted = engine.scheduler.stats.accepted_tokens
    assert runs[0] == runs[1]
    assert accepted > 0

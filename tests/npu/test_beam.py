"""Beam search against one that is written plainly and computes every sequence anew, without a cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import RequestFailed, RequestRefused, UsageError
from npu.beam import BeamParams
from npu.decoder import Decoder
from npu.engine import Engine
from npu.source import open_model
from tests.npu.reference import PlainSession, log_softmax
from tests.npu.tiny import TinyLlama, write_tiny_llama

PROMPT = [5, 9, 30, 41, 7, 12, 80, 3, 99, 14, 27, 61, 50, 33, 21]
"""One token short of a block: beams part in the middle of blocks, and at their ends."""

LogProbs = Callable[[tuple[int, ...]], NDArray[np.float64]]


def plain_search(
    logprobs: LogProbs, params: BeamParams, end_ids: frozenset[int]
) -> list[tuple[tuple[int, ...], float]]:
    """Every length is searched to the end, whatever can still be reached; answers and their log-probabilities."""
    going: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    complete: list[tuple[tuple[int, ...], float]] = []

    def score(entry: tuple[tuple[int, ...], float]) -> float:
        return entry[1] / math.pow(len(entry[0]), params.length_penalty)

    for length in range(1, params.max_tokens + 1):
        ways = [
            ((*answer, token), total + float(value))
            for answer, total in going
            for token, value in enumerate(logprobs(answer))
        ]
        ways.sort(key=lambda way: -way[1])
        if length == params.max_tokens:
            complete += ways[: params.width]
        else:
            complete += [way for way in ways[: params.width] if way[0][-1] in end_ids]
        going = [way for way in ways if way[0][-1] not in end_ids][: params.width]
        complete = sorted(complete, key=score, reverse=True)[: params.width]
        if params.early_stopping and len(complete) == params.width:
            break
    return complete


def plain_logprobs(decoder: Decoder) -> LogProbs:
    """Of the token that follows the prompt and an answer; each sequence is computed from its first token on."""

    @functools.cache
    def logprobs(answer: tuple[int, ...]) -> NDArray[np.float64]:
        row: NDArray[np.float64] = log_softmax(PlainSession(decoder).step([*PROMPT, *answer])[-1:])[0]
        return row

    return logprobs


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_what_a_plain_search_finds(tmp_path: Path, seed: int) -> None:
    """Over models of random weights, which end their answers often: every tenth token or so is an end token."""
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(seed=seed, layers=1, tied_head=False))
    chance = np.random.default_rng(seed)
    with open_model(model) as source:
        logprobs = plain_logprobs(Decoder.load(source, activations="fp32", cache_dir=tmp_path))
    with Engine.load(model, pool_bytes=1 << 20, activations="fp32", cache_dir=tmp_path) as engine:
        engine.tokenizer.eos_ids = frozenset(chance.choice(engine.tokenizer.vocab_size, 30, replace=False).tolist())
        for width in (1, 2, 4):
            params = BeamParams(width, 7, float(chance.choice((-1.0, 0.0, 0.7, 2.0))), bool(chance.integers(2)))
            found = engine.beam_search(PROMPT, params)
            expected = plain_search(logprobs, params, engine.tokenizer.eos_ids)
            assert [answer.tokens for answer in found] == [tokens for tokens, _ in expected]
            # The cache rounds K and V to fp16; the plain one does not.
            np.testing.assert_allclose(
                [answer.logprob for answer in found], [value for _, value in expected], atol=5e-3
            )
            for answer in found:
                assert math.isclose(answer.score, answer.logprob / len(answer.tokens) ** params.length_penalty)
            assert engine.cache.pool.free == engine.cache.pool.total


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("beam") / "tiny.gguf", TinyLlama(tied_head=False))


def test_a_pool_that_is_full_ends_the_search_in_one_clear_error(model: Path) -> None:
    with Engine.load(model, pool_bytes=1 << 14, cache_dir=model.parent, watch_memory=False) as engine:
        total = engine.cache.pool.total
        with pytest.raises(RequestFailed, match=f"4 beams of [0-9]+ tokens have no room in the pool of {total} blocks"):
            engine.beam_search(PROMPT, BeamParams(4, max_tokens=400, length_penalty=5.0))
        assert engine.cache.pool.free == total
        with pytest.raises(RequestRefused, match=f"needs 10 blocks, {total} are available"):
            engine.beam_search([5] * 160, BeamParams(2))
        assert engine.beam_search(PROMPT, BeamParams(1, max_tokens=3))


def test_requests_beside_it_are_left_alone(model: Path) -> None:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent) as engine:
        engine.add_request(PROMPT)
        engine.step()
        used = engine.cache.pool.used
        engine.beam_search(PROMPT, BeamParams(3, max_tokens=20))
        assert engine.cache.pool.used == used


def test_what_cannot_be_searched_is_refused(model: Path) -> None:
    for name, params in (("width", (0, 1)), ("max_tokens", (1, 0)), ("length_penalty", (1, 1, math.nan))):
        with pytest.raises(UsageError, match=f"{name} must be"):
            BeamParams(*params)
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, max_rows=4, max_sequences=4) as engine:
        with pytest.raises(UsageError, match="width 5 exceeds max_rows 4"):
            engine.beam_search(PROMPT, BeamParams(5))
        for prompt, tokens in (([], 5), ([5] * 500, 13)):
            with pytest.raises(RequestRefused, match="must have 2 to 512 tokens"):
                engine.beam_search(prompt, BeamParams(2, max_tokens=tokens))

"""What a cached prefix saves, on the real model: ratios of medians of alternating runs in one process.

Times are CPU seconds of this process, which runs on one thread: on an idle machine they are the wall clock's, and a
busy neighbour does not count.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hostcache.request import Request
from hostcache.step import Chunk, StepPlan
from npu.engine import Engine
from npu.sampler import SamplingParams
from tools.demo import QUESTIONS, SYSTEM

ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
PAIRS = 5


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Engine]:
    with Engine.load(demo_model, pool_bytes=64 << 20) as engine:
        yield engine


def prompts(engine: Engine) -> list[np.ndarray]:
    return [
        engine.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        for question in QUESTIONS
    ]


def first_token(engine: Engine, prompt: np.ndarray) -> tuple[float, Request]:
    """CPU seconds until the first token of a request on the idle engine."""
    started = time.process_time()
    engine.add_request(prompt, ONE_TOKEN)
    request = engine.scheduler.waiting[0]
    while not engine.idle:
        engine.step()
    return time.process_time() - started, request


def plain_prefill(engine: Engine, prompt: np.ndarray) -> float:
    """CPU seconds to compute the same chunks with neither scheduler, prefix cache nor sampler."""
    request = Request(0, prompt, len(prompt), len(prompt), engine.namespace(), engine.cache.table())
    chunk = engine.scheduler.config.prefill_chunk
    started = time.process_time()
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        request.table.append(count)
        plan = StepPlan.build([Chunk(request, start, count, samples=False)])
        last = start + count == len(prompt)
        engine._runner.compute(dataclasses.replace(plan, logit_rows=np.array([count - 1] if last else [], np.int64)))
    seconds = time.process_time() - started
    request.table.release()
    return seconds


def test_the_demos_prompts_share_sixteen_blocks_and_a_short_tail(engine: Engine) -> None:
    for prompt in prompts(engine):
        assert prompt[:256].tolist() == prompts(engine)[0][:256].tolist()
        assert len(prompt) - 256 <= 24


def test_a_cached_prefix_cuts_the_time_to_the_first_token(engine: Engine) -> None:
    prompt = prompts(engine)[0]
    first_token(engine, prompt)
    plain_prefill(engine, prompt)
    cold, cached, plain = [], [], []
    for _ in range(PAIRS):
        engine.prefix.invalidate()
        plain.append(plain_prefill(engine, prompt))
        seconds, request = first_token(engine, prompt)
        assert (request.hit_tokens, request.computed_tokens) == (0, len(prompt))
        cold.append(seconds)
        seconds, request = first_token(engine, prompt)
        assert request.hit_tokens == len(prompt) - 1
        assert request.computed_tokens == len(prompt) - request.hit_tokens
        cached.append(seconds)
    assert 1 - statistics.median(cached) / statistics.median(cold) >= 0.85
    assert statistics.median(plain) / statistics.median(cold) >= 0.9


def test_another_question_behind_the_same_prompt_computes_only_its_own_tokens(engine: Engine) -> None:
    engine.prefix.invalidate()
    first, second, *_ = prompts(engine)
    first_token(engine, first)
    common = int(np.flatnonzero(first[: len(second)] != second[: len(first)])[0])
    _, request = first_token(engine, second)
    assert request.hit_tokens == common >= 256
    assert request.computed_tokens == len(second) - common


def test_six_sessions_hold_the_prompt_once(engine: Engine) -> None:
    engine.prefix.invalidate()
    first_token(engine, prompts(engine)[0])
    for prompt in prompts(engine):
        engine.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    running = engine.scheduler.running
    assert len(running) == 6
    shared = running[0].table.blocks[:16]
    assert all(request.table.blocks[:16] == shared for request in running)
    assert [engine.cache.pool.refs[block] for block in shared] == [6] * 16
    private = [block for request in running for block in request.table.blocks[16:]]
    assert len(set(private)) == len(private)
    assert engine.cache.pool.used == 16 + len(private)
    for request in list(running):
        engine.abort(request.id)

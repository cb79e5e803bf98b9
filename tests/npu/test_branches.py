"""Several answers to one prompt are what each would be alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostcache.errors import RequestRefused, UsageError
from npu.engine import Engine
from npu.sampler import SamplingParams
from tests.npu.driving import drive
from tests.npu.tiny import TinyLlama, write_tiny_llama

PARAMS = SamplingParams(temperature=1.0, seed=2**64 - 2, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 30, 41, 7, 12, 80, 3, 99, 14, 27, 61, 50, 33, 21, 8, 18, 70, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("branches") / "tiny.gguf"
    return write_tiny_llama(path, TinyLlama(tied_head=False))  # a tied one repeats itself


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent) as engine:
        yield engine


def answer(engine: Engine, seed: int) -> list[int]:
    """What the prompt is answered with by a request that is alone, whose prompt is not in the cache."""
    request = engine.add_request(PROMPT, dataclasses.replace(PARAMS, seed=seed), salt=f"alone {seed}")
    return [token for output in drive(engine)[request] for token in output.token_ids]


@pytest.mark.parametrize("max_sequences", [1, 2, 8])
def test_each_is_the_same_request_alone_with_its_seed(model: Path, max_sequences: int) -> None:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, max_sequences=max_sequences) as engine:
        ids = engine.add_branches(PROMPT, 4, PARAMS)
        outputs = drive(engine)
        answers = [[token for output in outputs[each] for token in output.token_ids] for each in ids]
        assert answers == [answer(engine, seed) for seed in (2**64 - 2, 2**64 - 1, 0, 1)]  # modulo 2**64
        assert len({tuple(each) for each in answers}) == 4


def test_the_prompt_is_computed_once(engine: Engine) -> None:
    engine.add_branches(PROMPT, 4, PARAMS)
    drive(engine)
    last = 1  # of the prompt: each computes it, and all of its own answer but the last
    assert engine.scheduler.stats.computed_tokens == len(PROMPT) - last + 4 * (last + PARAMS.max_tokens - 1)


def test_without_a_seed_each_has_a_fresh_one(engine: Engine) -> None:
    ids = engine.add_branches(PROMPT, 3, dataclasses.replace(PARAMS, seed=None))
    outputs = drive(engine)
    assert len({tuple(output.token_ids for output in outputs[each]) for each in ids}) == 3


def test_one_is_aborted_and_the_others_go_on(engine: Engine) -> None:
    for index in range(3):
        ids = engine.add_branches(PROMPT, 3, PARAMS, salt=f"attempt {index}")
        engine.abort(ids[index])
        assert set(drive(engine)) == set(ids) - {ids[index]}


def test_what_cannot_be_queued_leaves_nothing_behind(engine: Engine) -> None:
    with pytest.raises(UsageError, match="at least once, not 0 times"):
        engine.add_branches(PROMPT, 0)
    with pytest.raises(RequestRefused, match="exceed the context"):
        engine.add_branches([5] * 600, 3)
    assert engine.idle


def test_more_than_may_wait_leave_nothing_behind(engine: Engine) -> None:
    most = engine.scheduler.config.max_waiting
    with pytest.raises(RequestRefused, match=f"{most} requests wait already"):
        engine.add_branches(PROMPT, most + 1, PARAMS)
    assert engine.idle
    assert engine.cache.pool.used == 0
    engine.add_branches(PROMPT, most, dataclasses.replace(PARAMS, max_tokens=1))  # as many as may

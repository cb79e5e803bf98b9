"""Priorities, clients, deadlines, a step's time and the swap space, through the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostcache.errors import RegionError, RequestFailed, RequestRefused, UsageError
from hostcache.request import FinishReason
from npu.engine import Engine
from npu.sampler import SamplingParams
from tests.npu.driving import drive
from tests.npu.tiny import TinyLlama, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", TinyLlama(tied_head=False))


def load(model: Path, **options: object) -> Engine:
    settings = {"pool_bytes": 1 << 20, "context_length": 200, "cache_dir": model.parent, **options}
    return Engine.load(model, **settings)  # type: ignore[arg-type] # options of any kind


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with load(model, max_sequences=1) as one:
        yield one


ENDLESS = SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_higher_priority_overtakes_and_every_answer_is_the_same(engine: Engine, model: Path) -> None:
    ids = [engine.add_request([5, 6, 7, number], ENDLESS) for number in (8, 9)]
    engine.step()
    urgent = engine.add_request([5, 6, 7, 10], ENDLESS, priority=1, client="console")
    engine.step()
    (running,) = engine.scheduler.running
    assert (running.id, running.account.name) == (urgent, "console")
    outputs = drive(engine)
    assert next(iter(outputs)) == urgent
    with load(model) as alone:
        for request, last in zip((*ids, urgent), (8, 9, 10), strict=True):
            wanted = alone.add_request([5, 6, 7, last], ENDLESS)
            expected = [token for output in drive(alone)[wanted] for token in output.token_ids]
            assert [token for output in outputs[request] for token in output.token_ids] == expected[
                -len(outputs[request]) :
            ]


def test_a_deadline_and_a_limit_of_waiting_fail_with_a_reason(engine: Engine) -> None:
    engine.add_request([5, 6], ENDLESS)
    engine.step()
    late = engine.add_request([5, 7], ENDLESS, deadline=time.monotonic() - 1)
    impatient = engine.add_request([5, 8], ENDLESS, max_queue_seconds=0)
    outputs = {output.request_id: output for output in engine.step()}
    for request, reason in ((late, "its deadline has passed"), (impatient, "it was not admitted in time")):
        assert outputs[request].finish_reason is FinishReason.FAILED
        assert isinstance(outputs[request].error, RequestFailed)
        assert reason in str(outputs[request].error)


def test_a_full_queue_refuses(engine: Engine) -> None:
    for _ in range(engine.scheduler.config.max_waiting):
        engine.add_request([5, 6], ENDLESS)
    with pytest.raises(RequestRefused, match="1024 requests wait already"):
        engine.add_request([5, 6], ENDLESS)


def test_what_steps_cost_is_learnt_and_prompts_keep_to_the_time(model: Path) -> None:
    with load(model, step_seconds=1e-9, prefill_chunk=64) as engine:
        engine.add_request([5, 6], ENDLESS)
        engine.step()
        assert engine.scheduler.cost.known
        engine.add_request(list(range(100)), ENDLESS)
        engine.step()
        prompt = engine.scheduler.running[1]
        assert prompt.computed == 16  # no time is left, so the smallest tile
        drive(engine)


def test_swapped_requests_answer_as_if_they_had_never_been(model: Path) -> None:
    """Two sequences whose KV does not fit together, without a swap space, with one in memory, and in a file."""
    prompts = [[5, 6, number] for number in (7, 8)]
    answers = []
    for swap_bytes, folder in ((0, None), (1 << 20, None), (1 << 20, model.parent)):
        with load(model, pool_bytes=1 << 14, swap_bytes=swap_bytes, swap_folder=folder) as engine:
            requests = [
                engine.add_request(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in prompts
            ]
            outputs = drive(engine)
            stats = engine.scheduler.stats
            assert stats.preemptions > 0
            assert (stats.swapped_out > 0) == (swap_bytes > 0)
            answers.append([[token for output in outputs[r] for token in output.token_ids] for r in requests])
    assert answers[0] == answers[1] == answers[2]
    assert [len(answer) for answer in answers[0]] == [60, 60]
    assert list(model.parent.glob("*tmp*")) == []  # the file has no name


def test_a_swap_space_that_holds_no_block_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="a swap space of 1 bytes does not hold one block"):
        load(model, swap_bytes=1)


def test_a_folder_to_swap_to_needs_a_size_and_must_be_there(model: Path) -> None:
    with pytest.raises(UsageError, match="nothing is swapped to /nowhere: give swap_bytes"):
        load(model, swap_folder="/nowhere")
    with pytest.raises(RegionError, match=r"cannot set 1\.0 MiB aside for swapping in /nowhere"):
        load(model, swap_bytes=1 << 20, swap_folder="/nowhere")


def test_a_time_of_a_step_must_be_positive(model: Path) -> None:
    with pytest.raises(UsageError, match="step_seconds must be positive and finite, got 0"):
        load(model, step_seconds=0.0)

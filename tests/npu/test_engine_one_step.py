"""What comes in the middle of a step, from a signal's handler, from a callback or from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import UsageError
from hostcache.request import FinishReason
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.step_guard import StepGuard
from tests.npu.driving import drive, text_of
from tests.npu.tiny import TinyLlama, write_tiny_llama

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent) as engine:
        yield engine


def within_the_next_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[object]:
    """Have something done in the middle of the next step, once; what it returned or raised."""
    attend, results = engine.runtime.attend, list[object]()

    def attend_and_act(layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        if not results:
            try:
                results.append(act())
            except UsageError as error:
                results.append(error)
        attend(layer, q, out)

    monkeypatch.setattr(engine.runtime, "attend", attend_and_act)
    return results


def in_another_thread(act: Callable[[], object]) -> object:
    """What `act` returns there, or the UsageError that it raises."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(act())
        except UsageError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same thread", "another thread"])
@pytest.mark.parametrize("work", ["step", "score", "generate"])
def test_a_second_step_is_refused_and_the_first_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, work: str, elsewhere: bool
) -> None:
    expected = "".join(engine.generate("rain", PARAMS))
    begin: Callable[[], object] = {
        "step": engine.step,
        "score": lambda: engine.score([5, 6, 7]),
        "generate": lambda: next(engine.generate("the inn", PARAMS)),
    }[work]
    act = (lambda: in_another_thread(begin)) if elsewhere else begin
    results = within_the_next_step(engine, monkeypatch, act)
    request = engine.add_request("rain", PARAMS)
    outputs = drive(engine)
    assert isinstance(results[0], UsageError)
    assert "a step is under way already" in str(results[0])
    assert text_of(outputs[request]) == expected
    assert list(outputs) == [request]  # the second one's request was ended with it


def test_a_step_within_a_score_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.score([5, 6, 7]).logprobs
    results = within_the_next_step(engine, monkeypatch, engine.step)
    assert np.array_equal(engine.score([5, 6, 7]).logprobs, expected)
    assert "a step is under way already" in str(results[0])


@pytest.mark.parametrize("work", ["step", "score"])
def test_an_abort_waits_for_the_end_and_a_close_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    request = engine.add_request("rain", PARAMS)
    engine.step()

    def abort_and_close() -> None:
        engine.abort(request)
        engine.abort(request)
        assert engine.cache.pool.used > 0  # not yet
        engine.close()

    results = within_the_next_step(engine, monkeypatch, abort_and_close)
    outputs = engine.step() if work == "step" else engine.score([5, 6, 7])
    assert "close came from within a step" in str(results[0])
    assert outputs if work == "score" else outputs == []
    assert engine.idle
    assert engine.cache.pool.used == 0


def test_a_request_may_come_within_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {prompt: "".join(engine.generate(prompt, PARAMS)) for prompt in ("rain", "the inn")}
    results = within_the_next_step(engine, monkeypatch, lambda: engine.add_request("the inn", PARAMS))
    request = engine.add_request("rain", PARAMS)
    outputs = drive(engine)
    (late,) = results
    assert isinstance(late, int)
    assert [text_of(outputs[one]) for one in (request, late)] == list(alone.values())


def test_a_step_that_fails_is_no_obstacle_to_the_next(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = engine.add_request("rain", PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "attend", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert drive(engine)[request][-1].finish_reason is FinishReason.LENGTH


def test_what_was_put_off_is_done_in_order_and_once_when_the_step_has_ended() -> None:
    guard, done = StepGuard(), list[tuple[str, bool]]()
    with guard.step():
        guard.put_off(lambda: done.append(("first", guard.busy)))
        guard.put_off(lambda: done.append(("second", guard.busy)))
        assert done == []
    assert done == [("first", False), ("second", False)]
    with guard.step():
        pass
    assert len(done) == 2


def test_what_was_put_off_is_done_after_a_step_that_failed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = engine.add_request("rain", PARAMS)

    def abort_and_fail(*_: object) -> None:
        engine.abort(request)
        raise ZeroDivisionError

    monkeypatch.setattr(engine.runtime, "attend", abort_and_fail)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.idle
    assert engine.cache.pool.used == 0


def test_a_context_beyond_the_models_is_refused_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a context of 513 is not within 1\.\.512"):
        Engine.load(model, context_length=513, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()

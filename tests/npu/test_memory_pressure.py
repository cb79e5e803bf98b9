"""An engine on a machine that others take memory from."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hostcache import FinishReason, PagedKVCache, PressureLadder, PressureLimits, PressureResponse, Scheduler
from hostcache.errors import RequestFailed, RequestRefused, UsageError
from hostcache.pressure_response import PressureStats
from npu import memory_pressure
from npu.engine import Engine
from npu.memory_pressure import respond_to_pressure
from npu.sampler import SamplingParams
from tests.hostcache.test_pressure_response import Machine
from tests.npu.tiny import TinyLlama, write_tiny_llama

BLOCK = 4096
"""2 layers, K and V, 2 heads of 16, 16 tokens, 2 bytes each."""

BLOCKS = 64
PROMPTS = ["in the rain " * 5, "on the hill", "the inn " * 20, "another" * 9]
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What engines live on: it has 100 blocks left, and is short of memory below 8."""
    machine = Machine(100 * BLOCK)

    def respond(cache: PagedKVCache, scheduler: Scheduler) -> PressureResponse:
        machine.balloon = cache.balloon()
        limits = PressureLimits(8 * BLOCK, 16 * BLOCK, settle_seconds=0.001, calm_seconds=0.001)
        watch: object = machine
        return PressureResponse(watch, PressureLadder(limits), machine.balloon, scheduler)  # type: ignore[arg-type] # it has what is needed

    monkeypatch.setattr("npu.engine.respond_to_pressure", respond)
    return machine


@pytest.fixture
def engine(model: Path, machine: Machine) -> Iterator[Engine]:
    with Engine.load(model, pool_bytes=BLOCKS * BLOCK, cache_dir=model.parent) as engine:
        yield engine


def stats_of(engine: Engine) -> PressureStats:
    assert engine.pressure is not None
    return engine.pressure.stats


def serve(engine: Engine, machine: Machine | None = None) -> list[list[int]]:
    """Tokens of each prompt; between the tenth step and the fortieth others take all memory."""
    numbers = {engine.add_request(prompt, GREEDY): number for number, prompt in enumerate(PROMPTS)}
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    steps = 0
    while not engine.idle:
        if machine is not None:
            machine.free = -100 * BLOCK if 10 <= steps < 40 else 100 * BLOCK
        steps += 1
        for output in engine.step():
            assert output.error is None
            tokens[numbers[output.request_id]] += output.token_ids
    return tokens


def test_whoever_was_shed_gets_the_tokens_it_gets_in_peace(engine: Engine, machine: Machine) -> None:
    peace = serve(engine)
    assert stats_of(engine) == PressureStats()
    engine.prefix.invalidate()
    assert serve(engine, machine) == peace
    assert [len(tokens) for tokens in peace] == [60] * 4
    stats = stats_of(engine)
    assert stats.shed == 3  # all but one
    assert stats.pauses == 1
    assert stats.taken_bytes == stats.given_bytes >= 48 * BLOCK
    assert engine.cache.pool.withheld == 0


def test_new_requests_are_refused_while_all_else_has_been_done(engine: Engine, machine: Machine) -> None:
    machine.free = -100 * BLOCK
    running = engine.generate("in the rain", GREEDY)
    for _ in range(5):
        next(running)
    with pytest.raises(RequestRefused, match="no new requests while memory is short"):
        engine.add_request("on the hill", GREEDY)
    machine.free = 100 * BLOCK
    assert len("".join(running)) > 0
    time.sleep(0.01)  # longer than all levels take; nobody steps meanwhile
    request = engine.add_request("on the hill", GREEDY)
    engine.abort(request)
    assert stats_of(engine).refused == 1


def test_a_request_that_is_left_without_memory_fails_and_the_engine_lives(engine: Engine, machine: Machine) -> None:
    machine.free = -34 * BLOCK  # 14 blocks are left for good: enough stays free then
    for _ in range(8):
        engine.step()
    with pytest.raises(RequestFailed, match=r"needs more blocks than memory is left for: 0\.\d MiB of the pool"):
        "".join(engine.generate("a " * 250, GREEDY))
    assert len("".join(engine.generate("in the rain", GREEDY))) > 0
    request = engine.add_request("on the hill", GREEDY)
    reasons = []
    while not engine.idle:
        reasons += [output.finish_reason for output in engine.step() if output.request_id == request]
    assert reasons[-1] is FinishReason.LENGTH


def test_an_idle_engine_gives_memory_back_while_it_waits(engine: Engine, machine: Machine) -> None:
    """Nobody steps: whoever waits for requests with `wait` need not think of memory."""
    machine.free = 4 * BLOCK  # short: 8 are to stay, 16 are well
    assert not engine.wait(0.01)
    assert stats_of(engine).given_bytes >= 12 * BLOCK
    machine.free = 100 * BLOCK
    time.sleep(0.01)  # longer than all levels take
    assert not engine.wait(0.01)
    assert engine.cache.pool.withheld == 0
    assert len("".join(engine.generate("in the rain", GREEDY))) > 0


@pytest.mark.parametrize("watched", [True, False])
def test_a_wait_ends_with_what_can_be_read(model: Path, watched: bool) -> None:
    ours, theirs = socket.socketpair()
    load = partial(Engine.load, model, pool_bytes=BLOCKS * BLOCK, cache_dir=model.parent)
    with load(watch_memory=watched) as engine, ours, theirs:
        started = time.monotonic()
        assert not engine.wait(0.3, ours)  # longer than one look
        assert time.monotonic() - started >= 0.3
        theirs.send(b"a request")
        assert engine.wait(3600, ours)
        assert engine.wait(3600, ours.fileno())
        engine.add_request("in the rain", GREEDY)
        assert engine.wait(3600, ours)
        ours.recv(100)
        assert not engine.wait(3600, ours)  # there is something to compute
        with pytest.raises(UsageError, match="nobody can wait for -1 seconds"):
            engine.wait(-1)
        with pytest.raises(UsageError, match="nobody can wait for nan seconds"):
            engine.wait(float("nan"))
    with pytest.raises(UsageError, match="this engine is closed"):
        engine.wait(0)


def test_a_timer_may_tend(engine: Engine, machine: Machine) -> None:
    machine.free = 4 * BLOCK
    engine.tend()
    assert stats_of(engine).given_bytes >= 12 * BLOCK


def listening() -> int:
    """Files of the kernel's that this process hears of pressure by."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return sum(link.endswith(("/memory.pressure", "/pressure/memory", "/memory.events")) for link in links)


def test_a_loaded_engine_watches_unless_told_otherwise(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = partial(Engine.load, model, pool_bytes=BLOCKS * BLOCK, cache_dir=model.parent)
    assert listening() == 0
    with load() as engine:
        assert engine.pressure is not None
        assert engine.pressure.watch.describe().endswith("what is left is looked at every 0.25 s")
        assert engine.pool_choice is not None
        assert engine.pool_choice.reason == "as asked for"
        assert listening() == len(engine.pressure.watch.sources)
        engine.step()
    assert listening() == 0
    with load(watch_memory=False) as engine:
        assert engine.pressure is None
        assert len("".join(engine.generate("in the rain", GREEDY))) > 0
    monkeypatch.setattr(memory_pressure, "scarcest_budget", lambda: None)
    with load() as engine:
        assert respond_to_pressure(engine.cache, engine.scheduler) is None
        assert engine.pressure is None

"""A real scheduler over real pages, on a machine that others take memory from."""

from __future__ import annotations

import select
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache import (
    FinishReason,
    KVGeometry,
    Namespace,
    PagedKVCache,
    PrefixCache,
    Request,
    RequestState,
    Scheduler,
    SchedulerConfig,
)
from hostcache.balloon import Balloon
from hostcache.errors import RequestFailed, RequestRefused
from hostcache.pressure import PressureLadder, PressureLevel, PressureLimits, PressureReading
from hostcache.pressure_response import PressureResponse

GEOMETRY = KVGeometry(layers=8, kv_heads=2, head_dim=32, block_tokens=4)
BLOCK = 8192  # bytes: 8 layers, K and V, 2 heads of 32, 4 tokens, 2 bytes each; two pages
BLOCKS = 32
LIMITS = PressureLimits(low_bytes=8 * BLOCK, high_bytes=16 * BLOCK, settle_seconds=1, calm_seconds=5)


class Machine:
    """Stands in for the watch: what the balloon gives back can be had by others."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.balloon: Balloon | None = None
        self.stalled = ""
        self.waited: list[float] = []

    def read(self, _now: float) -> PressureReading:
        assert self.balloon is not None
        return PressureReading(max(0, self.free + self.balloon.given_bytes), stalled=self.stalled)

    def wait(self, seconds: float, readable: Sequence[int] = ()) -> bool:
        self.waited.append(seconds)
        return bool(select.select(readable, [], [], min(seconds, 0.002))[0])

    def close(self) -> None:
        pass


class Bench:
    """A pool of 32 blocks of 4 tokens, and a clock that moves when told to."""

    def __init__(self, blocks: int = BLOCKS, max_sequences: int = 8) -> None:
        self.now = 100.0
        self.cache = PagedKVCache.create(GEOMETRY, blocks * BLOCK)
        self.pool = self.cache.pool
        self.prefix = PrefixCache(self.pool)
        config = SchedulerConfig(context_length=4 * blocks, max_rows=64, max_sequences=max_sequences)
        self.scheduler = Scheduler(self.cache, self.prefix, config, clock=lambda: self.now)
        self.balloon = self.cache.balloon()
        self.machine = Machine(100 * BLOCK)
        self.machine.balloon = self.balloon
        self.response = PressureResponse(
            self.machine,  # type: ignore[arg-type] # it has what is needed
            PressureLadder(LIMITS),
            self.balloon,
            self.scheduler,
            lambda: self.now,
        )
        self.submitted = 0

    def submit(self, length: int, max_tokens: int, priority: int = 0) -> Request:
        self.submitted += 1
        prompt = np.arange(length) + 1000 * self.submitted  # nothing to share
        return self.scheduler.submit(prompt, Namespace("model"), max_tokens, priority=priority)

    def step(self, seconds: float = 0.0) -> None:
        """As the engine does it."""
        self.now += seconds
        self.response.tend()
        plan = self.scheduler.schedule()
        if plan.rows:
            self.scheduler.commit(plan, [7] * len(plan.logit_rows), [False] * len(plan.logit_rows))
        self.response.after_schedule(plan.rows)
        self.pool.check()
        self.prefix.check()

    @property
    def level(self) -> str:
        return self.response.ladder.level.name

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running


def test_everything_happens_in_order_and_no_more_than_must() -> None:
    bench = Bench(blocks=64)
    important, ordinary, newest = (bench.submit(12, 80, priority) for priority in (1, 0, 0))
    bench.step()
    waiting = bench.submit(220, 4)  # 55 blocks: it does not fit beside the three
    bench.step()
    # Each has sampled two tokens behind its twelve, the second not computed yet: 4 blocks.
    assert (bench.pool.used, bench.pool.free) == (12, 52)
    bench.machine.free = -100 * BLOCK  # whatever is given back, others have taken it already
    bench.step()
    assert bench.level == "GIVE_BACK"
    assert bench.balloon.given_bytes == bench.response.stats.given_bytes == 16 * BLOCK
    assert bench.pool.withheld == 16
    assert bench.response.stats.pauses == 0
    assert len(bench.running) == 3
    bench.step()
    assert bench.level == "PAUSE"  # at once, for nothing at all is left
    assert bench.scheduler.pause_reason == "this machine has 0.0 MiB left, and 0.1 MiB are to stay"
    assert bench.pool.withheld == 32
    assert len(bench.running) == 3
    bench.step()
    assert bench.level == "SHED"
    assert newest.state is RequestState.PREEMPTED
    assert bench.running == [important, ordinary]
    bench.step()
    assert bench.level == "REFUSE"
    assert bench.running == [important]
    with pytest.raises(RequestRefused, match=r"no new requests while memory is short \(this machine has .* in 5 sec"):
        bench.response.check_admissible()
    for _ in range(4):
        bench.step(1)
    assert bench.running == [important]  # one always goes on, in an eighth of the pool
    assert (bench.pool.withheld, important.length) == (56, 12 + 10)
    stats = bench.response.stats
    assert (stats.pauses, stats.shed, stats.refused, stats.failed) == (1, 2, 1, 0)
    assert {request.state for request in (ordinary, newest)} == {RequestState.PREEMPTED}
    assert waiting.state is RequestState.WAITING


def test_only_the_last_level_refuses() -> None:
    bench = Bench()
    for level in PressureLevel:
        bench.response.ladder.level = level
        bench.response.ladder._descends = bench.now + 1
        if level is not PressureLevel.REFUSE:
            bench.response.check_admissible()
    with pytest.raises(RequestRefused):
        bench.response.check_admissible()
    bench.now += 1  # nobody has looked since, and memory is not short any more
    bench.response.check_admissible()


def test_when_it_is_over_all_is_undone_and_everybody_finishes() -> None:
    bench = Bench()
    requests = [bench.submit(12, 40) for _ in range(3)]
    bench.step()
    bench.machine.free = -30 * BLOCK
    for _ in range(4):
        bench.step()
    assert bench.level == "REFUSE"
    assert len(bench.running) == 1
    bench.machine.free = 100 * BLOCK
    bench.step(5)
    assert (bench.level, len(bench.running)) == ("SHED", 1)
    given = bench.balloon.given_bytes
    bench.step(10)
    assert (bench.level, bench.scheduler.pause_reason) == ("GIVE_BACK", "")
    assert bench.balloon.given_bytes == given  # nothing is taken before it is calm
    bench.step(5)
    assert bench.level == "CALM"
    assert (bench.balloon.given_bytes, bench.pool.withheld) == (0, 0)
    assert bench.response.stats.taken_bytes == bench.response.stats.given_bytes
    for _ in range(200):
        bench.step(0.1)
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 3
    assert {request.length for request in requests} == {52}


def test_no_more_is_taken_again_than_leaves_enough() -> None:
    bench = Bench()
    bench.machine.free = 0
    bench.step()
    assert bench.balloon.given_bytes == 16 * BLOCK
    bench.machine.free = 4 * BLOCK  # 20 with what was lent
    bench.step(5)
    assert bench.level == "CALM"
    assert bench.balloon.given_bytes == 12 * BLOCK  # which leaves 16
    bench.machine.free = 3 * BLOCK
    for _ in range(20):
        bench.step(5)  # 15 are left: that is not short, and there is none to take
    assert (bench.level, bench.balloon.given_bytes) == ("CALM", 12 * BLOCK)


def test_stalls_take_a_slice_each_though_much_is_left() -> None:
    bench = Bench()
    bench.machine.stalled = "tasks waited"
    bench.step()
    assert bench.balloon.given_bytes == LIMITS.low_bytes
    bench.step()
    assert bench.balloon.given_bytes == 2 * LIMITS.low_bytes
    assert bench.level == "GIVE_BACK"
    bench.machine.stalled = ""
    bench.step(5)
    assert bench.balloon.given_bytes == 0


def test_while_paused_those_that_wait_go_one_at_a_time() -> None:
    bench = Bench()
    bench.machine.stalled = "tasks waited"  # and goes on to
    for _ in range(3):
        bench.step(1)
    requests = [bench.submit(4, 2) for _ in range(3)]
    most = 0
    for _ in range(20):
        bench.step(0.1)
        most = max(most, len(bench.running))
    assert (bench.level, most) == ("REFUSE", 1)
    assert (bench.pool.withheld, bench.pool.total) == (28, 32)  # an eighth stays, however long tasks stall
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 3


def test_a_request_that_waits_for_withheld_blocks_gets_them_when_they_return() -> None:
    bench = Bench()
    bench.machine.free = -20 * BLOCK
    bench.step()
    request = bench.submit(100, 4)  # 25 blocks, of which 16 are withheld
    for _ in range(3):
        bench.step(0.1)
    assert request.state is RequestState.WAITING
    assert bench.machine.waited == [0.05] * 3  # nobody spins meanwhile
    bench.machine.free = 100 * BLOCK
    for _ in range(30):
        bench.step(1)
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_for_which_no_memory_is_left_fails_with_the_numbers() -> None:
    bench = Bench()
    bench.machine.free = -20 * BLOCK
    bench.step()
    small, large = bench.submit(8, 2), bench.submit(100, 4)
    bench.machine.free = -8 * BLOCK  # 8 with what was lent: another 8 go, and then enough is left
    for _ in range(30):
        bench.step(1)
    assert small.finish_reason is FinishReason.LENGTH
    assert large.finish_reason is FinishReason.FAILED
    assert isinstance(large.error, RequestFailed)
    assert "needs more blocks than memory is left for: 0.2 MiB of the pool were given back" in str(large.error)
    assert large.error.values == {"id": large.id, "given_bytes": 24 * BLOCK}
    assert bench.response.stats.failed == 1
    assert bench.scheduler.idle


def test_a_request_does_not_wait_for_ever_while_memory_stays_short() -> None:
    bench = Bench()
    bench.machine.free = -100 * BLOCK
    for _ in range(3):
        bench.step()
    request = bench.submit(100, 4)
    for _ in range(31):
        assert not request.finished
        bench.step(1)
    assert request.finish_reason is FinishReason.FAILED
    other = bench.submit(16, 1)  # what fits into what is left is served all the same
    bench.step()
    assert other.finish_reason is FinishReason.LENGTH


def test_the_last_that_runs_waits_for_withheld_blocks_instead_of_failing() -> None:
    bench = Bench(blocks=8)
    request = bench.submit(12, 20)
    bench.step()
    bench.machine.free = -100 * BLOCK
    for _ in range(12):
        bench.step(0.01)
    assert bench.pool.withheld > 0
    assert not request.finished
    bench.machine.free = 100 * BLOCK
    for _ in range(60):
        bench.step(1)
    assert (request.finish_reason, request.length) == (FinishReason.LENGTH, 32)


events = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 60)),
    st.tuples(st.just("memory"), st.integers(-40, 60)),
    st.tuples(st.just("stall"), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.sampled_from([0.0, 0.1, 1.0, 6.0])),
)


@given(st.lists(events, max_size=50), st.booleans())
@settings(max_examples=80, deadline=None)
def test_whatever_the_machine_does_every_request_ends_and_every_block_returns(
    happenings: list[tuple[str, int]], recovers: bool
) -> None:
    bench = Bench(max_sequences=3)
    requests = []
    for what, value in happenings:
        if what == "submit":
            requests.append(bench.submit(value, 8))
        elif what == "memory":
            bench.machine.free = value * BLOCK
        elif what == "stall":
            bench.machine.stalled = "tasks waited" if value else ""
        elif what == "abort" and value < len(requests):
            bench.scheduler.end(requests[value], FinishReason.ABORTED)
        else:
            bench.step(value)
        assert bench.balloon.given_bytes == bench.pool.withheld * BLOCK
    bench.machine.stalled = ""
    unfinished = [request for request in requests if not request.finished]
    if recovers:
        bench.machine.free = 100 * BLOCK
    for _ in range(3000):
        if bench.scheduler.idle:
            break
        bench.step(0.5)
    assert all(request.finished for request in requests)
    if recovers:  # whoever lived to see it
        assert all(request.finish_reason is FinishReason.LENGTH for request in unfinished)
    bench.machine.free = 100 * BLOCK
    for _ in range(6):
        bench.step(5)
    assert bench.pool.free + bench.pool.cached == BLOCKS
    bench.cache.close()

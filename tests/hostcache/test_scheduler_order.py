"""Who goes first, for how long others wait, and what becomes of those that wait too long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hostcache import FinishReason, Request, RequestState, SchedulerConfig
from hostcache.errors import RequestFailed, RequestRefused, UsageError
from hostcache.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from tests.hostcache.bench import HOME, Bench, chunks


@pytest.mark.parametrize(
    "terms",
    [
        {"priority": float("nan")},
        {"priority": "high"},
        {"priority": 1.5},
        {"client": None},
        {"client": ["a"]},
        {"deadline": float("nan")},
        {"deadline": "soon"},
        {"max_queue_seconds": float("nan")},
        {"window": 24},
    ],
)
def test_what_has_no_order_is_refused_before_it_is_in_the_way_of_others(terms: dict[str, Any]) -> None:
    bench = Bench()
    with pytest.raises(UsageError, match=f"{next(iter(terms))} is .*; it must be"):
        bench.submit(4, **terms)
    assert bench.scheduler.idle
    other = bench.submit(4, max_tokens=2, priority=np.int64(2))
    bench.run()
    assert other.finish_reason is FinishReason.LENGTH


def test_a_higher_priority_does_not_wait_for_a_place() -> None:
    bench = Bench(max_sequences=1)
    low = bench.submit(6)
    bench.step()
    high = bench.submit(4, max_tokens=2, start=100, priority=1)
    assert chunks(bench.step()) == [(high.id, 0, 4, True)]
    assert (low.state, high.state) == (RequestState.PREEMPTED, RequestState.RUNNING)
    bench.step()
    assert chunks(bench.step()) == [(low.id, 4, 3, True)]  # its full block was still cached


def test_a_higher_priority_does_not_wait_for_blocks() -> None:
    bench = Bench(blocks=5)
    low = bench.submit(12)
    bench.step()
    high = bench.submit(12, start=100, priority=1)
    assert chunks(bench.step()) == [(high.id, 0, 12, True)]
    assert low.state is RequestState.PREEMPTED


def test_only_as_many_give_way_as_are_needed_the_newest_first() -> None:
    bench = Bench(blocks=7)
    old, new = bench.submit(8), bench.submit(8, start=100)
    bench.step()
    bench.submit(12, start=200, priority=1)  # three blocks and the watermark; three are free, two more behind either
    bench.step()
    assert (old.preemptions, new.preemptions) == (0, 1)


def test_nobody_gives_way_if_that_would_not_be_enough() -> None:
    bench = Bench(blocks=8)
    high, low = bench.submit(8, priority=2), bench.submit(8, start=100)
    bench.step()
    bench.submit(24, start=200, priority=1)  # six blocks; only the low one's two could come free beside two free ones
    bench.step()
    assert (high.preemptions, low.preemptions) == (0, 0)


def test_nobody_gives_way_in_vain_beside_one_that_keeps_its_blocks() -> None:
    bench = Bench(blocks=12, max_preemptions=1)
    other, keeps = bench.submit(4), bench.submit(4, max_tokens=20, start=100)
    bench.step()
    assert bench.scheduler.shed_lowest() is keeps
    bench.step()
    bench.submit(40, start=200, priority=1)  # ten blocks: all but the two that the other one gives
    bench.step()
    assert keeps.state is RequestState.RUNNING
    assert other.preemptions == 0


def test_an_equal_priority_waits_its_turn() -> None:
    bench = Bench(max_sequences=1)
    first = bench.submit(4, max_tokens=3)
    bench.step()
    second = bench.submit(4, start=100)
    bench.step()
    assert (first.preemptions, second.state) == (0, RequestState.WAITING)


def test_age_brings_a_request_to_the_front_but_takes_nothing_from_others() -> None:
    bench = Bench(max_sequences=1, ageing_seconds=10)
    running = bench.submit(4, priority=1, max_tokens=3)
    bench.step()
    aged = bench.submit(4, start=100)
    bench.now = 35
    newcomer = bench.submit(4, start=200, priority=2)
    bench.step()
    assert (aged.level, running.preemptions) == (3, 0)
    while not running.finished:
        bench.step()
    bench.step()
    assert (aged.state, newcomer.state) == (RequestState.RUNNING, RequestState.WAITING)


def test_whoever_ran_with_age_is_not_preempted_by_what_it_aged_above() -> None:
    bench = Bench(max_sequences=1, ageing_seconds=10)
    aged = bench.submit(4)
    bench.now = 20
    bench.step()
    bench.submit(4, start=100, priority=2)
    bench.step()
    assert (aged.level, aged.preemptions) == (2, 0)


def test_age_takes_no_blocks_from_its_own_priority() -> None:
    """Three blocks are missing; two would come free below it, and more from one of its priority, which is younger."""
    bench = Bench(blocks=9, ageing_seconds=10)
    equal, low = bench.submit(12, priority=2), bench.submit(8, start=100, priority=1)
    bench.step()
    aged = bench.submit(24, start=200, priority=2)
    bench.now = 10
    bench.step()
    assert (aged.level, equal.preemptions, low.preemptions) == (3, 0, 0)


def test_age_protects_while_a_request_runs() -> None:
    """As before, but the one that is spared has reached the other's priority by waiting."""
    bench = Bench(blocks=9, ageing_seconds=10)
    aged = bench.submit(12)
    bench.now = 20
    low = bench.submit(8, start=100)
    bench.step()
    bench.submit(24, start=200, priority=2)
    bench.step()
    assert (aged.level, aged.preemptions, low.preemptions) == (2, 0, 0)


def test_a_preempted_request_is_admitted_before_newcomers_of_its_priority() -> None:
    bench = Bench(blocks=7, max_skips=0)
    bench.submit(10, max_tokens=9)
    second = bench.submit(10, start=100)
    bench.step()
    newcomer = bench.submit(1, start=200)
    while not second.preemptions:
        bench.step()
    while second.state is not RequestState.RUNNING:
        assert newcomer.state is RequestState.WAITING
        bench.step()


def test_under_a_flood_of_higher_priorities_every_request_is_served_within_the_ageing_bound() -> None:
    """What comes later than (1 + difference) ageing times after it never goes before it.

    So what is ahead of it is bounded, and it has finished when that much has been served.
    """
    bench = Bench(blocks=40, max_sequences=4, max_rows=8, prefill_chunk=4, ageing_seconds=1.0)
    low = [bench.submit(8, max_tokens=8, start=1000 * n, priority=-n) for n in range(3)]
    submitted: dict[Request, float] = {}
    while not all(request.finished for request in low):
        for _ in range(3):  # a step serves less: the backlog grows without end
            submitted[bench.submit(2, max_tokens=2, start=2 * len(submitted), priority=3)] = bench.now
        waiting = [request for request in low if request.state is RequestState.WAITING]
        bench.step()
        for request in waiting:
            newest = max(at for flood, at in submitted.items() if flood.state is not RequestState.WAITING)
            assert newest <= 1 + 3 - request.priority
        bench.now += 0.1
        for request in low:
            # A step has 8 rows and three new requests with 3 each, so what came within the bound takes 9/8 of its time.
            # The low ones' own 15 rows take two steps each, and the last of them runs for ten.
            assert request.finished or bench.now <= 9 / 8 * (1 + 3 - request.priority) + 0.1 * (3 * 2 + 10)
    assert len(bench.scheduler.waiting) > 50
    assert [request.preemptions for request in low] == [1, 0, 0]  # the first began while there was room: too early


@pytest.mark.parametrize("backlog_age", [0.0, 1000.0])
def test_a_client_that_floods_gets_no_more_than_its_share(backlog_age: float) -> None:
    """While both have requests waiting, what they were served differs by no more than one admission each way.

    However long the flood has waited: it is the flood that made it wait.
    """
    bench = Bench(blocks=40, max_sequences=3, ageing_seconds=1.0)
    for n in range(60):
        bench.submit(6, max_tokens=4, start=10 * n, client="flood")
    bench.step()
    bench.now += backlog_age
    others = [bench.submit(6, max_tokens=4, start=5000 + 10 * n, client="other") for n in range(12)]
    accounts = {request.account.name: request.account for request in bench.scheduler.waiting}
    started = {name: account.counter for name, account in accounts.items()}
    largest = 3 * (6 * PROMPT_WEIGHT + 4 * OUTPUT_WEIGHT)  # three places, each with what a request may cost
    while any(request.state is RequestState.WAITING for request in others):
        bench.step()
        served = {name: account.counter - started[name] for name, account in accounts.items()}
        assert abs(served["flood"] - served["other"]) <= largest
    assert sum(request.finished for request in others) >= 9


def test_weights_are_shares() -> None:
    bench = Bench(blocks=60, max_sequences=2, client_weights={"large": 3.0})
    clients = {}
    for n in range(40):
        for client in ("large", "small"):
            clients[client] = bench.submit(4, max_tokens=4, start=100 * n, client=client).account
    for _ in range(60):
        bench.step()
    had = {name: account.counter * account.weight for name, account in clients.items()}
    assert 2.5 < had["large"] / had["small"] < 3.5


def test_computing_again_is_not_charged_to_the_client() -> None:
    bench = Bench(blocks=5)
    low = bench.submit(12, max_tokens=2, client="low")
    bench.step()
    charged = low.account.counter
    assert charged == 12 * PROMPT_WEIGHT + OUTPUT_WEIGHT
    bench.submit(12, start=100, priority=1, max_tokens=1)
    bench.step()
    bench.prefix.invalidate()  # nothing of it is left
    bench.run()
    assert low.preemptions == 1
    assert low.account.counter == charged + OUTPUT_WEIGHT


def test_a_full_queue_refuses_and_says_how_many_wait() -> None:
    bench = Bench(max_waiting=3)
    for n in range(3):
        bench.submit(4, start=10 * n)
    with pytest.raises(RequestRefused, match="3 requests wait already, and no more than 3 may: try again later"):
        bench.submit(4)
    assert bench.scheduler.stats.refused == 1
    bench.step()
    bench.submit(4)


def test_a_client_that_floods_leaves_places_to_others() -> None:
    """Of 18 places, 8 for each that is free: 16 beside 2."""
    bench = Bench(max_waiting=18, max_sequences=1)
    for n in range(16):
        bench.submit(4, start=10 * n, client="flood")
    with pytest.raises(
        RequestRefused, match="16 requests of client 'flood' wait already; the 2 free places of 18 are for"
    ):
        bench.submit(4, client="flood")
    bench.submit(4, client="other")
    bench.submit(4, client="other")
    with pytest.raises(RequestRefused, match="18 requests wait already, and no more than 18 may"):
        bench.submit(4, client="third")
    assert bench.scheduler.stats.refused == 2


def test_answers_that_wait_for_their_prompt_are_places_that_their_client_holds() -> None:
    bench = Bench(max_waiting=9, max_sequences=2)
    leader = bench.submit(40, max_tokens=1, client="flood")
    branches = [bench.scheduler.branch(leader) for _ in range(7)]
    with pytest.raises(RequestRefused, match="8 requests of client 'flood'"):
        bench.scheduler.branch(leader)
    bench.scheduler.end(branches[0], FinishReason.ABORTED)
    bench.scheduler.branch(leader)
    bench.run()
    for n in range(8):  # nothing of them is left in the books
        bench.submit(4, start=100 * n, client="flood")
    with pytest.raises(RequestRefused, match="8 requests of client 'flood'"):
        bench.submit(4, client="flood")


def test_who_gives_no_name_has_the_whole_queue() -> None:
    bench = Bench(max_waiting=18)
    for n in range(18):
        bench.submit(4, start=10 * n)
    with pytest.raises(RequestRefused, match="18 requests wait already"):
        bench.submit(4)


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    bench = Bench(max_sequences=1)
    running = bench.submit(4, deadline=5.0)
    waiting = bench.submit(4, start=100, deadline=5.0)
    bench.step()
    child_of_it = bench.submit(4, start=200)
    bench.now = 4.9
    bench.step()
    assert not running.finished
    bench.now = 5.0
    bench.step()
    for request in (running, waiting):
        assert request.finish_reason is FinishReason.FAILED
        assert isinstance(request.error, RequestFailed)
        assert "its deadline has passed" in str(request.error)
    assert child_of_it.state is RequestState.RUNNING
    assert bench.scheduler.stats.expired == 2


def test_a_fork_has_its_parents_deadline() -> None:
    bench = Bench()
    parent = bench.submit(4, deadline=5.0)
    bench.step()
    child = bench.scheduler.fork(parent)
    bench.now = 5.0
    bench.step()
    assert (parent.finish_reason, child.finish_reason) == (FinishReason.FAILED, FinishReason.FAILED)
    assert bench.pool.used == 0


def test_queue_time_is_limited_until_the_first_admission_only() -> None:
    bench = Bench(max_sequences=1)
    first = bench.submit(6, max_queue_seconds=3)
    bench.now = 1.0
    late = bench.submit(4, start=100, max_queue_seconds=3)
    bench.step()
    bench.submit(4, max_tokens=1, start=200, priority=1)
    bench.step()  # the first one gives way, and waits again
    bench.now = 3.9
    bench.step()
    assert not late.finished
    bench.now = 4.0
    bench.step()
    assert (first.finished, late.finish_reason) == (False, FinishReason.FAILED)
    assert "it was not admitted in time; it is waiting with 0 tokens generated" in str(late.error)


def test_a_few_pass_one_that_does_not_fit_and_then_no_more() -> None:
    bench = Bench(blocks=8, max_skips=2)
    bench.submit(9, max_tokens=20)
    bench.step()
    large = bench.submit(20, start=100)  # five blocks, of which the watermark leaves four
    small = [bench.submit(2, max_tokens=1, start=200 + 10 * n) for n in range(4)]
    for _ in range(5):
        bench.step()
    assert [request.finished for request in small] == [True, True, False, False]
    assert (large.state, large.skips) == (RequestState.WAITING, 2)


def test_the_same_calls_at_the_same_times_give_the_same_plans() -> None:
    def run() -> list[list[tuple[int, int, int, bool]]]:
        bench = Bench(blocks=9, max_sequences=3, prefill_chunk=3, swap_blocks=4, ageing_seconds=2.0)
        random = np.random.default_rng(5)
        plans = []
        for _ in range(300):
            if random.random() < 0.4:
                prompt = random.integers(0, 2, random.integers(1, 14))
                client, priority = str(random.integers(3)), int(random.integers(3))
                bench.scheduler.submit(prompt, HOME, int(random.integers(1, 9)), client=client, priority=priority)
            plans.append(chunks(bench.step(seconds=0.01)))
            bench.now += 0.25
        return plans

    first = run()
    assert first == run()
    assert sum(map(len, first)) > 300


@pytest.mark.parametrize("field", ["step_seconds", "ageing_seconds"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_times_are_positive(field: str, wrong: float) -> None:
    with pytest.raises(UsageError, match=f"{field} must be positive and finite"):
        SchedulerConfig(**{"context_length": 8, field: wrong})  # type: ignore[arg-type] # the field's name varies


@pytest.mark.parametrize("field", ["max_skips", "max_preemptions", "max_dedup_steps"])
def test_bounds_are_not_negative(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} must not be negative, got -1"):
        SchedulerConfig(**{"context_length": 8, field: -1})  # type: ignore[arg-type] # the field's name varies


def test_weights_are_positive() -> None:
    with pytest.raises(UsageError, match="the weight of client 'x' must be positive and finite, got 0"):
        SchedulerConfig(context_length=8, client_weights={"x": 0.0})

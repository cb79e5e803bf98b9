"""Several answers to one prompt: computed once, forked in front of its last token."""

from __future__ import annotations

import pytest

from hostcache import FinishReason, Request, RequestState
from hostcache.errors import RequestRefused, UsageError
from tests.hostcache.bench import Bench, chunks


def branched(bench: Bench, length: int, count: int, max_tokens: int = 5) -> list[Request]:
    leader = bench.submit(length, max_tokens)
    return [leader, *(bench.scheduler.branch(leader) for _ in range(count - 1))]


def test_a_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    bench = Bench(blocks=40)
    first, second, third = branched(bench, 10, 3)
    assert chunks(bench.step()) == [(first.id, 0, 9, False)]  # all but the last token, which each computes for itself
    assert chunks(bench.step()) == [(first.id, 9, 1, True)]
    assert first.table.blocks[:2] == second.table.blocks[:2] == third.table.blocks[:2]
    assert first.table.blocks[2] != second.table.blocks[2] == third.table.blocks[2]  # copied by the first that wrote
    plan = bench.step()
    assert chunks(plan) == [(first.id, 10, 1, True), (second.id, 9, 1, True), (third.id, 9, 1, True)]
    assert plan.tokens.tolist() == [7, 9, 9]  # the first one's answer, and the prompt's last token
    bench.run()
    assert [request.output.tolist() for request in (first, second, third)] == [[7] * 5] * 3
    assert bench.scheduler.stats.computed_tokens == 9 + 3 * 5  # the last token of an answer is never computed


def test_a_prompt_of_one_token_is_shared_by_having_nothing_to_share() -> None:
    bench = Bench()
    requests = branched(bench, 1, 3)
    assert chunks(bench.step()) == [(requests[0].id, 0, 1, True)]
    bench.run()
    assert [request.output.tolist() for request in requests] == [[7] * 5] * 3


def test_a_prompt_that_the_cache_has_is_branched_in_the_step_that_admits_it() -> None:
    bench = Bench(blocks=40)
    bench.submit(9, max_tokens=1)
    bench.run()
    requests = branched(bench, 9, 2)
    assert chunks(bench.step()) == [(requests[0].id, 8, 1, True)]
    assert requests[1].state is RequestState.RUNNING
    bench.run()
    assert bench.scheduler.stats.computed_tokens == 9 + 2 * 5


def test_branches_beyond_max_sequences_wait_their_turn() -> None:
    bench = Bench(blocks=40, max_sequences=2)
    requests = branched(bench, 9, 3)
    bench.step()
    bench.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2 + [RequestState.WAITING]
    bench.run()
    assert [len(request.output) for request in requests] == [5] * 3
    assert bench.scheduler.stats.computed_tokens == 8 + 3 * 5  # its hit is both full blocks


@pytest.mark.parametrize("steps", [0, 1])
def test_when_the_leader_is_aborted_another_one_leads(steps: int) -> None:
    bench = Bench(blocks=40, prefill_chunk=4)
    leader, *others = branched(bench, 12, 3)
    for _ in range(steps):
        bench.step()
    bench.scheduler.end(leader, FinishReason.ABORTED)
    assert [request.leader for request in others] == [None, others[0]]
    bench.run()
    assert [len(request.output) for request in others] == [5, 5]
    assert bench.scheduler.stats.computed_tokens == 11 + 2 * 5  # what the first had computed is a hit
    assert bench.pool.used == 0


def test_a_branch_may_be_aborted_before_it_is_forked_off() -> None:
    bench = Bench(blocks=40, prefill_chunk=4)
    leader, other = branched(bench, 12, 2)
    bench.step()
    bench.scheduler.end(other, FinishReason.ABORTED)
    bench.run()
    assert (len(leader.output), len(other.output)) == (5, 0)
    assert bench.scheduler.stats.finished == 2


def test_branches_share_their_leaders_deadline() -> None:
    bench = Bench(blocks=40)
    leader = bench.submit(10, deadline=1.0)
    other = bench.scheduler.branch(leader)
    bench.now = 2.0
    bench.step()
    assert [request.finish_reason for request in (leader, other)] == [FinishReason.FAILED] * 2
    assert bench.scheduler.idle


def test_only_a_request_that_has_not_begun_is_branched() -> None:
    bench = Bench()
    leader, other = branched(bench, 6, 2)
    with pytest.raises(UsageError, match="request 2 cannot be branched"):
        bench.scheduler.branch(other)
    bench.step()
    with pytest.raises(UsageError, match="request 1 cannot be branched"):
        bench.scheduler.branch(leader)


def test_branches_count_among_those_that_wait() -> None:
    bench = Bench(blocks=40, max_waiting=4, max_sequences=2)
    leader, *branches = branched(bench, 10, 3)
    other = bench.submit(4, start=100)
    with pytest.raises(RequestRefused, match="4 requests wait already, and no more than 4 may"):
        bench.scheduler.branch(leader)
    with pytest.raises(RequestRefused, match="4 requests wait already, and no more than 4 may"):
        bench.submit(4, start=200)
    bench.scheduler.end(branches[0], FinishReason.ABORTED)
    bench.scheduler.branch(leader)  # in its place
    bench.scheduler.end(leader, FinishReason.ABORTED)  # a branch waits in the queue now, and one waits for it
    bench.submit(4, start=200)
    with pytest.raises(RequestRefused):
        bench.submit(4, start=300)
    bench.run()
    assert other.finished
    for _ in range(4):
        bench.submit(4)


def test_a_fork_that_would_wait_is_refused_where_too_many_do() -> None:
    bench = Bench(blocks=40, max_waiting=1, max_sequences=2)
    running = bench.submit(4, max_tokens=9)
    bench.step()
    bench.scheduler.fork(running)  # has a place
    bench.submit(4, start=100)
    with pytest.raises(RequestRefused, match="1 requests wait already"):
        bench.scheduler.fork(running)

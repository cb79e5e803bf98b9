"""Sequences that go on from where another stands, and the blocks they share with it."""

from __future__ import annotations

import pytest

from hostcache import FinishReason, RequestState
from hostcache.errors import UsageError
from tests.hostcache.bench import Bench, chunks


def test_nobody_is_preempted_for_blocks_that_would_not_come_free() -> None:
    bench = Bench(blocks=4)
    parent = bench.submit(13, max_tokens=20)
    bench.step()
    child = bench.scheduler.fork(parent)
    bench.step()
    bench.run()
    assert parent.finished
    assert child.finished
    assert {parent.finish_reason, child.finish_reason} == {FinishReason.FAILED}  # 4 blocks hold 16 tokens of one
    assert len(parent.output) >= 3


def test_one_whose_blocks_are_shared_is_not_preempted_in_place_of_one_whose_end_helps() -> None:
    bench = Bench(blocks=7)
    bench.submit(6)
    bench.step()
    parent = bench.submit(5, start=100)
    bench.step()
    alone = bench.submit(5, start=200)
    bench.step()
    child = bench.scheduler.fork(parent)
    assert bench.pool.free == 1
    bench.step()  # the first takes that block; the parent needs one, too, for a tail of its own
    assert (alone.preemptions, child.preemptions) == (1, 0)
    assert child.table.blocks[0] == parent.table.blocks[0]
    assert child.table.blocks[1] != parent.table.blocks[1]


def test_only_a_running_request_outside_a_step_is_forked() -> None:
    bench = Bench()
    request = bench.submit(4)
    with pytest.raises(UsageError, match="request 1 is waiting and cannot be forked"):
        bench.scheduler.fork(request)
    plan = bench.scheduler.schedule()
    with pytest.raises(UsageError, match="cannot be forked"):
        bench.scheduler.fork(request)
    bench.scheduler.commit(plan, [1], [False])
    assert bench.scheduler.fork(request).tokens.tolist() == [0, 1, 2, 3, 1]


def test_a_fork_beyond_max_sequences_waits_its_turn() -> None:
    bench = Bench(blocks=40, max_sequences=2)
    parent, other = bench.submit(6, max_tokens=5), bench.submit(3, max_tokens=4, start=50)
    bench.step()
    bench.step()
    child = bench.scheduler.fork(parent, 9)
    assert (child.state, child.table.blocks) == (RequestState.WAITING, [])
    assert child.tokens.tolist() == parent.tokens.tolist()
    plans = []
    while not bench.scheduler.idle:
        plans.append(chunks(bench.step()))
        assert len(bench.scheduler.running) <= 2
    # The parent has filled both blocks by now; the fork's hit in them is capped at its 8 tokens but one.
    assert plans[2] == [(parent.id, 9, 1, True), (child.id, 7, 1, True)]
    assert [len(request.output) for request in (parent, other, child)] == [5, 4, 9]


def test_a_fork_within_max_sequences_shares_every_block_at_once() -> None:
    bench = Bench(blocks=40, max_sequences=2)
    parent = bench.submit(6)
    bench.step()
    child = bench.scheduler.fork(parent)
    assert (child.state, child.table.blocks) == (RequestState.RUNNING, parent.table.blocks)
    assert [(start, count) for _, start, count, _ in chunks(bench.step())] == [(6, 1), (6, 1)]


def test_a_fork_may_be_longer_or_shorter_than_its_parent() -> None:
    bench = Bench(blocks=40)
    parent = bench.submit(4, max_tokens=6)
    for _ in range(3):
        bench.step()
    longer, shorter = bench.scheduler.fork(parent, 9), bench.scheduler.fork(parent, 4)
    for wrong in (0, 3, 197):
        with pytest.raises(UsageError, match=f"a fork of 7 tokens cannot end at {4 + wrong}"):
            bench.scheduler.fork(parent, wrong)
    bench.run()
    assert [len(request.output) for request in (parent, longer, shorter)] == [6, 9, 4]


def test_a_tail_that_is_kept_for_others_does_not_keep_its_last_user_from_growing() -> None:
    """The parent's end made the shared tail known to the prefix cache; with no block left, that is forgotten."""
    bench = Bench(blocks=2)
    parent = bench.submit(5, max_tokens=20)
    bench.step()
    child = bench.scheduler.fork(parent)
    bench.scheduler.end(parent, FinishReason.ABORTED)
    bench.run()
    assert child.finish_reason is FinishReason.FAILED
    assert child.length == 9  # eight tokens fill the two blocks, as they would have for a request alone


def test_a_tail_that_somebody_copies_is_not_written_in_place_however_short_blocks_are() -> None:
    """Its last user waits for the fence, alone as it is, and goes on then."""
    bench = Bench(blocks=2)
    parent = bench.submit(5, max_tokens=20)
    bench.step()
    child = bench.scheduler.fork(parent)
    bench.scheduler.end(parent, FinishReason.ABORTED)
    fence = bench.pool.fence([child.table.blocks[1]])
    for _ in range(3):
        assert bench.step().rows == 0
    assert child.state is RequestState.RUNNING
    fence.release()
    bench.run()
    assert child.finish_reason is FinishReason.FAILED
    assert child.length == 9

"""Requests with windows: which blocks they hold, what they share, and how they go on past the context.

Blocks hold four tokens. Where a window of 8 tokens slides behind one sink in a context of 32, the sink's block stays;
at position 32 the window begins at 25, so that blocks up to position 23 have gone, 20 tokens behind the front, and all
that is left moves by 20. So each turn makes room for 20 tokens: the next ones come at 52, 72 and 92.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hostcache import AttentionWindow, FinishReason, Request, RequestState, Scheduler, SchedulerConfig
from hostcache.errors import RequestRefused, UsageError
from tests.hostcache.bench import HOME, Bench, chunks

NARROW = AttentionWindow(tokens=8, sinks=1)


def sliding(bench: Bench, length: int, max_tokens: int = 50, **terms: Any) -> Request:
    return bench.submit(length, max_tokens, window=NARROW, slide=True, **terms)


def test_blocks_go_as_soon_as_no_token_sees_them() -> None:
    bench = Bench(context_length=64)
    request = bench.submit(3, max_tokens=40, window=NARROW)
    held = []
    while not request.finished:
        plan = bench.step()
        assert plan.windows is not None
        assert plan.sinks is not None
        assert (plan.windows.tolist(), plan.sinks.tolist()) == ([8], [1])
        held.append((request.computed, len(request.table.blocks)))
    # A block of sinks; and positions from `computed - 7` on, rounded down to a block.
    for computed, blocks in held[:-1]:
        first = max(4, (computed - 7) // 4 * 4) if computed > 4 else 0
        assert blocks == (computed > 4) + -(-(computed - first) // 4), computed
    assert bench.turns == []
    assert request.finish_reason is FinishReason.LENGTH


def test_a_prompt_beyond_the_context_is_computed_up_to_each_turn() -> None:
    bench = Bench(blocks=12, context_length=32, prefill_chunk=16)
    request = sliding(bench, 100)
    planned, at = [], []
    while request.remaining > 1:
        plan = bench.step()
        planned.append(chunks(plan)[0][1:3])
        at.append((plan.positions[0], plan.positions[-1]))
    assert planned == [(0, 16), (16, 16), (32, 16), (48, 4), (52, 16), (68, 4), (72, 16), (88, 4), (92, 8)]
    assert at == [(0, 15), (16, 31), (12, 27), (28, 31), (12, 27), (28, 31), (12, 27), (28, 31), (12, 19)]
    # Behind the gap, at 32, 52, 72 and 92, are the seven tokens that are seen, in two blocks.
    assert bench.turns == [-20] * 8


def test_answers_go_on_past_the_context() -> None:
    bench = Bench(blocks=12, context_length=32)
    request = sliding(bench, 5, max_tokens=100)
    positions: dict[int, int] = {}
    while not request.finished:
        start = request.computed
        plan = bench.step()
        positions |= dict(enumerate(plan.positions.tolist(), start))
        assert bench.pool.used <= 5  # sink, 8 + 1 tokens anywhere in blocks, and one block to turn into
    assert (request.length, len(positions)) == (105, 104)
    assert [positions[row] for row in (0, 31, 32, 51, 52, 72, 103)] == [0, 31, 12, 31, 12, 12, 23]


@pytest.mark.parametrize(("length", "max_tokens"), [(20, 100_000), (100_000, 20)])
def test_a_long_session_fits_a_small_pool(length: int, max_tokens: int) -> None:
    bench = Bench(blocks=12, context_length=32, prefill_chunk=16)
    request = sliding(bench, length, max_tokens)
    for _ in range(200):
        bench.step()
    assert request.state is RequestState.RUNNING
    assert request.limit == 100_020


def test_where_a_window_cannot_slide_the_request_is_refused() -> None:
    bench = Bench(context_length=32)
    with pytest.raises(RequestRefused, match=r"5 sinks in whole blocks of 4, a window of 21 tokens .* context of 32"):
        bench.submit(3, window=AttentionWindow(21, sinks=5), slide=True)  # 8 + 21 + 4
    bench.submit(3, window=AttentionWindow(20, sinks=5), slide=True)
    with pytest.raises(UsageError, match="window=None"):
        bench.submit(3, slide=True)
    with pytest.raises(UsageError, match="max_tokens=None"):
        bench.scheduler.submit([1], HOME, window=NARROW, slide=True)
    with pytest.raises(RequestRefused, match="exceed the context of 32"):
        bench.submit(3, max_tokens=30, window=NARROW)  # a window alone only saves memory
    with pytest.raises(RequestRefused, match=re.escape(f"exceed the context of {2**31 - 1}")):
        sliding(bench, 3, max_tokens=2**31 - 3)
    blind = Scheduler(bench.cache, bench.prefix, SchedulerConfig(context_length=32))
    with pytest.raises(UsageError, match="turn=None"):
        blind.submit([1], HOME, 4, window=NARROW, slide=True)


def test_a_prompt_whose_window_exceeds_the_pool_is_refused() -> None:
    bench = Bench(blocks=6, prefill_chunk=8)
    bench.submit(20, window=AttentionWindow(8))  # 8 + 8 tokens in whole blocks, and one: 5
    with pytest.raises(RequestRefused, match="needs 7 blocks, the whole pool has 6"):
        bench.submit(30, window=AttentionWindow(16))


def test_only_as_many_are_admitted_as_their_windows_leave_room_for() -> None:
    """Nobody may be preempted, so each is promised what it may come to: a sink, 8 + 4 tokens, a block, one to turn.

    And one that it shares, of tokens 4 to 7: whoever hits it may hold it longer.
    """
    bench = Bench(blocks=15, context_length=32, prefill_chunk=4, max_preemptions=0, watermark=0.0)
    requests = [sliding(bench, 6, 1000, start=100 * n) for n in range(3)]
    for _ in range(300):
        bench.step()
    assert bench.scheduler.running == requests[:2]
    assert bench.scheduler.stats.preemptions == 0
    assert [request.promised + len(request.table.blocks) for request in requests[:2]] == [6, 6]


def test_references_count_tables_and_not_entries() -> None:
    """A fork's table names the same blocks; a block goes back when both have passed it, and not before."""
    bench = Bench(context_length=64, max_rows=8)
    parent = bench.submit(9, max_tokens=40, window=AttentionWindow(8))
    bench.step()
    bench.step()
    child = bench.scheduler.fork(parent)
    first, *rest = parent.table.blocks
    assert [bench.pool.refs[block] for block in (first, *rest)] == [2] * len(parent.table.blocks)
    before = parent.computed
    while parent.computed < 11:
        assert (first in parent.table.blocks, first in child.table.blocks) == (True, True)
        bench.step()
    assert before < 11
    assert (first in parent.table.blocks, first in child.table.blocks, bench.pool.refs[first]) == (False, False, 0)
    bench.run()
    assert bench.pool.used == 0


@pytest.mark.parametrize("ended", ["parent", "child", "both"])
def test_sharing_and_windows_free_no_block_twice(ended: str) -> None:
    """One of two that share blocks is ended while the other has them in its window, or has turned copies of them."""
    for steps in range(0, 60, 3):
        bench = Bench(blocks=20, context_length=32, swap_blocks=4)
        parent = sliding(bench, 20, max_tokens=60)
        while parent.remaining > 1:
            bench.step()
        child = bench.scheduler.fork(parent)
        for _ in range(steps):
            bench.step()
        for request in {"parent": [parent], "child": [child], "both": [parent, child]}[ended]:
            bench.scheduler.end(request, FinishReason.ABORTED)
            bench.pool.check()
        bench.run()
        assert bench.pool.used == 0
        assert bench.pool.free + bench.pool.cached == 20


def test_what_sees_all_is_shared_and_what_does_not_is_never_published() -> None:
    """Tokens below the window's length see all before them: their KV is that of any request."""
    bench = Bench(blocks=40)
    bench.submit(30, max_tokens=1)
    bench.run()
    narrow = bench.submit(30, max_tokens=1, window=AttentionWindow(10))
    bench.run()
    assert narrow.hit_tokens == 10
    bench.prefix.invalidate()
    bench.submit(30, max_tokens=1, window=AttentionWindow(10))
    bench.run()
    assert bench.prefix.resident == 3  # 4, 4 and 2 tokens
    wide = bench.submit(30, max_tokens=1)
    bench.run()
    assert wide.hit_tokens == 10


def test_an_equal_prompt_waits_only_for_what_will_be_published() -> None:
    """The second prompt waits for its first two blocks, and not for the third, which sees too little."""
    bench = Bench(blocks=40, prefill_chunk=4)
    bench.submit(30, max_tokens=1, window=AttentionWindow(8))
    second = bench.submit(30, max_tokens=1)
    bench.step()
    assert bench.scheduler.stats.dedup_waits == 1
    bench.step()
    bench.step()
    assert second.hit_tokens == 8
    assert second.state is RequestState.RUNNING


@pytest.mark.parametrize("swap_blocks", [0, 10])
def test_who_gives_way_comes_back_to_where_it_was(swap_blocks: int) -> None:
    """Past a turn: from the swap space with gap and turns as they were, or computed again with the same turns."""
    bench = Bench(blocks=20, context_length=32, swap_blocks=swap_blocks)
    request = sliding(bench, 5, max_tokens=80)
    while request.computed < 59:
        bench.step()
    above = bench.submit(4, start=90, max_tokens=25, priority=1)
    bench.step()
    gap = request.table.gap
    assert (gap.front, gap.turned) == (4, 40)
    turns = len(bench.turns)
    assert bench.scheduler.shed_lowest() is request
    assert (request.swapped is not None) == (swap_blocks > 0)
    assert (request.table.length, request.table.gap.tokens) == (0, 0)
    bench.step()
    if swap_blocks:
        assert request.computed == 61
        assert len(bench.turns) == turns
    else:
        assert request.computed < 61
        while request.computed < 61:
            bench.step()
        assert len(bench.turns) == 2 * turns
    assert (request.table.gap.front, request.table.gap.turned) == (4, 40)
    assert above.state is RequestState.RUNNING
    bench.run()
    assert request.length == 85
    assert bench.swap is None or bench.swap.used == 0


def test_a_step_that_is_rolled_back_leaves_keys_turned_once() -> None:
    bench = Bench(blocks=12, context_length=32)
    request = sliding(bench, 5, max_tokens=60)
    while request.computed < 32:
        bench.step()
    for _ in range(3):
        plan = bench.scheduler.schedule()
        assert plan.positions.tolist() == [12]
        bench.scheduler.rollback(plan)
    assert bench.turns == [-20] * 2
    bench.run()
    assert request.length == 65


def test_guesses_stop_in_front_of_a_turn() -> None:
    bench = Bench(blocks=12, context_length=32)
    request = sliding(bench, 27, max_tokens=60)
    bench.step()
    for start, count in ((27, 5), (32, 9)):  # up to position 31; then as many as were proposed
        plan = bench.scheduler.schedule({request: np.full(8, 7, np.int32)})
        assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(start, count)]
        bench.scheduler.commit(plan, [7] * count, [False] * count)
    assert bench.turns == [-20] * 2


def test_branches_share_what_their_window_sees() -> None:
    bench = Bench(blocks=20, context_length=32)
    leader = sliding(bench, 40, max_tokens=9)
    branch = bench.scheduler.branch(leader)
    while not branch.table.length:
        bench.step()
    assert branch.table.gap == leader.table.gap
    assert leader.table.gap.turned == 20
    bench.run()
    assert branch.output.tolist() == leader.output.tolist() == [7] * 9


def test_a_models_own_window_lets_blocks_go_for_all() -> None:
    """The plan leaves it to the layers; what is shared has no other bound than what was let go of."""
    bench = Bench(model_window=8)
    request = bench.submit(30, max_tokens=20)
    with pytest.raises(UsageError, match="have a window of 8 tokens of their own"):
        bench.submit(3, window=NARROW)
    while request.remaining > 1:
        plan = bench.step()
        assert plan.windows is not None
        assert plan.windows.tolist() == [0]
    assert request.table.gap.tokens == 20  # positions 23 and later are seen by that at 30
    again = bench.submit(30, max_tokens=1)
    bench.run()
    assert again.hit_tokens == 28  # whole blocks: the tail of one that has let go of any is not known


def test_of_what_a_slid_session_shares_only_its_sinks_stay_behind_when_it_is_swapped_out() -> None:
    """Parent and fork share the first block of the window, too; but behind a gap nothing can be a hit later."""
    bench = Bench(blocks=20, context_length=32, swap_blocks=10)
    parent = sliding(bench, 39, max_tokens=60)
    while parent.remaining > 1:
        bench.step()
    child = bench.scheduler.fork(parent)
    bench.step()
    shared = [bench.pool.refs[block] for block in child.table.blocks]
    assert (child.computed, child.table.gap.front, shared) == (40, 4, [2, 2, 1])
    assert bench.scheduler.shed_lowest() is child
    assert child.swapped is not None
    assert (child.swapped.first, child.swapped.ticket.blocks, child.swapped.tokens) == (1, 2, 40)
    bench.step()
    assert child.computed == 41
    assert child.table.blocks[0] == parent.table.blocks[0]
    assert set(child.table.blocks[1:]).isdisjoint(parent.table.blocks)


def test_the_last_one_waits_to_be_turned_while_its_blocks_are_being_copied() -> None:
    """Of four blocks it holds three, and each turned copy needs a block that another one must have left."""
    bench = Bench(blocks=4, context_length=32)
    request = sliding(bench, 5, max_tokens=60)
    while request.computed < 32:
        bench.step()
    assert len(request.table.blocks) == 3
    fence = bench.pool.fence(request.table.blocks)
    for _ in range(3):
        assert bench.scheduler.schedule().rows == 0
        assert (bench.turns, request.error) == ([], None)
    fence.release()
    bench.step()
    assert (request.computed, bench.turns) == (33, [-20] * 2)

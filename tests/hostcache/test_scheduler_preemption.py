"""Who gives way, how often, and what is kept of its KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hostcache import (
    AttentionWindow,
    FinishReason,
    KVGeometry,
    PagedKVCache,
    PrefixCache,
    Request,
    RequestState,
    Scheduler,
    SchedulerConfig,
    SwapSpace,
)
from hostcache.errors import SwapError
from hostcache.swap import SwapTicket
from tests.hostcache.bench import HOME, Bench, chunks


def until_preempted(bench: Bench, request: Request) -> None:
    for _ in range(100):
        if request.preemptions:
            return
        bench.step()
    pytest.fail("nobody gave way in 100 steps")


def test_the_lowest_priority_gives_way_before_the_newest() -> None:
    bench = Bench(blocks=10)
    low = bench.submit(10)
    bench.step()
    high = [bench.submit(10, start=100 * n, priority=1) for n in (1, 2)]
    until_preempted(bench, low)
    assert [request.preemptions for request in high] == [0, 0]


def test_the_lowest_priority_stands_back_itself_when_it_cannot_grow() -> None:
    bench = Bench(blocks=6)
    high = bench.submit(8, priority=1)
    low = bench.submit(9, start=100, max_tokens=20)
    bench.step()
    until_preempted(bench, low)
    assert high.preemptions == 0


def test_one_that_has_lost_its_blocks_as_often_as_may_be_keeps_them() -> None:
    """Then it is admitted with all that it may come to, so that nobody has to take them again."""
    bench = Bench(blocks=8, max_preemptions=2, max_skips=0)
    newest = bench.submit(5, max_tokens=16, start=100)
    rounds = 0
    while not newest.finished:
        while len(bench.scheduler.waiting) < 2:
            rounds += 1
            bench.submit(7, max_tokens=12, start=1000 + 50 * rounds, priority=1)
        bench.step()
        assert newest.preemptions <= 2
        bench.now += 10.0
    assert newest.preemptions == 2
    assert newest.finish_reason is FinishReason.LENGTH


def test_one_that_ranks_higher_does_not_take_what_was_promised_to_one_that_keeps_its_blocks() -> None:
    bench = Bench(blocks=12, max_preemptions=1)
    low = bench.submit(8, max_tokens=12, start=100)
    bench.step()
    high = bench.submit(21, priority=1)
    bench.step()
    assert bench.scheduler.shed_lowest() is low
    while not low.finished:
        bench.step()
    assert (low.finish_reason, low.preemptions) == (FinishReason.LENGTH, 1)
    assert (high.state, high.preemptions) == (RequestState.RUNNING, 0)  # it waited where it was


def test_where_nobody_may_be_preempted_everybody_is_admitted_with_all_that_it_may_come_to() -> None:
    bench = Bench(blocks=10, max_preemptions=0)
    for n in range(6):
        bench.submit(5, max_tokens=12, start=100 * n)  # 17 tokens, of which the last is not computed: four blocks
    most = 0
    while not bench.scheduler.idle:
        bench.step()
        most = max(most, len(bench.scheduler.running))
    assert bench.scheduler.stats.preemptions == 0
    assert most == 2  # a third would need twelve blocks


def test_a_fork_of_one_that_keeps_its_blocks_waits_since_copies_of_the_tail_were_not_promised() -> None:
    bench = Bench(blocks=10, max_preemptions=0)
    parent = bench.submit(5, max_tokens=30)
    bench.step()
    child = bench.scheduler.fork(parent, 8)
    assert child.state is RequestState.WAITING
    bench.run()
    assert (parent.finish_reason, child.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert bench.scheduler.stats.preemptions == 0


def swapping(blocks: int = 7, swap_blocks: int = 8) -> tuple[Bench, Request, Request]:
    """The second of two requests has been swapped out."""
    bench = Bench(blocks=blocks, swap_blocks=swap_blocks, max_skips=0)
    first, second = bench.submit(10), bench.submit(10, start=100)
    bench.step()
    until_preempted(bench, second)
    return bench, first, second


def test_what_was_swapped_out_is_not_computed_again() -> None:
    bench, first, second = swapping()
    assert bench.swap is not None
    assert second.swapped is not None
    computed = second.computed_tokens
    assert second.swapped.tokens == computed == 12  # then it needed a block more
    bench.prefix.invalidate()  # no hit helps
    bench.scheduler.end(first, FinishReason.ABORTED)
    assert chunks(bench.step()) == [(second.id, 12, 1, True)]
    assert (second.computed_tokens, bench.swap.used) == (computed + 1, 0)
    assert (bench.scheduler.stats.swapped_out, bench.scheduler.stats.swapped_in_tokens) == (1, 12)


def test_one_that_cannot_be_swapped_in_waits_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are sound: the memory for a copy was missing. Neither blocks nor their room in the swap space leak."""
    bench = Bench(blocks=6, swap_blocks=8, max_skips=0)
    first = bench.scheduler.submit([*range(8), 50, 51], HOME, 50)
    bench.step()
    second = bench.scheduler.submit([*range(8), 60, 61], HOME, 50)
    until_preempted(bench, second)
    bench.scheduler.end(first, FinishReason.ABORTED)
    assert bench.swap is not None
    swapped = second.swapped
    assert swapped is not None
    assert swapped.first == 2  # behind a hit

    def without_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(bench.swap, "take", without_memory)
        with pytest.raises(MemoryError):
            bench.scheduler.schedule()
    assert (bench.pool.used, bench.swap.used, second.swapped) == (0, swapped.ticket.blocks, swapped)
    assert bench.scheduler.waiting == [second]
    assert chunks(bench.step()) == [(second.id, swapped.tokens, 1, True)]
    assert (bench.swap.used, second.swapped) == (0, None)


def test_a_fork_of_one_that_came_back_publishes_each_block_behind_the_one_in_front_of_it() -> None:
    bench, first, second = swapping()
    bench.scheduler.end(first, FinishReason.ABORTED)
    bench.scheduler.rollback(bench.scheduler.schedule())
    assert (second.computed, second.published) == (12, 0)  # all of it came from the swap space
    child = bench.scheduler.fork(second, 8)
    bench.scheduler.end(second, FinishReason.ABORTED)
    bench.run()
    tokens = child.tokens.tolist()
    for text, blocks in ((tokens[:16], 4), (tokens[12:16], 0)):
        hit = bench.prefix.match(HOME, np.array([*text, 0], np.int32))
        assert len(hit.blocks) == blocks
        bench.pool.release_all(hit.blocks)
        bench.prefix.release_node(hit.node)


def test_blocks_that_others_hold_are_not_swapped() -> None:
    """Both begin with the same two blocks: the second leaves two of its four in the pool, and finds them there."""
    bench = Bench(blocks=6, swap_blocks=8, max_skips=0)
    first = bench.scheduler.submit([*range(8), 50, 51], HOME, 50)
    bench.step()
    second = bench.scheduler.submit([*range(8), 60, 61], HOME, 50)
    until_preempted(bench, second)
    assert second.swapped is not None
    assert (second.swapped.first, second.swapped.ticket.blocks) == (2, 2)
    held, swapped = first.table.blocks[:2], second.swapped.tokens
    bench.scheduler.end(first, FinishReason.ABORTED)
    bench.step()
    assert second.table.blocks[:2] == held
    assert (second.hit_tokens, second.computed_tokens) == (swapped, swapped - 8 + 1)  # eight were a hit from the start


def test_when_the_blocks_in_front_are_gone_the_swapped_ones_are_of_no_use() -> None:
    bench = Bench(blocks=6, swap_blocks=8, max_skips=0)
    first = bench.scheduler.submit([*range(8), 50, 51], HOME, 50)
    bench.step()
    second = bench.scheduler.submit([*range(8), 60, 61], HOME, 50)
    until_preempted(bench, second)
    bench.scheduler.end(first, FinishReason.ABORTED)
    bench.prefix.invalidate()
    plan = bench.step()
    assert chunks(plan) == [(second.id, 0, second.prompt_length + len(second.output) - 1, True)]
    assert bench.swap is not None
    assert (bench.swap.used, bench.swap.stats.dropped_blocks) == (0, 2)


def test_when_the_cache_has_it_all_the_swapped_blocks_are_dropped() -> None:
    """Another client's request for the same tokens, which may go first, computes what lies in the swap space."""
    bench, first, second = swapping(blocks=7)
    assert bench.swap is not None
    bench.scheduler.end(first, FinishReason.ABORTED)
    twin = bench.scheduler.submit([*second.tokens, 1], HOME, 1, priority=1)
    bench.prefix.invalidate()
    plan = bench.step()
    assert chunks(plan)[0][:2] == (twin.id, 0)
    assert twin.finished
    bench.step()
    assert (second.hit_tokens, second.state) == (second.length - 2, RequestState.RUNNING)
    assert (bench.swap.used, bench.swap.stats.taken_blocks) == (0, 0)


def test_a_full_swap_space_means_computing_again() -> None:
    bench, _, second = swapping(swap_blocks=1)
    assert second.swapped is None
    assert bench.swap is not None
    assert bench.swap.stats.refused == 1
    bench.run()
    assert second.finished


def test_lost_bytes_mean_computing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, first, second = swapping()
    swap = bench.swap
    assert swap is not None

    def lose(ticket: SwapTicket, blocks: Sequence[int]) -> None:
        swap.drop(ticket)
        raise SwapError("lost", blocks=len(blocks))

    monkeypatch.setattr(swap, "take", lose)
    bench.prefix.invalidate()
    bench.scheduler.end(first, FinishReason.ABORTED)
    assert chunks(bench.step()) == [(second.id, 0, 13, True)]
    bench.run()
    assert second.finish_reason in {FinishReason.LENGTH, FinishReason.FAILED}
    assert bench.pool.used == 0


@pytest.mark.parametrize(("seconds_per_row", "swapped"), [(1.0, True), (1e-12, False)])
def test_the_cheaper_of_swapping_and_computing_is_chosen(
    seconds_per_row: float, *, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(blocks=7, swap_blocks=8, max_skips=0)
    assert bench.swap is not None
    monkeypatch.setattr(bench.swap, "seconds_for", lambda blocks, _codec: 0.001 * blocks)
    first, second = bench.submit(10), bench.submit(10, start=100)
    for _ in range(30):
        if second.preemptions:
            break
        plan = bench.scheduler.schedule()
        samples = len(plan.logit_rows)
        bench.scheduler.commit(plan, [7] * samples, [False] * samples, seconds=plan.rows * seconds_per_row)
    assert (second.swapped is not None) == swapped
    assert not first.finished


@pytest.mark.parametrize("how", ["swapped", "computed again"])
def test_an_abort_of_a_preempted_request_leaves_nothing_behind(how: str) -> None:
    bench, first, second = swapping(swap_blocks=8 if how == "swapped" else 1)
    assert (second.swapped is not None) == (how == "swapped")
    for request in (second, first):
        bench.scheduler.end(request, FinishReason.ABORTED)
    assert bench.swap is not None
    assert (bench.swap.used, bench.pool.used, bench.scheduler.idle) == (0, 0, True)


def test_the_lowest_is_shed_on_request_however_often_and_never_the_last() -> None:
    bench = Bench(blocks=40, max_preemptions=1)
    high, low = bench.submit(4, priority=1), bench.submit(4, start=100)
    for _ in range(3):
        bench.step()
        assert bench.scheduler.shed_lowest() is low
        assert bench.scheduler.shed_lowest() is None
    assert (low.preemptions, high.preemptions) == (3, 0)
    plan = bench.scheduler.schedule()
    assert bench.scheduler.shed_lowest() is None  # a step is in flight
    bench.scheduler.rollback(plan)


def test_those_that_decode_and_those_that_do_not_yet_are_shed_in_one_order() -> None:
    bench = Bench(blocks=60, prefill_chunk=4)
    middle, lowest = bench.submit(4, priority=1), bench.submit(4, start=100)
    bench.step()
    highest = bench.submit(40, start=200, priority=2)
    bench.step()
    assert highest.remaining > 1
    assert [bench.scheduler.shed_lowest() for _ in range(3)] == [lowest, middle, None]


def test_while_admission_is_paused_one_request_at_a_time_still_gets_somewhere() -> None:
    bench = Bench()
    running, waiting = bench.submit(4, max_tokens=3), [bench.submit(4, start=100 * n, max_tokens=2) for n in (1, 2)]
    bench.step()
    for request in waiting:
        assert request.state is RequestState.RUNNING
    bench.scheduler.pause_admission("memory is short")
    later = [bench.submit(4, start=100 * n, max_tokens=2, priority=9) for n in (3, 4)]
    most = 0
    while not bench.scheduler.idle:
        bench.step()
        most = max(most, sum(request.state is RequestState.RUNNING for request in later))
    assert most == 1
    assert (running.preemptions, bench.scheduler.pause_reason) == (0, "memory is short")
    bench.scheduler.resume_admission()
    again = [bench.submit(4, start=100 * n, max_tokens=2) for n in (5, 6)]
    bench.step()
    assert [request.state for request in again] == [RequestState.RUNNING] * 2


def test_withheld_blocks_are_waited_for() -> None:
    bench = Bench(blocks=6)
    grows = bench.submit(8, max_tokens=9)
    bench.step()
    withheld = list(range(2, 6))
    bench.pool.extents.withhold(withheld)
    for _ in range(5):
        plan = bench.scheduler.schedule()
        assert plan.rows == 0
    assert grows.state is RequestState.PREEMPTED  # its blocks are there for whoever needs memory
    bench.pool.extents.restore(withheld)
    bench.run()
    assert grows.finish_reason is FinishReason.LENGTH


def test_a_request_that_does_not_fit_beside_pins_fails_and_says_so() -> None:
    bench = Bench(blocks=6)
    bench.submit(13, max_tokens=1)
    bench.run()
    bench.prefix.pin(HOME, np.arange(13, dtype=np.int32), "console", 60.0)
    too_large = bench.submit(20, start=100, max_tokens=1)
    bench.step()
    assert too_large.finish_reason is FinishReason.FAILED
    assert "beside 3 pinned ones" in str(too_large.error)


def test_whoever_turns_its_keys_takes_no_slot_in_front_of_one_above_it() -> None:
    """In the step in which the lower one comes to the context's end, the higher one needs the only block there is.

    Had the lower one taken it, it would have given way with a slot for a token that was never computed.
    """
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
    cache = PagedKVCache.create(geometry, 9 * geometry.block_bytes)
    swap = SwapSpace(4 * geometry.block_bytes, cache)
    config = SchedulerConfig(context_length=12, max_rows=32, max_sequences=4)

    def turn(source: int, destination: int, _: int) -> None:
        cache.copy_block(source, destination, 4)

    scheduler = Scheduler(cache, PrefixCache(cache.pool), config, clock=lambda: 0.0, swap=swap, turn=turn)
    lower = scheduler.submit(np.arange(12), HOME, 20, window=AttentionWindow(4), slide=True)
    higher = scheduler.submit(np.arange(100, 108), HOME, 4, priority=1)

    def step() -> None:
        plan = scheduler.schedule()
        samples = len(plan.logit_rows)
        scheduler.commit(plan, [7] * samples, [False] * samples)

    step()
    assert (lower.computed, higher.computed) == (12, 8)
    while cache.pool.available > 1:
        cache.pool.allocate(1)  # somebody else's
    step()
    assert higher.computed == 9
    assert lower.computed == 12
    assert (lower.state, lower.preemptions) == (RequestState.RUNNING, 0)  # it waits for a block
    while not higher.finished:
        step()
    while lower.computed < 20:
        step()
    assert lower.table.gap.tokens == 16

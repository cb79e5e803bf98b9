"""What other schedulers were reported to break: one test for each invariant, by the shadow where bytes matter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hostcache import FinishReason, Request, RequestState, SwapSpace
from hostcache.decode_batch import DecodeBatch
from tests.hostcache.bench import HOME, Bench
from tests.hostcache.shadow import NAMESPACES, Fault, ShadowEngine

SEEDS = range(12)
"""Of limits: rows, places, chunks, swap space and the rest differ."""


def submit(engine: ShadowEngine, tokens: list[int], max_tokens: int) -> Request:
    request = engine.scheduler.submit(np.array(tokens), NAMESPACES[0], max_tokens)
    engine.digests[request.id] = []
    engine.live.append(request)
    return request


def finish(engine: ShadowEngine) -> None:
    for _ in range(2000):
        if engine.scheduler.idle:
            engine.run(0)
            return
        engine.step()
        engine.check()
    pytest.fail("2000 steps did not finish the work")


@pytest.mark.parametrize("seed", SEEDS)
def test_scheduled_and_cached_tokens_never_exceed_the_request(seed: int) -> None:
    """A preempted request comes back to a hit: what is to be computed is counted behind it."""
    engine = ShadowEngine(seed, blocks=7)
    requests = [submit(engine, [0] * 10, 12), submit(engine, [0] * 9 + [1], 12)]
    while not engine.scheduler.idle:
        plan = engine.scheduler.schedule()
        for chunk in plan.chunks:
            assert chunk.start == chunk.request.computed
            assert chunk.start + chunk.count <= chunk.request.length
            assert chunk.request.table.length == chunk.start + chunk.count
        if plan.rows:
            engine.scheduler.rollback(plan)
        engine.step()
        engine.check()
    assert all(request.finished for request in requests)


def test_while_requests_wait_and_none_runs_the_next_step_admits_or_fails_one() -> None:
    """Also where the first does not fit beside pins, and where one has outgrown the pool together with its fork."""
    bench = Bench(blocks=4, max_skips=0)
    parent = bench.submit(13, max_tokens=30)
    bench.step()
    child = bench.scheduler.fork(parent)
    others = [bench.submit(length, max_tokens=3, start=100 * length) for length in (16, 3, 9)]
    for _ in range(200):
        waiting, finished = bench.scheduler.waiting, bench.scheduler.stats.finished
        nothing_runs = not bench.scheduler.running
        bench.step()
        if waiting and nothing_runs:
            assert bench.scheduler.running or bench.scheduler.stats.finished > finished
    assert all(request.finished for request in (parent, child, *others))


@pytest.mark.parametrize("swap_blocks", [1, 2, 3, 20])
def test_swapped_work_can_be_resumed_however_small_the_swap_space(swap_blocks: int) -> None:
    """What finds no room there is computed again."""
    bench = Bench(blocks=7, swap_blocks=swap_blocks)
    requests = [bench.submit(3, start=100 * n, max_tokens=16) for n in range(4)]
    bench.run()
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    assert sum(request.preemptions for request in requests) >= 2
    assert bench.swap is not None
    assert (bench.swap.stats.refused > 0) == (swap_blocks < 20)


def test_forks_with_chunked_prompts_do_not_exhaust_the_swap_space() -> None:
    bench = Bench(blocks=12, swap_blocks=3, prefill_chunk=4, max_rows=16)
    assert bench.swap is not None
    for n in range(6):
        parent = bench.submit(9, start=100 * n, max_tokens=12)
        while parent.state is not RequestState.RUNNING:
            bench.step()
        bench.scheduler.fork(parent)
        assert bench.swap.used <= 3
    bench.run()
    assert bench.swap.stats.refused > 0
    assert (bench.swap.used, bench.pool.used) == (0, 0)


def test_the_counts_of_pool_and_swap_space_conserve_blocks_in_every_step() -> None:
    bench = Bench(blocks=9, swap_blocks=5, max_sequences=4)
    assert bench.swap is not None
    for n in range(8):
        bench.submit(7, start=50 * n, max_tokens=11)
    swapped = 0
    while not bench.scheduler.idle:
        bench.step()  # which checks pool, tree and swap space
        tables = Counter(block for request in bench.scheduler.running for block in request.table.blocks)
        assert bench.pool.used == len(tables)
        assert bench.pool.free + bench.pool.cached + bench.pool.used == 9
        out = sum(request.swapped.ticket.blocks for request in bench.scheduler.waiting if request.swapped)
        assert bench.swap.used == out
        swapped = max(swapped, out)
    assert swapped > 0


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("swap_blocks", [0, 6])
def test_an_abort_after_any_number_of_steps_returns_all_blocks(steps: int, swap_blocks: int) -> None:
    """In mid prompt, while decoding, preempted, swapped out, or waiting for an equal prompt."""
    bench = Bench(blocks=7, prefill_chunk=3, swap_blocks=swap_blocks, max_skips=0)
    requests = [bench.submit(10, max_tokens=9), bench.submit(10, max_tokens=9), bench.submit(8, start=90, max_tokens=9)]
    for _ in range(steps):
        bench.step()
    for request in requests[::-1]:
        bench.scheduler.end(request, FinishReason.ABORTED)
    assert (bench.scheduler.idle, bench.pool.used) == (True, 0)
    assert bench.swap is None or bench.swap.used == 0
    bench.prefix.invalidate()
    assert bench.pool.free == 7


def test_a_block_is_free_only_after_its_last_reader_and_then_always() -> None:
    """A copy out of an aborted request's blocks runs on: nobody gets them, until it has ended."""
    bench = Bench(blocks=4)
    request = bench.submit(8, max_tokens=4)
    bench.step()
    fence = bench.pool.fence(request.table.blocks)
    bench.scheduler.end(request, FinishReason.ABORTED)
    bench.prefix.invalidate()
    large = bench.submit(16, start=100, max_tokens=1)
    for _ in range(5):
        assert bench.step().rows == 0
    assert (bench.pool.fenced, large.state) == (2, RequestState.WAITING)
    fence.release()
    bench.run()
    assert large.finish_reason is FinishReason.LENGTH


def test_only_blocks_that_are_computed_owned_and_full_are_published() -> None:
    """A prompt is preempted between two chunks; the next one like it finds what was computed, and no more."""
    bench = Bench(blocks=20, prefill_chunk=6, max_sequences=1)
    bench.submit(20)
    bench.step()  # six tokens: one block is full
    bench.submit(1, start=900, priority=1, max_tokens=1)
    bench.step()
    assert bench.prefix.match(HOME, np.arange(20, dtype=np.int32)).blocks == [0]


def test_a_request_computes_at_least_one_token_whatever_is_cached() -> None:
    bench = Bench(blocks=20)
    for _ in range(4):
        bench.submit(8, max_tokens=1)
        (chunk,) = bench.step().chunks
        assert chunk.count >= 1
        bench.run()


def test_equal_prompts_give_equal_answers_however_often() -> None:
    """The token is a function of the KV that is read: a stale block would give another one."""
    for seed in SEEDS:
        engine = ShadowEngine(seed, blocks=9)
        answers = []
        for _ in range(4):
            request = submit(engine, [0, 1, 0, 0, 1, 1, 0, 1, 0, 0], 12)
            while not request.finished:
                plan = engine.scheduler.schedule()
                engine.check_reads(plan)
                engine.write(plan)
                tokens = [engine.next_token(sampling) for sampling in plan.sampling]
                engine.scheduler.commit(plan, tokens, [False] * len(tokens))
            answers.append(request.output.tolist())
            submit(engine, [1] * 30, 2)  # whose blocks take the place of others
            finish(engine)
        assert answers == [answers[0]] * 4


def test_a_shared_block_is_never_written() -> None:
    """A fork in mid block: both write behind the shared tokens, each into a block of its own."""
    bench = Bench(blocks=20)
    parent = bench.submit(6)
    bench.step()
    child = bench.scheduler.fork(parent)
    shared = list(parent.table.blocks)
    plan = bench.scheduler.schedule()
    written = (plan.slots // 4).tolist()
    assert len(set(written)) == 2
    assert all(bench.pool.refs[block] == 1 for block in written)
    bench.scheduler.commit(plan, [1, 2], [False, False])
    assert (parent.table.blocks[0], child.table.blocks[0]) == (shared[0], shared[0])
    assert (parent.output.tolist(), child.output.tolist()) == ([7, 1], [7, 2])


def test_references_count_tables_not_entries() -> None:
    bench = Bench(blocks=20)
    parent = bench.submit(9)
    bench.step()
    for _ in range(3):
        bench.scheduler.fork(parent)
    assert [bench.pool.refs[block] for block in parent.table.blocks] == [4, 4, 4]
    bench.scheduler.end(parent, FinishReason.ABORTED)
    assert sum(bench.pool.refs) == 9


def test_a_freed_blocks_old_content_is_never_a_hit() -> None:
    for seed in SEEDS:
        engine = ShadowEngine(seed, blocks=6)
        for tokens in ([0] * 12, [1] * 20, [0] * 12, [0] * 8 + [1] * 4):  # the second takes all blocks
            submit(engine, tokens, 2)
            finish(engine)


def test_a_step_that_fails_while_a_sequence_grows_gives_all_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow one by one, and the first has its block already when the second one's cannot be had."""
    bench = Bench()
    first, second = bench.submit(4), bench.submit(4, start=100)
    bench.step()
    allocate, calls = bench.pool.allocate_one, iter([False, True])

    def fail_the_second_time() -> int:
        if next(calls):
            raise MemoryError
        return allocate()

    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "grow", lambda *_: False)
        patch.setattr(bench.pool, "allocate_one", fail_the_second_time)
        with pytest.raises(MemoryError):
            bench.scheduler.schedule()
    assert [request.table.length for request in (first, second)] == [4, 4]
    assert not any(request.in_flight for request in (first, second))
    plan = bench.scheduler.schedule()
    assert plan.slots.tolist() == [request.table.slot(4) for request in (first, second)]
    bench.scheduler.rollback(plan)
    bench.run()


def test_equal_prefixes_of_two_sequences_are_evictable_once() -> None:
    """Both computed the same two blocks; what the second one has of them is free when it ends, not cached as well."""
    bench = Bench(max_dedup_steps=0)
    first, second = bench.submit(8, max_tokens=1), bench.submit(8, max_tokens=1)
    bench.step()
    assert (first.hit_tokens, second.hit_tokens) == (0, 0)
    assert (bench.pool.cached, bench.pool.free, bench.pool.used) == (2, 14, 0)


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_prompts_hit_from_two_tokens_on(length: int, hit: int) -> None:
    """No length is too short to be cached, but one token must be left to compute."""
    bench = Bench()
    for _ in range(2):
        request = bench.submit(length, max_tokens=1)
        bench.run()
    assert request.hit_tokens == hit


def test_after_one_short_prompt_nothing_is_left_over() -> None:
    bench = Bench()
    bench.submit(3, max_tokens=1)
    bench.run()
    assert (bench.pool.used, bench.pool.free + bench.pool.cached) == (0, 16)


def test_the_shadow_sees_a_swap_space_that_brings_back_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check checks: blocks that come back in another order are noticed."""
    take = SwapSpace.take
    monkeypatch.setattr(SwapSpace, "take", lambda self, ticket, blocks: take(self, ticket, list(blocks)[::-1]))

    def run_all() -> None:
        for seed in range(60):
            ShadowEngine(seed, blocks=9).run(150)

    with pytest.raises(Fault, match="would read KV at"):
        run_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hit_whose_blocks_are_free_counts_as_taken_room(seed: int) -> None:
    """Admission by a hit on cached blocks leaves less for others: nobody runs out for it in the same step."""
    engine = ShadowEngine(seed, blocks=8)
    submit(engine, [0] * 16, 1)
    finish(engine)
    requests = [submit(engine, [0] * 16 + [1], 4), submit(engine, [1] * 12, 4)]
    for _ in range(3):
        engine.step()
        engine.check()
    assert engine.scheduler.stats.preemptions == 0
    finish(engine)
    assert all(request.finished for request in requests)

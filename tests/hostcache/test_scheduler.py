from __future__ import annotations

import numpy as np
import pytest

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
    StepPlan,
)
from hostcache.errors import RequestFailed, RequestRefused, UsageError

HOME = Namespace("model")


class Bench:
    """A scheduler over blocks of four tokens; `step` pretends to compute and samples token 7."""

    def __init__(self, blocks: int = 16, **limits: int) -> None:
        geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
        self.cache = PagedKVCache.create(geometry, blocks * geometry.block_bytes)
        self.prefix = PrefixCache(self.cache.pool)
        config = SchedulerConfig(**{"context_length": 200, "max_rows": 32, "max_sequences": 8, **limits})
        self.scheduler = Scheduler(self.cache, self.prefix, config)
        self.pool = self.cache.pool

    def submit(self, length: int, max_tokens: int = 50, start: int = 0) -> Request:
        return self.scheduler.submit(np.arange(start, start + length), HOME, max_tokens)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan.rows:
            self.scheduler.commit(plan, [7] * len(plan.logit_rows), [False] * len(plan.logit_rows))
        self.pool.check()
        self.prefix.check()
        return plan

    def run(self) -> None:
        for _ in range(1000):
            if self.scheduler.idle:
                return
            self.step()
        pytest.fail("1000 steps did not finish the work")


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(chunk.request.id, chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks]


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    bench = Bench(prefill_chunk=4)
    request = bench.submit(10, max_tokens=3)
    plans = [bench.step() for _ in range(5)]
    assert [chunks(plan) for plan in plans] == [
        [(1, 0, 4, False)],
        [(1, 4, 4, False)],
        [(1, 8, 2, True)],
        [(1, 10, 1, True)],
        [(1, 11, 1, True)],
    ]
    assert request.output.tolist() == [7, 7, 7]
    assert (request.finish_reason, request.computed_tokens) == (FinishReason.LENGTH, 12)
    assert bench.scheduler.idle
    assert bench.pool.used == 0


def test_the_plans_arrays_say_what_the_chunks_say() -> None:
    bench = Bench(prefill_chunk=5)
    bench.submit(6)
    bench.step()
    bench.submit(3, start=100)
    plan = bench.step()
    assert chunks(plan) == [(1, 5, 1, True), (2, 0, 3, True)]
    assert plan.tokens.tolist() == [5, 100, 101, 102]
    assert plan.positions.tolist() == [5, 0, 1, 2]
    assert plan.slots.tolist() == [1 * 4 + 1, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
    assert plan.logit_rows.tolist() == [0, 3]
    assert plan.query_starts.tolist() == [0, 1, 4]
    assert plan.context_lens.tolist() == [6, 3]
    assert plan.tables.tolist() == [[0, 1], [2, 0]]
    assert [array.dtype for array in (plan.tokens, plan.positions, plan.query_starts, plan.context_lens)] == ["i4"] * 4
    assert [array.dtype for array in (plan.slots, plan.logit_rows)] == ["i8"] * 2


def test_decoding_goes_before_a_long_prompt() -> None:
    bench = Bench(blocks=40, max_rows=10, prefill_chunk=100)
    bench.submit(2)
    bench.step()
    bench.submit(50, start=100)
    assert chunks(bench.step()) == [(1, 2, 1, True), (2, 0, 9, False)]
    assert chunks(bench.step()) == [(1, 3, 1, True), (2, 9, 9, False)]


def test_several_prompts_share_a_step() -> None:
    bench = Bench(max_rows=10, prefill_chunk=6)
    for start in (0, 100, 200):
        bench.submit(8, start=start)
    assert chunks(bench.step()) == [(1, 0, 6, False), (2, 0, 4, False)]
    assert chunks(bench.step()) == [(1, 6, 2, True), (2, 4, 4, True), (3, 0, 4, False)]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [
        ([], 1, "non-empty list of token ids"),
        ([[1]], 1, "non-empty list of token ids"),
        ([1.5], 1, "non-empty list of token ids"),
        ([1] * 200, 1, "200 tokens and 1 to generate exceed the context of 200"),
        ([1] * 10, 191, "10 tokens and 191 to generate exceed the context of 200"),
        ([1] * 65, 1, "65 tokens needs 17 blocks, the whole pool has 16"),
        ([1], 0, "max_tokens must be at least 1, got 0"),
    ],
)
def test_what_can_never_fit_is_refused_at_submit(prompt: list[int], max_tokens: int, match: str) -> None:
    bench = Bench()
    with pytest.raises(RequestRefused, match=match):
        bench.scheduler.submit(prompt, HOME, max_tokens)
    assert bench.scheduler.idle


def test_a_prompt_as_large_as_the_pool_runs_until_it_must_grow() -> None:
    bench = Bench(blocks=2)
    request = bench.submit(8, max_tokens=4)
    other = bench.submit(4, max_tokens=2, start=50)
    bench.run()
    assert request.finish_reason is FinishReason.FAILED
    assert isinstance(request.error, RequestFailed)
    assert "grown to 9 tokens and the pool of 2 blocks of 4" in str(request.error)
    assert other.finish_reason is FinishReason.LENGTH  # the engine lives
    assert bench.pool.used == 0


def test_a_hit_is_capped_so_that_one_token_is_computed() -> None:
    bench = Bench()
    bench.submit(8, max_tokens=1)
    bench.run()
    again = bench.submit(8, max_tokens=1)
    assert chunks(bench.step()) == [(2, 7, 1, True)]
    assert (again.hit_tokens, again.computed_tokens) == (7, 1)  # a full block, three tokens by copy, one computed


def test_computed_tokens_are_the_prompt_minus_the_hit() -> None:
    bench = Bench(blocks=40)
    bench.submit(20, max_tokens=1)
    bench.run()
    longer = bench.submit(30, max_tokens=1)
    bench.run()
    assert (longer.hit_tokens, longer.computed_tokens) == (20, 10)


def test_running_sequences_hold_a_shared_prompt_once() -> None:
    bench = Bench(blocks=40)
    prompt = list(range(16))
    bench.scheduler.submit([*prompt, 99], HOME, 50)
    bench.step()
    bench.step()
    for other in range(5):
        bench.scheduler.submit([*prompt, other + 50], HOME, 50)
    bench.step()
    assert [bench.pool.refs[block] for block in bench.scheduler.running[0].table.blocks[:4]] == [6] * 4
    assert bench.pool.used == 4 + 6


def test_a_block_is_not_known_to_others_before_it_was_computed() -> None:
    bench = Bench()
    bench.submit(9)
    plan = bench.scheduler.schedule()
    assert bench.prefix.resident == 0
    bench.scheduler.rollback(plan)
    assert bench.prefix.resident == 0
    bench.step()
    assert bench.prefix.resident == 2


def test_the_newest_gives_way_and_keeps_its_place() -> None:
    bench = Bench(blocks=7)
    first, second = bench.submit(10), bench.submit(10, start=100)
    bench.step()
    third = bench.submit(4, start=200)
    for _ in range(9):  # 10 tokens and their first, up to 17: then the first needs a fifth block, and none is free
        bench.step()
    assert first.state is RequestState.RUNNING
    assert bench.scheduler.waiting == [second, third]  # before the one that came later
    assert second.table.blocks == []
    assert second.length > 10  # its output is not lost
    output = second.output.tolist()
    bench.scheduler.end(first, FinishReason.ABORTED)
    bench.step()
    assert second.state is RequestState.RUNNING
    assert second.output.tolist()[: len(output)] == output
    assert second.hit_tokens >= 8  # its blocks were still cached


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


@pytest.mark.parametrize(("length", "running"), [(12, 2), (16, 1)])
def test_admission_leaves_the_watermark_free(length: int, running: int) -> None:
    bench = Bench(blocks=8)
    bench.submit(13)  # four blocks, with room for three tokens more
    bench.step()
    bench.submit(length, start=100)
    bench.step()
    assert len(bench.scheduler.running) == running


def test_a_waiting_request_is_admitted_only_with_room_for_the_running_to_grow() -> None:
    bench = Bench(blocks=8)
    bench.submit(12)
    bench.step()
    bench.submit(20, start=100)  # five blocks are free, and one of them is the watermark
    assert len(bench.step().chunks) == 1
    bench.submit(16, start=100)
    assert len(bench.scheduler.waiting) == 2


def test_admission_counts_the_private_copy_of_a_partial_hit() -> None:
    """Two blocks are free, one of them the watermark; a copy of the shared tail and a block behind it do not fit."""
    bench = Bench(blocks=5)
    bench.submit(9)
    bench.step()
    bench.scheduler.submit([*range(6), 100, 101, 102], HOME, 50)
    assert len(bench.step().chunks) == 1
    assert len(bench.scheduler.waiting) == 1


def test_admission_leaves_the_blocks_that_running_prefills_will_need() -> None:
    bench = Bench(blocks=10, max_rows=8, prefill_chunk=4)
    bench.submit(24)  # six blocks, one of them taken in the first step
    bench.submit(16, start=100)  # four blocks: together exactly the pool, but for the watermark
    assert chunks(bench.step()) == [(1, 0, 4, False)]


def test_max_sequences_bounds_the_running_set() -> None:
    bench = Bench(blocks=40, max_sequences=2)
    for start in range(4):
        bench.submit(2, start=10 * start, max_tokens=2)
    bench.step()
    assert [request.id for request in bench.scheduler.running] == [1, 2]
    bench.run()


@pytest.mark.parametrize("steps", range(8))
def test_abort_after_any_number_of_steps_gives_everything_back(steps: int) -> None:
    bench = Bench(blocks=6, prefill_chunk=3)
    requests = [bench.submit(10, max_tokens=5), bench.submit(10, max_tokens=5, start=100)]
    for _ in range(steps):
        bench.step()
    for request in requests:
        bench.scheduler.end(request, FinishReason.ABORTED)
    assert bench.scheduler.idle
    assert bench.pool.used == 0
    bench.prefix.invalidate()
    assert bench.pool.free == 6


def test_abort_in_flight_waits_for_the_step() -> None:
    bench = Bench()
    request, other = bench.submit(4), bench.submit(4, start=100)
    plan = bench.scheduler.schedule()
    bench.scheduler.end(request, FinishReason.ABORTED)
    assert request.table.blocks  # the step still writes them
    bench.scheduler.commit(plan, [1, 2], [False, False])
    assert (request.finish_reason, request.table.blocks) == (FinishReason.ABORTED, [])
    assert request.output.tolist() == []
    assert other.output.tolist() == [2]


def test_an_end_token_ends_the_request_with_its_token() -> None:
    bench = Bench()
    request = bench.submit(4)
    plan = bench.scheduler.schedule()
    bench.scheduler.commit(plan, [2], [True])
    assert (request.finish_reason, request.output.tolist()) == (FinishReason.STOP, [2])


def test_a_step_is_committed_or_rolled_back_once() -> None:
    bench = Bench()
    bench.submit(4)
    plan = bench.scheduler.schedule()
    with pytest.raises(UsageError, match="neither committed nor rolled back"):
        bench.scheduler.schedule()
    with pytest.raises(UsageError, match="1 tokens expected, got 0"):
        bench.scheduler.commit(plan, [], [])
    bench.scheduler.commit(plan, [1], [False])
    with pytest.raises(UsageError, match="not the one in flight"):
        bench.scheduler.rollback(plan)


def test_a_rolled_back_step_is_planned_again() -> None:
    bench = Bench()
    bench.submit(9)
    plan = bench.scheduler.schedule()
    bench.scheduler.rollback(plan)
    assert bench.scheduler.running[0].table.length == 0
    assert chunks(bench.scheduler.schedule()) == chunks(plan)


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


def test_a_step_that_cannot_be_planned_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    first, second = bench.submit(6), bench.submit(6, start=100)
    bench.step()
    lengths = [first.table.length, second.table.length]
    with monkeypatch.context() as patch:
        patch.setattr(StepPlan, "build", lambda chunks: 1 // 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                bench.scheduler.schedule()
    assert [first.table.length, second.table.length] == lengths
    assert len(bench.step().chunks) == 2


def test_fenced_blocks_make_a_request_wait_instead_of_fail() -> None:
    bench = Bench(blocks=2)
    first = bench.submit(8, max_tokens=1)
    plan = bench.scheduler.schedule()
    fence = bench.pool.fence(first.table.blocks)
    bench.scheduler.commit(plan, [1], [False])
    second = bench.submit(8, max_tokens=1, start=100)
    assert bench.step().rows == 0
    assert second.state is RequestState.WAITING
    fence.release()
    bench.run()
    assert second.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("field", ["context_length", "max_rows", "max_sequences", "prefill_chunk"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} must be at least 1"):
        SchedulerConfig(**{"context_length": 8, field: 0})
    with pytest.raises(UsageError, match="max_sequences 300 exceeds max_rows 256"):
        SchedulerConfig(context_length=8, max_sequences=300)


@pytest.mark.parametrize("watermark", [-0.01, 1.0, float("nan")])
def test_the_watermark_is_a_share_of_the_pool(watermark: float) -> None:
    with pytest.raises(UsageError, match="watermark is a share of the pool"):
        SchedulerConfig(context_length=8, watermark=watermark)


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**32 + 5])
def test_an_id_that_int32_would_turn_into_another_is_refused(wrong: int) -> None:
    bench = Bench()
    with pytest.raises(RequestRefused, match=rf"token ids are 0\.\.2147483647, got .*{wrong}"):
        bench.scheduler.submit(np.array([5, wrong]), HOME, 4)
    assert bench.scheduler.submit(np.array([2**31 - 1]), HOME, 4).tokens.tolist() == [2**31 - 1]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_cannot_be_planned_takes_no_slots(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    first, second = bench.submit(6), bench.submit(3, start=50)
    bench.step()
    third = bench.submit(9, start=90)
    before = [request.table.length for request in (first, second)]
    with monkeypatch.context() as patch:

        def refuse(_: object) -> StepPlan:
            bench.scheduler.end(second, FinishReason.ABORTED)  # its client went away meanwhile
            raise error

        patch.setattr(StepPlan, "build", refuse)
        with pytest.raises(error):
            bench.scheduler.schedule()
    assert [request.table.length for request in (first, third)] == [before[0], 0]
    assert second.finish_reason is FinishReason.ABORTED
    assert [request.in_flight for request in (first, third)] == [False, False]
    assert chunks(bench.step()) == [(first.id, 6, 1, True), (third.id, 0, 9, True)]
    bench.run()
    assert bench.pool.used == 0

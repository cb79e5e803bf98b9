from __future__ import annotations

import numpy as np
import pytest

from hostcache import FinishReason, RequestState, SchedulerConfig, StepPlan
from hostcache.errors import RequestFailed, RequestRefused, RockpageError, UsageError
from tests.hostcache.bench import HOME, Bench, chunks


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
    bench = Bench(blocks=7, max_skips=0)
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


def test_what_this_step_computes_of_a_prompt_is_not_kept_for_it_a_second_time() -> None:
    """The first one's two blocks are taken; three and the watermark are just what is left of six."""
    bench = Bench(blocks=6)
    bench.submit(8)
    bench.submit(9, start=100)
    assert chunks(bench.step()) == [(1, 0, 8, True), (2, 0, 9, True)]


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


def test_the_token_of_a_step_in_which_a_decoding_request_was_ended_is_not_its_own() -> None:
    bench = Bench()
    request, other = bench.submit(5), bench.submit(5, start=100)
    bench.step()
    plan = bench.scheduler.schedule()
    assert plan.decodes == [request, other]
    bench.scheduler.end(request, FinishReason.ABORTED)
    bench.scheduler.commit(plan, [7, 8], [False, False])
    assert request.finished
    assert (len(request.output), len(other.output)) == (1, 2)


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


def test_a_step_that_cannot_be_planned_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    first, second = bench.submit(6), bench.submit(6, start=100)
    bench.step()
    lengths = [first.table.length, second.table.length]
    with monkeypatch.context() as patch:
        patch.setattr(StepPlan, "build", lambda *_: 1 // 0)
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


def test_blocks_that_somebody_else_keeps_are_named_instead_of_waited_for() -> None:
    bench = Bench(blocks=4)
    theirs = bench.cache.table()
    theirs.append(9)
    request = bench.submit(8, max_tokens=1)
    with pytest.raises(RockpageError, match="0 run, 1 of 4 blocks are available and no request holds"):
        bench.scheduler.schedule()
    theirs.release()
    bench.run()
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("field", ["context_length", "max_rows", "max_sequences", "prefill_chunk"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} must be at least 1"):
        SchedulerConfig(**{"context_length": 8, field: 0})  # type: ignore[arg-type] # the field's name varies
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

        def refuse(*_: object) -> StepPlan:
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

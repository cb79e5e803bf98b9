"""Prompts that begin alike and arrive together: the shared part is computed once."""

from __future__ import annotations

from hostcache import FinishReason, Namespace, RequestState
from tests.hostcache.bench import HOME, Bench, chunks


def test_two_equal_prompts_in_one_step_compute_the_shared_part_once() -> None:
    bench = Bench(blocks=40)
    first, second = bench.submit(22, max_tokens=2), bench.submit(22, max_tokens=2)
    assert chunks(bench.step()) == [(first.id, 0, 22, True)]
    assert second.state is RequestState.WAITING
    assert chunks(bench.step()) == [(first.id, 22, 1, True), (second.id, 20, 2, True)]
    bench.run()
    assert (first.computed_tokens, second.computed_tokens) == (23, 3)


def test_a_prompt_waits_for_the_whole_shared_part_and_no_longer() -> None:
    bench = Bench(blocks=60, max_rows=64, prefill_chunk=8)
    long = bench.submit(40)
    other = bench.scheduler.submit([*range(20), 900, 901, 902], HOME, 5)
    plans = [chunks(bench.step()) for _ in range(4)]
    assert plans[:3] == [[(long.id, start, 8, False)] for start in (0, 8, 16)]
    # Five blocks are shared; then the first one's next block is another than the second one's.
    assert plans[3] == [(long.id, 24, 8, False), (other.id, 20, 3, True)]


def test_the_wait_is_bounded() -> None:
    bench = Bench(blocks=60, max_rows=64, prefill_chunk=4, max_dedup_steps=2)
    bench.submit(40)
    second = bench.submit(40)
    assert [len(bench.step().chunks) for _ in range(3)] == [1, 1, 2]
    assert second.hit_tokens == 8  # what had been published by then


def test_others_do_not_wait_behind_one_that_waits_for_a_shared_part() -> None:
    bench = Bench(blocks=60, max_rows=64, prefill_chunk=4)
    bench.submit(40)
    twin, stranger = bench.submit(40), bench.submit(4, start=500)
    bench.step()
    assert (twin.state, stranger.state, twin.skips) == (RequestState.WAITING, RequestState.RUNNING, 0)


def test_when_the_first_is_aborted_the_second_goes_on_from_what_was_published() -> None:
    bench = Bench(blocks=60, prefill_chunk=8)
    first, second = bench.submit(40), bench.submit(40)
    bench.step()
    bench.scheduler.end(first, FinishReason.ABORTED)
    assert chunks(bench.step()) == [(second.id, 8, 8, False)]


def test_when_the_first_is_preempted_the_second_does_not_wait_for_it() -> None:
    bench = Bench(blocks=14, max_sequences=1, prefill_chunk=8)
    first = bench.submit(40)
    bench.step()
    urgent = bench.submit(40, priority=1)
    assert chunks(bench.step()) == [(urgent.id, 8, 8, False)]
    assert first.state is RequestState.PREEMPTED


def test_nobody_waits_for_one_of_a_lower_level() -> None:
    bench = Bench(blocks=60, prefill_chunk=8)
    bench.submit(40)
    bench.step()
    urgent = bench.submit(40, priority=1)
    assert (urgent.id, 8, 8, False) in chunks(bench.step())


def test_what_another_namespace_computes_is_not_waited_for() -> None:
    bench = Bench(blocks=60)
    bench.submit(20)
    bench.scheduler.submit(range(20), Namespace("model", salt="tenant"), 5)
    assert len(bench.step().chunks) == 2


def test_prompts_shorter_than_a_block_share_nothing_to_wait_for() -> None:
    """What one computes of the other, but for the token that is always computed, is published at its end only."""
    bench = Bench(blocks=60)
    bench.submit(3)
    bench.submit(4)
    assert len(bench.step().chunks) == 2

"""Tokens that are proposed for a sequence, computed beside its newest one, and kept as far as they prove right."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache import FinishReason, Request
from tests.hostcache.bench import Bench, chunks


def guesses(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def decoding(bench: Bench, length: int = 6, max_tokens: int = 20) -> Request:
    request = bench.submit(length, max_tokens)
    bench.step()
    return request


def commit(bench: Bench, drafts: dict[Request, NDArray[np.int32]], tokens: list[int], stop: int = -1) -> None:
    """A step that gives these tokens, of which one may end its request."""
    plan = bench.scheduler.schedule(drafts)
    bench.scheduler.commit(plan, tokens, [index == stop for index in range(len(tokens))])
    bench.pool.check()
    bench.prefix.check()


def test_guesses_are_computed_behind_the_newest_token_and_each_row_gives_one() -> None:
    bench = Bench()
    request = decoding(bench)
    plan = bench.scheduler.schedule({request: guesses(7, 8, 9)})
    assert plan.tokens.tolist() == [7, 7, 8, 9]
    assert plan.positions.tolist() == [6, 7, 8, 9]
    assert plan.logit_rows.tolist() == [0, 1, 2, 3]
    assert plan.sampling == [request] * 4
    assert plan.context_lens.tolist() == [10]


def test_what_is_right_is_kept_with_the_token_behind_it_and_the_rest_is_taken_back() -> None:
    bench = Bench()
    request = decoding(bench)
    commit(bench, {request: guesses(7, 8, 9, 1, 2)}, [7, 8, 5, 1, 2, 3])  # a 5 stands where 9 was guessed
    assert request.output.tolist() == [7, 7, 8, 5]
    assert (request.computed, request.table.length, len(request.table.blocks)) == (9, 9, 3)
    assert (bench.scheduler.stats.drafted_tokens, bench.scheduler.stats.accepted_tokens) == (5, 2)
    plan = bench.step()
    assert chunks(plan) == [(request.id, 9, 1, True)]
    assert plan.tokens.tolist() == [5]


def test_all_may_be_right_and_all_wrong() -> None:
    bench = Bench()
    request = decoding(bench)
    commit(bench, {request: guesses(1, 2)}, [1, 2, 3])
    assert request.output.tolist() == [7, 1, 2, 3]
    commit(bench, {request: guesses(1, 2)}, [4, 2, 3])
    assert request.output.tolist() == [7, 1, 2, 3, 4]


def test_nothing_counts_behind_a_token_that_ends_the_answer() -> None:
    bench = Bench()
    request = decoding(bench)
    commit(bench, {request: guesses(1, 2, 3)}, [1, 2, 3, 4], stop=1)
    assert request.output.tolist() == [7, 1, 2]
    assert request.finish_reason is FinishReason.STOP
    assert bench.pool.used == 0


def test_an_answer_ends_where_it_would_have_ended() -> None:
    bench = Bench()
    request = decoding(bench, max_tokens=4)
    plan = bench.scheduler.schedule({request: guesses(7, 7, 7, 7, 7)})
    assert plan.rows == 3  # one of four is there, and the last one is never computed
    bench.scheduler.commit(plan, [7, 7, 7], [False] * 3)
    assert request.output.tolist() == [7] * 4
    assert request.finish_reason is FinishReason.LENGTH


def test_guesses_take_no_block_that_was_promised_and_nobody_gives_way_for_them() -> None:
    bench = Bench(blocks=7, prefill_chunk=4)
    request = decoding(bench, length=4)  # in the next step it takes its second block
    prompt = bench.submit(13, max_tokens=3, start=100)  # four blocks, of which it has one after this step
    bench.step()
    assert (bench.pool.free, prompt.promised) == (4, 3)  # the next step takes one
    plan = bench.scheduler.schedule({request: guesses(*[7] * 8)})  # which need two
    assert chunks(plan) == [(prompt.id, 4, 4, False), (request.id, 5, 3, True)]  # up to the end of its block
    bench.scheduler.rollback(plan)
    assert prompt.preemptions == request.preemptions == 0


def test_guesses_fill_up_the_last_block_when_there_is_no_other() -> None:
    bench = Bench(blocks=2)
    request = decoding(bench, length=4)
    plan = bench.scheduler.schedule({request: guesses(7, 7, 7, 7, 7, 7)})
    assert chunks(plan) == [(request.id, 4, 4, True)]


def test_a_step_that_is_taken_back_leaves_no_guess() -> None:
    bench = Bench()
    request = decoding(bench)
    bench.scheduler.rollback(bench.scheduler.schedule({request: guesses(1, 2, 3, 4, 5, 6)}))
    assert (request.tokens.tolist(), request.table.length) == ([0, 1, 2, 3, 4, 5, 7], 6)
    assert chunks(bench.step()) == [(request.id, 6, 1, True)]
    bench.run()
    assert request.output.tolist() == [7] * 20


def test_guesses_stay_within_the_rows_of_a_step() -> None:
    bench = Bench(max_rows=6, max_sequences=4, blocks=40)
    first, second = decoding(bench, max_tokens=30), bench.submit(4, max_tokens=30, start=50)
    bench.step()
    plan = bench.scheduler.schedule(dict.fromkeys((first, second), guesses(7, 7, 7)))
    assert plan.rows == 6
    assert [(chunk.request.id, chunk.drafted) for chunk in plan.chunks] == [(first.id, 3), (second.id, 1)]


def test_guesses_wait_when_the_time_of_a_step_is_used_up() -> None:
    bench = Bench(step_seconds=0.001, blocks=40)
    request = decoding(bench)
    for _ in range(4):
        bench.step(seconds=1.0)
    assert bench.scheduler.schedule({request: guesses(7, 7, 7)}).rows == 1


def test_whoever_is_aborted_in_the_step_keeps_nothing() -> None:
    bench = Bench()
    request = decoding(bench)
    plan = bench.scheduler.schedule({request: guesses(1, 2)})
    bench.scheduler.end(request, FinishReason.ABORTED)
    bench.scheduler.commit(plan, [1, 2, 3], [False] * 3)
    assert request.output.tolist() == [7]
    assert (bench.pool.used, request.finish_reason) == (0, FinishReason.ABORTED)


def test_a_fork_goes_on_from_what_was_accepted() -> None:
    bench = Bench(blocks=40)
    request = decoding(bench)
    commit(bench, {request: guesses(1, 2, 3)}, [1, 9, 3, 4])
    child = bench.scheduler.fork(request)
    assert child.output.tolist() == [7, 1, 9]
    commit(bench, dict.fromkeys((request, child), guesses(5, 6)), [5, 6, 4, 5, 8, 4])
    assert request.output.tolist() == [7, 1, 9, 5, 6, 4]
    assert child.output.tolist() == [7, 1, 9, 5, 8]


def test_guesses_for_those_that_do_not_decode_are_left_alone() -> None:
    bench = Bench(prefill_chunk=4)
    request = bench.submit(6)
    assert chunks(bench.scheduler.schedule({request: guesses(1, 2)})) == [(request.id, 0, 4, False)]

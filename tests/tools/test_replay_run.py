"""Traces small enough to be worked out on paper, and books that must balance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hostcache import KVGeometry, SchedulerConfig
from hostcache.codec import FP16, INT4, INT8, Codec
from hostcache.errors import BlockStateError, UsageError
from tools import replay_run
from tools.replay_cost import MachineCost
from tools.replay_measure import Measurement
from tools.replay_report import as_json
from tools.replay_run import Replay
from tools.replay_setup import Setup, contiguous, unchunked
from tools.replay_swap import ModelledSwap
from tools.replay_trace import TraceRequest

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
COST = MachineCost(step=1.0, row=0.1, token=0.01)


def setup_of(
    blocks: int = 8,
    cost: MachineCost = COST,
    *,
    context: int = 64,
    sequences: int = 4,
    chunk: int = 64,
    waiting: int = 100,
) -> Setup:
    config = SchedulerConfig(
        context_length=context, max_sequences=sequences, prefill_chunk=chunk, max_waiting=waiting, watermark=0.0
    )
    return Setup(GEOMETRY, blocks, config, cost)


def replayed(setup: Setup, *trace: TraceRequest, bounds: tuple[float, ...] = ()) -> Measurement:
    measurement = Measurement(setup.blocks, GEOMETRY.block_tokens, bounds)
    return Replay(setup, measurement).run(trace)


def test_two_requests_take_what_paper_says() -> None:
    """Step by step, with 1 s a step, 0.1 s a row and 0.01 s a token held:

    - 0.00 to 1.55: the first prompt, 5 rows and tokens. Its first token comes.
    - 1.55 to 3.04: the second prompt, 3 rows, beside one row of the first; 6 + 3 tokens. A token for each.
    - 3.04 to 4.35: one row each, 7 + 4 tokens. Both end.
    """
    measured = replayed(setup_of(), TraceRequest(0.0, 5, 3), TraceRequest(0.5, 3, 2))
    assert measured.steps == 3
    assert measured.seconds == pytest.approx(4.35)
    assert measured.stats.computed_tokens == 5 + (1 + 3) + 2
    outcomes = measured.outcomes
    assert (outcomes.requests, outcomes.finished) == (2, 2)
    assert outcomes.first_token.total == pytest.approx(1.55 + (3.04 - 0.5))
    assert (outcomes.first_token.smallest, outcomes.first_token.largest) == pytest.approx((1.55, 2.54))
    assert measured.queue.total == pytest.approx(0.0 + (1.55 - 0.5))
    assert measured.gap.count == 3
    assert measured.gap.largest == pytest.approx(1.49)
    assert measured.gap.total == pytest.approx(1.49 + 2 * 1.31)
    # Blocks of 4: two for the first, one for the second from the second step on.
    tokens = 5 * 1.55 + 9 * 1.49 + 11 * 1.31
    blocks = 2 * 1.55 + 3 * 1.49 + 3 * 1.31
    assert measured.utilisation == pytest.approx(tokens / (4 * blocks))
    assert measured.waste == pytest.approx(1 - tokens / (4 * blocks))  # nothing is shared
    assert measured.used_share == pytest.approx(blocks / (8 * 4.35))
    assert measured.trace_utilisation == pytest.approx((8 + 5) / (8 + 8))
    assert (measured.idle_seconds, measured.leaked_blocks) == (0.0, 0)
    assert measured.drain_seconds == pytest.approx(4.35 - 0.5)


def test_idle_time_is_passed_over() -> None:
    measured = replayed(setup_of(), TraceRequest(0.0, 1, 1), TraceRequest(1e6, 1, 1))
    assert measured.steps == 2
    assert measured.seconds == pytest.approx(1e6 + 1.11)
    assert measured.idle_seconds == pytest.approx(1e6 - 1.11)
    assert measured.queue.largest == 0.0


def test_prompts_that_begin_alike_share_blocks() -> None:
    """Eight tokens in common, two blocks; the second request comes while the first still runs."""
    measured = replayed(
        setup_of(), TraceRequest(0.0, 9, 3, prefix="a", prefix_tokens=8), TraceRequest(1.0, 9, 1, "a", 8)
    )
    assert measured.stats.computed_tokens == 9 + 2 + 1
    assert measured.hit_rate == pytest.approx(8 / 18)
    # 0 to 1.99 s: 9 tokens in 3 blocks. To 3.39 (1 + 2 * 0.1 + 19 * 0.01): 10 and 9, in 3 + 3 blocks, 2 of them the
    # same. To 4.60 (1 + 0.1 + 11 * 0.01): 11 in 3.
    held = 3 * 1.99 + 4 * 1.39 + 3 * 1.21
    assert measured.used_share == pytest.approx(held / (8 * 4.59))
    empty = 3 * 1.99 + (2 + 3) * 1.39 + 1 * 1.21
    assert measured.waste == pytest.approx(empty / (4 * held))


def test_another_name_is_another_text() -> None:
    measured = replayed(setup_of(), TraceRequest(0.0, 9, 1, "a", 8), TraceRequest(9.0, 9, 1, "b", 8))
    assert measured.hit_rate == 0.0


def test_equal_requests_share_nothing_but_their_prefix() -> None:
    measured = replayed(setup_of(), TraceRequest(0.0, 9, 1), TraceRequest(9.0, 9, 1), TraceRequest(20.0, 9, 1, "a", 4))
    assert measured.hit_rate == 0.0


def test_who_gives_up_is_gone_with_the_step() -> None:
    """Steps of a second: at 2.0 the second has ended, and the client gives up at 1.5."""
    setup = setup_of(cost=MachineCost(step=1.0, row=0.0, token=0.0))
    measured = replayed(setup, TraceRequest(0.0, 4, 50, abort=1.5), TraceRequest(10.0, 4, 1, abort=99.0))
    outcomes = measured.outcomes
    assert (outcomes.finished, outcomes.aborted, measured.steps, measured.leaked_blocks) == (1, 1, 3, 0)
    assert measured.seconds == pytest.approx(11.0)


def test_who_gives_up_while_waiting_was_never_computed() -> None:
    measured = replayed(setup_of(sequences=1), TraceRequest(0.0, 4, 5), TraceRequest(0.1, 4, 5, abort=2.0))
    assert (measured.outcomes.aborted, measured.stats.computed_tokens) == (1, 4 + 4)
    assert measured.queue.count == 1


def test_a_full_queue_refuses_with_a_reason() -> None:
    """One runs from 0 on, one may wait; the third of the same moment finds the first still waiting."""
    trace = [TraceRequest(0.0, 2, 1), TraceRequest(0.0, 2, 1), TraceRequest(5.0, 2, 1)]
    measured = replayed(setup_of(waiting=1), *trace)
    assert (measured.outcomes.finished, measured.outcomes.refused) == (2, 1)
    assert list(measured.reasons) == ["N requests wait already, and no more than N may: try again later"]


def test_what_never_fits_is_refused_and_what_outgrows_the_pool_fails() -> None:
    """Two blocks of 4: the ninth token finds no room."""
    measured = replayed(setup_of(blocks=2), TraceRequest(0.0, 9, 1), TraceRequest(0.0, 4, 50), TraceRequest(90.0, 4, 2))
    outcomes = measured.outcomes
    assert (outcomes.refused, outcomes.failed, outcomes.finished) == (1, 1, 1)
    assert sum(measured.reasons.values()) == 2
    assert any("the whole pool has N" in reason for reason in measured.reasons)
    assert any("the pool of N blocks of N has no room for the next one" in reason for reason in measured.reasons)


def test_what_was_swapped_out_is_not_computed_again() -> None:
    """Five blocks of 4. Both prompts of 7 take two; the first answer needs a third block, and at its thirteenth token
    one of the second's. That has 8 tokens computed; of its two blocks one is overwritten: without swap 4 are lost.
    """
    trace = [TraceRequest(0.0, 7, 8), TraceRequest(0.0, 7, 4)]
    setup = setup_of(blocks=5, cost=MachineCost(1.0, 1.0, 0.0))
    without, with_swap = replayed(setup, *trace), replayed(replace(setup, swap_bytes=2 * GEOMETRY.block_bytes), *trace)
    too_small = replayed(replace(setup, swap_bytes=GEOMETRY.block_bytes), *trace)
    assert [run.outcomes.finished for run in (without, with_swap, too_small)] == [2, 2, 2]
    assert [run.stats.preemptions for run in (without, with_swap, too_small)] == [1, 1, 1]
    assert [run.stats.swapped_out for run in (without, with_swap, too_small)] == [0, 1, 0]
    alone = (7 + 7) + (7 + 3)
    assert [run.stats.computed_tokens for run in (without, with_swap, too_small)] == [alone + 4, alone, alone + 4]
    # Without: 14 rows, 2, five times 1 row, then 5 of the second at once and 1. With swap: 1 instead of 5.
    assert without.seconds - with_swap.seconds == pytest.approx(4.0)


def test_a_swap_space_counts_its_blocks() -> None:
    swap = ModelledSwap(nbytes=1000, block_bytes=101, unit_bytes=125)
    assert swap.put(range(10)) is None
    ticket = swap.put([5, 7])
    assert ticket is not None
    assert (ticket.blocks, swap.free, swap.used) == (2, 6, 2)
    with pytest.raises(BlockStateError, match="2 blocks were put, 3 are to be filled"):
        swap.take(ticket, [1, 2, 3])
    swap.take(ticket, [1, 2])
    assert (swap.free, swap.used) == (8, 0)
    assert swap.seconds_for(2) == pytest.approx(4e-8)  # 404 bytes at 10.1 GB/s
    assert swap.seconds_passed() == pytest.approx(4e-8)
    assert swap.seconds_passed() == 0.0
    with pytest.raises(BlockStateError, match="swap ticket 1 was used before"):
        swap.drop(ticket)


@pytest.mark.parametrize(("codec", "sessions"), [(FP16, 1), (INT8, 3), (INT4, 7)], ids=str)
def test_leaner_blocks_are_more_sessions(codec: Codec, sessions: int) -> None:
    """Two extents: sessions of one block run at once in all blocks but one, which is left for growth; others wait."""
    cost, free = MachineCost(1.0, 0.0, 0.0), replace(setup_of().config, max_sequences=8)
    setup = Setup(GEOMETRY, 2 * codec.blocks_per_extent, free, cost, codec=codec)
    measured = replayed(setup, *(TraceRequest(0.0, 3, 1) for _ in range(8)))
    assert (measured.steps, measured.outcomes.finished, measured.leaked_blocks) == (-(-8 // sessions), 8, 0)


def test_a_prefix_is_found_in_every_codec() -> None:
    setup = replace(setup_of(blocks=8), codec=INT8)
    asked = [TraceRequest(0.0, 9, 1, prefix="a", prefix_tokens=8), TraceRequest(9.0, 9, 1, "a", 8)]
    assert replayed(setup, *asked).hit_rate == pytest.approx(8 / 18)


def test_lean_blocks_swap_in_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of 8 and blocks of 4 tokens: int8 has 4 * (8 + 2) bytes for K, and for V, each padded to 48; in fp16
    that is 64, and a unit is 64 where two of either fit into an extent, rounded up to 128."""
    made: list[tuple[int, int, int]] = []

    class Spy(ModelledSwap):
        def __init__(self, nbytes: int, block_bytes: int, unit_bytes: int) -> None:
            made.append((nbytes, block_bytes, unit_bytes))
            super().__init__(nbytes, block_bytes, unit_bytes)

    monkeypatch.setattr(replay_run, "ModelledSwap", Spy)
    for codec in (FP16, INT8):
        replayed(replace(setup_of(), codec=codec, swap_bytes=1000), TraceRequest(0.0, 1, 1))
    assert made == [(1000, 128, 128), (1000, 96, 128)]


def test_an_answer_ends_with_the_context() -> None:
    measured = replayed(setup_of(context=8), TraceRequest(0.0, 5, 50))
    assert (measured.outcomes.finished, measured.gap.count) == (1, 2)  # three tokens


def test_contiguous_sessions_hold_their_whole_context() -> None:
    """Ten blocks hold two contexts of 16 tokens: the third of three requests waits for the first to end."""
    paged = setup_of(blocks=10, cost=MachineCost(1.0, 0.0, 0.0), context=16)
    setup = contiguous(paged)
    assert (setup.reserved_blocks, setup.config.max_sequences) == (4, 2)
    trace = [TraceRequest(0.0, 5, 1, "a", 4) for _ in range(3)]
    measured = replayed(setup, *trace)
    # One second with two sessions of 5 tokens, one with one.
    assert measured.utilisation == pytest.approx(5 / 16)
    assert measured.waste == pytest.approx(11 / 16)
    assert measured.used_share == pytest.approx((8 + 4) / 20)
    assert (measured.hit_rate, measured.cached_share) == (0.0, 0.0)
    assert (measured.queue.total, measured.steps) == (1.0, 2)
    # With one pool, two of the three wait for the blocks of what all begin with, and compute the rest together.
    shared = replayed(paged, *trace)
    assert (shared.queue.total, shared.steps, shared.stats.computed_tokens) == (2.0, 2, 5 + 1 + 1)


def test_a_pool_that_holds_no_context_has_no_contiguous_session() -> None:
    with pytest.raises(UsageError, match="of 64 tokens takes 16 blocks, the pool has 8: give --context less"):
        contiguous(setup_of())


def test_without_chunks_a_prompt_takes_one_step() -> None:
    setup = setup_of(chunk=4)
    assert replayed(setup, TraceRequest(0.0, 12, 1)).steps == 3
    assert replayed(unchunked(setup), TraceRequest(0.0, 12, 1)).steps == 1
    setup = setup_of(blocks=128, context=512)  # a step has 256 rows by default
    assert replayed(setup, TraceRequest(0.0, 300, 1)).steps == 5
    assert replayed(unchunked(setup), TraceRequest(0.0, 300, 1)).steps == 1


def test_phases_are_told_apart_by_arrival() -> None:
    trace = [TraceRequest(float(second), 1, 1) for second in (0, 9, 10, 30, 31)]
    measured = replayed(setup_of(), *trace, bounds=(10.0, 20.0))
    assert [phase.requests for phase in measured.phases] == [2, 1, 2]
    assert [phase.finished for phase in measured.phases] == [2, 1, 2]
    assert measured.outcomes.first_token.count == 5


def test_the_same_trace_gives_the_same_figures() -> None:
    trace = [TraceRequest(0.3 * number, 3 + number % 7, 1 + number % 5, "a", 2) for number in range(200)]
    first, second = (json.dumps(as_json(replayed(setup_of(blocks=12), *trace))) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("leak", ["a reference", "a cached block"])
def test_books_that_do_not_balance_stop_the_replay(leak: str) -> None:
    replay = Replay(setup_of(), Measurement(8, 4))

    def trace() -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, 5, 1)
        yield TraceRequest(9.0, 5, 1)  # asked for ahead of its time: the first has not been computed yet
        if leak == "a reference":
            replay._pool.allocate(1)  # nobody's
        else:
            replay._pool._cached.popitem()
        yield TraceRequest(20.0, 5, 1)

    with pytest.raises(
        BlockStateError, match=r"after step 1 the pool counts \d references to \d blocks, but tables hold"
    ):
        replay.run(trace())


def test_every_so_often_every_block_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block in two states keeps the sums right."""
    monkeypatch.setattr(replay_run, "FULL_CHECK_STEPS", 2)
    replay = Replay(setup_of(), Measurement(8, 4))

    def trace() -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, 5, 1)
        yield TraceRequest(9.0, 1, 9)
        free = replay._pool._free
        free[-1] = free[-2]
        yield TraceRequest(99.0, 1, 1)

    with pytest.raises(BlockStateError, match="an extent is twice in the free heap"):
        replay.run(trace())
    assert replay._measure.steps == 2

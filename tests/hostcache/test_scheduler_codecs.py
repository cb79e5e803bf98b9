"""Requests of several codecs in one pool: what each is promised, and who gives way to whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hostcache import (
    AttentionWindow,
    FinishReason,
    KVGeometry,
    PagedKVCache,
    Request,
    RequestState,
    Scheduler,
    SchedulerConfig,
    SwapSpace,
)
from hostcache.codec import FP16, INT4, INT8, Codec
from hostcache.errors import RequestRefused, UsageError
from hostcache.prefix_caches import PrefixCaches
from hostcache.promises import Promises
from hostcache.relief import Relief

from .bench import HOME, Steps


class Codecs(Steps):
    """A scheduler over extents of four units; blocks hold four tokens, so an extent 4, 8 or 16 of them."""

    def __init__(self, extents: int, swap_units: int = 0, leanest: Codec = INT4, **limits: Any) -> None:
        geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
        unit = PagedKVCache.create(geometry, 1 << 20, leanest).unit_bytes
        self.cache = PagedKVCache.create(geometry, extents * leanest.blocks_per_extent * unit, leanest)
        self.extents = self.cache.extents
        self.prefix: PrefixCaches = PrefixCaches(self.cache.pools)
        self.swap = SwapSpace(swap_units * unit, self.cache) if swap_units else None
        config = SchedulerConfig(**{"context_length": 200, "max_rows": 64, "max_sequences": 8, **limits})
        self.turns: list[Codec] = []
        self.scheduler = Scheduler(
            self.cache, self.prefix, config, clock=lambda: 0.0, swap=self.swap, turn=self.turn_keys
        )

    def turn_keys(self, source: int, destination: int, _by: int, codec: Codec = FP16) -> None:
        self.cache.copy_block(source, destination, 4, codec)
        self.turns.append(codec)

    def submit(self, length: int, codec: Codec, max_tokens: int = 50, start: int = 0, **terms: Any) -> Request:
        return self.scheduler.submit(np.arange(start, start + length), HOME, max_tokens, codec=codec, **terms)


def test_a_plan_says_the_codec_of_each_sequence_and_row() -> None:
    home = Codecs(extents=4, max_rows=5, max_sequences=3, prefill_chunk=4)
    home.submit(4, FP16)
    assert home.step().codecs is None
    home.submit(3, INT4, start=100)
    home.submit(3, INT8, start=200)
    plan = home.step()  # one row decodes, three are int4's, one is int8's
    assert plan.codecs is not None
    assert plan.row_codecs is not None
    assert plan.codecs.dtype == np.uint8
    assert plan.codecs.tolist() == [0, 2, 1]
    assert plan.row_codecs.tolist() == [0, 2, 2, 2, 1]
    home.step()
    decodes = home.step()
    assert decodes.codecs is not None
    assert decodes.codecs.tolist() == [0, 2, 1]
    assert home.scheduler.running[0].codec is FP16
    home.scheduler.end(home.scheduler.running[1], FinishReason.ABORTED)
    home.scheduler.end(home.scheduler.running[1], FinishReason.ABORTED)
    assert home.step().codecs is None


def test_requests_of_several_codecs_that_need_a_block_at_once_get_one_each() -> None:
    home = Codecs(extents=6)
    for number, codec in enumerate((FP16, INT8, INT4, INT4, FP16)):
        home.submit(4, codec, start=100 * number)
    home.step()
    plan = home.step()  # each one's fifth token
    assert plan.context_lens.tolist() == [5] * 5
    # fp16 in extents 0 and 3, int8 in 1, int4 in 2: in the order of ids 0, 4, 8, 9, 12 for the first blocks.
    assert plan.tables[:, 0].tolist() == [0, 4, 8, 9, 12]
    assert sorted(plan.tables[:, 1].tolist()) == [6, 10, 11, 16, 20]
    assert plan.slots.tolist() == (4 * plan.tables[:, 1]).tolist()


def test_where_not_all_can_grow_the_one_in_front_does() -> None:
    home = Codecs(extents=3)
    upper, lower = home.submit(15, INT4, priority=1), home.submit(3, FP16, start=100)
    home.step()
    home.step()
    assert (upper.computed, lower.computed, home.extents.common) == (16, 4, 1)
    home.step()  # both need a block, and there is one extent
    assert (upper.computed, len(upper.table.blocks)) == (17, 5)
    assert (lower.computed, len(lower.table.blocks), lower.preemptions) == (4, 1, 0)


def test_a_prompt_is_shared_with_requests_of_the_same_codec_alone() -> None:
    home = Codecs(extents=4)
    for codec in (FP16, INT8, INT4):
        first = home.submit(9, codec, max_tokens=1)
        home.run()
        again = home.submit(9, codec, max_tokens=1)
        home.run()
        assert (first.hit_tokens, again.hit_tokens) == (0, 8)


def test_a_prompt_of_another_codec_is_not_waited_for() -> None:
    home = Codecs(extents=4, prefill_chunk=4)
    requests = [home.submit(9, codec) for codec in (INT4, INT8, INT4)]
    home.step()
    assert [request.state for request in requests] == [
        RequestState.RUNNING,
        RequestState.RUNNING,
        RequestState.WAITING,  # for the first, which computes what both begin with
    ]


def test_forks_and_branches_keep_the_codec() -> None:
    home = Codecs(extents=4)
    request = home.submit(6, INT8)
    branch = home.scheduler.branch(request)
    home.step()
    home.step()
    fork = home.scheduler.fork(request)
    assert {branch.codec, fork.codec} == {INT8}
    assert fork.table.blocks == request.table.blocks
    assert branch.table.blocks[0] == request.table.blocks[0]
    home.step()
    assert fork.table.blocks[-1] != request.table.blocks[-1]  # each writes into a copy of its own


def test_what_can_never_fit_depends_on_the_codec() -> None:
    home = Codecs(extents=2)
    with pytest.raises(RequestRefused, match="needs 7 blocks, the whole pool has 2"):
        home.submit(28, FP16)
    lean = home.submit(28, INT4, max_tokens=1)
    home.run()
    assert lean.finish_reason is FinishReason.LENGTH
    with pytest.raises(UsageError, match="serves fp16, int8 and no int4: open it for int4"):
        Codecs(extents=2, leanest=INT8).submit(4, INT4)


@pytest.mark.parametrize(("length", "admitted"), [(12, True), (13, False)])
def test_what_other_codecs_were_promised_counts_by_whole_extents(length: int, admitted: bool) -> None:
    home = Codecs(extents=4, prefill_chunk=4)
    home.submit(12, FP16)  # holds one block of three, and was promised two: of four extents one is left
    home.step()
    lean = home.submit(length, INT4, start=100)  # three blocks of the four, and the watermark; or one too many
    home.step()
    assert (lean.state is RequestState.RUNNING) == admitted


def test_promises_that_fit_beside_blocks_in_use_cost_other_codecs_nothing() -> None:
    home = Codecs(extents=2, prefill_chunk=4)
    home.submit(12, INT4)  # one block, and two more in the same extent
    home.step()
    rich = home.submit(4, FP16, start=100)
    home.step()
    assert rich.state is RequestState.WAITING  # for the watermark
    home = Codecs(extents=3, prefill_chunk=4)
    home.submit(12, INT4)
    home.step()
    rich = home.submit(4, FP16, start=100)
    home.step()
    assert rich.state is RequestState.RUNNING


def crowded(*, above: int) -> tuple[Codecs, Request, Request, Request]:
    """An fp16 request that fills its block and needs another; the other extent has two int4 ones."""
    home = Codecs(extents=2)
    rich = home.submit(3, FP16, priority=1)
    home.step()
    left, right = home.submit(6, INT4, start=100), home.submit(2, INT4, start=200, priority=above)
    home.step()
    assert (rich.table.blocks, rich.computed, home.extents.common) == ([0], 4, 0)
    assert len(left.table.blocks) + len(right.table.blocks) == 3
    return home, left, right, rich


def test_those_whose_blocks_share_an_extent_give_way_together_for_another_codec() -> None:
    home, left, right, rich = crowded(above=0)
    home.step()
    assert (left.state, right.state) == (RequestState.PREEMPTED,) * 2
    assert rich.table.blocks == [0, 4]


def test_nobody_gives_way_in_an_extent_that_another_codec_cannot_have() -> None:
    home, left, right, rich = crowded(above=2)
    for _ in range(3):
        home.step()
    assert (left.preemptions, right.preemptions) == (0, 0)
    assert (rich.state, rich.computed) == (RequestState.RUNNING, 4)
    home.scheduler.end(right, FinishReason.ABORTED)
    home.step()  # now the one below it holds the extent alone
    assert left.state is RequestState.PREEMPTED
    assert rich.table.blocks == [0, 4]


@pytest.mark.parametrize(("promised", "rich_gains"), [(0, 1), (3, 0), (4, 1), (7, 0)])
def test_an_extent_that_comes_free_is_of_no_use_where_its_own_codec_was_promised_it(
    promised: int, rich_gains: int
) -> None:
    home = Codecs(extents=3)
    lean = home.submit(3, INT4)
    home.step()
    promises = Promises()
    # Beside the one block in use are three that are free: what was promised of more takes other extents anyway.
    promises.change(lean.pool, promised)
    assert Relief(home.cache.pool_of(FP16), promises, [lean], with_promised=False).blocks == rich_gains
    assert Relief(home.cache.pool_of(INT8), promises, [lean], with_promised=False).blocks == 2 * rich_gains
    assert Relief(lean.pool, promises, [lean], with_promised=False).blocks == 1


def test_one_of_the_same_codec_gives_way_block_by_block() -> None:
    home = Codecs(extents=1)
    upper, lower = home.submit(7, INT4, priority=1), home.submit(4, INT4, start=100)
    home.step()
    fence = home.cache.pools["int4"].fence(lower.table.blocks)
    assert home.cache.pools["int4"].available == 1
    home.step()
    fence.release()
    home.step()
    assert (lower.state, upper.state) == (RequestState.PREEMPTED, RequestState.RUNNING)


@pytest.mark.parametrize("codec", [FP16, INT8, INT4])
def test_who_gave_way_comes_back_from_the_swap_space_in_its_own_codec(codec: Codec) -> None:
    home = Codecs(extents=4, swap_units=8)
    assert home.swap is not None
    lower = home.submit(5, codec, max_tokens=4)
    upper = home.submit(5, INT8, start=200, max_tokens=4, priority=1)
    home.step()
    assert home.scheduler.shed_lowest() is lower
    assert lower.swapped is not None
    assert (lower.swapped.ticket.codec, lower.swapped.ticket.blocks) == (codec, 2)
    assert home.swap.used == 2 * {FP16: 4, INT8: 2, INT4: 1}[codec]
    home.run()
    assert home.scheduler.stats.swapped_in_tokens == 5
    assert (home.swap.used, home.swap.stats.taken_blocks) == (0, 2)
    assert (lower.finish_reason, upper.finish_reason) == (FinishReason.LENGTH,) * 2


def test_keys_are_turned_by_the_codec_of_their_blocks() -> None:
    home = Codecs(extents=8, context_length=16)
    for number, codec in enumerate((FP16, INT8)):
        home.submit(12, codec, 10, start=100 * number, window=AttentionWindow(4), slide=True)
    home.run()
    assert set(home.turns) == {FP16, INT8}

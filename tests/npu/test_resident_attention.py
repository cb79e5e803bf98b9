"""Attention over staged copies that stay: the same bits as without, on a device that accepts no stale byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import BlockTable, KVGeometry, PagedKVCache, Region
from hostcache.errors import UsageError
from npu.attention import AttentionBatch, AttentionRuntime
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.emulated_device import EmulatedDevice, Faults
from npu.placement import ByCost
from npu.staged import StagedAttention, arena_bytes
from tests.npu.paged import batch_of
from tests.npu.test_cost_model import ROUND

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16)
HEADS = 6
BUCKETS = (64, 128)
BUDGET = 1 << 20
DECODE_BYTES = 2 * 12288
"""A decode launch of one sequence in 64 tokens: K 2 * 64 * 24, V 2 * 64 * 16, query and out 2 * 4 * 40 elements, in
pages; of two layers."""


class Conversation:
    """Sequences that grow a token a step, attended by several runtimes over one cache."""

    def __init__(self, lengths: list[int], **options: Any) -> None:
        self.random = np.random.default_rng(3)
        self.cache = PagedKVCache.create(GEOMETRY, 64 * GEOMETRY.block_bytes)
        self.tables = [self.cache.table() for _ in lengths]
        for table, length in zip(self.tables, lengths, strict=True):
            self.grow(table, length)
        self.host = CpuAttention(self.cache, HEADS)
        self.plain = EmulatedAttention(self.cache, HEADS, buckets=BUCKETS, tiled=options.get("tiled", False))
        self.resident = EmulatedAttention(
            self.cache,
            HEADS,
            buckets=BUCKETS,
            host=CpuAttention(self.cache, HEADS),
            **{"resident_bytes": BUDGET, **options},
        )

    def grow(self, table: BlockTable, tokens: int) -> None:
        table.append(tokens)
        for layer in range(GEOMETRY.layers):
            self.write(table, tokens, layer)

    def write(self, table: BlockTable, tokens: int, layer: int) -> None:
        rows = self.random.standard_normal((2, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim), np.float32)
        self.cache.write(layer, table.slots(table.length - tokens, table.length), *rows)

    def step(self, tables: list[BlockTable], tokens: int = 1) -> None:
        """So many tokens of each; all runtimes must agree."""
        for table in tables:
            table.append(tokens)
        batch = self.batch(tables, tokens)
        runtimes: list[AttentionRuntime] = [self.resident, self.plain, self.host]
        for runtime in runtimes:
            runtime.begin_step(batch)
        for layer in range(GEOMETRY.layers):
            for table in tables:
                self.write(table, tokens, layer)
            q = self.random.standard_normal((batch.rows, HEADS, GEOMETRY.head_dim), np.float32)
            resident, plain, exact = (self.attend(runtime, layer, q) for runtime in runtimes)
            if not self.resident.cores.on_host:
                np.testing.assert_array_equal(resident, plain)
            np.testing.assert_allclose(resident, exact, rtol=0, atol=0.004)
        for runtime in runtimes:
            runtime.end_step()

    def batch(self, tables: list[BlockTable], tokens: int) -> AttentionBatch:
        """The newest tokens of each, as rows."""
        return batch_of(
            [list(table.blocks) for table in tables], [table.length for table in tables], [tokens] * len(tables)
        )

    def attend(self, runtime: AttentionRuntime, layer: int, q: NDArray[np.float32]) -> NDArray[np.float32]:
        out = np.full_like(q, np.nan)
        runtime.attend(layer, q, out)
        return out

    @property
    def counts(self) -> tuple[int, int]:
        assert self.resident.residency is not None
        return self.resident.residency.counts.grown, self.resident.residency.counts.whole

    def close(self) -> None:
        for runtime in (self.resident, self.plain, self.host):
            runtime.close()
        self.cache.close()


@pytest.mark.parametrize("tiled", [False, True])
def test_a_batch_that_grows_is_staged_token_by_token_and_attended_with_the_same_bits(*, tiled: bool) -> None:
    """Over block boundaries, and into the next bucket: 62 tokens fit the first, beside the canary."""
    talk = Conversation([40, 57, 3], tiled=tiled)
    for _ in range(12):
        talk.step(talk.tables)
    # Five steps with all three in 64 tokens, then one of them alone in 128 and the others as two.
    assert talk.counts == (2 * (4 + 6 + 6), 2 * 3)
    assert talk.resident.cores.launches == 2 * (5 + 7 * 2)
    assert talk.resident.cores.failures == 0
    talk.close()


def test_a_row_behind_a_tile_attends_the_tiles_own_tokens() -> None:
    """Of 65 tokens, 64 are a tile and the last a row by itself; the first 8 stand where others were staged."""
    talk = Conversation([70])
    talk.step(talk.tables)
    talk.step(talk.tables)
    assert talk.counts == (2, 2)
    talk.tables[0].truncate(60)
    talk.step(talk.tables, tokens=65)
    talk.step(talk.tables)
    assert talk.resident.cores.on_host == 0
    talk.close()


def test_sequences_that_come_go_fork_and_are_taken_back() -> None:
    talk = Conversation([20, 33, 47])
    talk.step(talk.tables)
    fork = talk.tables[1].fork()
    talk.step([*talk.tables, fork])
    talk.tables[0].truncate(10)
    talk.step([*talk.tables, fork])
    talk.tables[2].release()  # and its blocks come back in another order
    talk.grow(talk.tables[2], 5)
    talk.step([talk.tables[2], fork, talk.tables[1], talk.tables[0]])
    talk.step([talk.tables[2], fork, talk.tables[1], talk.tables[0]])
    grown, _ = talk.counts
    assert grown == 2 * 4  # three sequences share the launch of four: each step but the first
    talk.close()


@pytest.mark.parametrize("fault", [lambda run: Faults(failing={run}), lambda run: Faults(stale={run})])
@pytest.mark.parametrize("run", range(6))
def test_a_run_that_goes_wrong_is_run_again_over_what_stays(fault: Callable[[int], Faults], run: int) -> None:
    talk = Conversation([40, 12], faults=fault(run))
    for _ in range(3):
        talk.step(talk.tables)
    assert (talk.resident.cores.failures, talk.resident.cores.on_host) == (1, 0)
    assert talk.counts[1] == 2  # the second run grew by nothing, or by the same token again
    talk.close()


def test_a_run_that_hangs_keeps_its_buffer_and_the_launch_takes_another() -> None:
    talk = Conversation([40, 12], faults=Faults(hanging={0}))
    for _ in range(3):
        talk.step(talk.tables)
    # In the first step layer 0 goes through the arena; from then on there is no idle copy.
    assert talk.counts == (0, 2)
    assert talk.resident.cores.quarantined == [0]


def test_what_the_host_computed_is_staged_whole_the_next_time() -> None:
    """The first two runs fail, on two cores: the host computes layer 0 of step 0, which was staged all the same."""
    talk = Conversation([40], faults=Faults(failing={0, 1}))
    for _ in range(3):
        talk.step(talk.tables)
    assert talk.resident.cores.on_host == 1
    assert talk.counts == (1 + 2 + 2, 2)
    talk.close()


def test_launches_beyond_the_budget_are_staged_as_ever() -> None:
    talk = Conversation([40, 70], resident_bytes=DECODE_BYTES)  # buckets 64 and 128
    for _ in range(3):
        talk.step(talk.tables)
    assert talk.counts == (2 * 2, 2)
    assert talk.resident.cores.launches == 3 * 2 * 2
    talk.close()


def test_a_budget_below_one_launch_keeps_nothing() -> None:
    talk = Conversation([40], resident_bytes=DECODE_BYTES - 1)
    talk.step(talk.tables)
    assert talk.counts == (0, 0)
    talk.close()


def test_chunks_of_a_prompt_are_not_kept() -> None:
    talk = Conversation([40])
    batch = batch_of([list(talk.tables[0].blocks)], [40], [17])
    talk.resident.begin_step(batch)
    talk.attend(talk.resident, 0, np.zeros((17, HEADS, GEOMETRY.head_dim), np.float32))
    assert talk.counts == (0, 0)
    talk.close()


def test_the_cost_of_a_launch_that_stays_staged_is_a_token_of_each_sequence() -> None:
    """K and V of 64 tokens are 10,240 bytes, query and result 640: 1.1 ms at 10 MB/s, and a token of it 0.08. A launch
    takes 0.1 ms, the host 1 ms for 40 tokens of 128 bytes. Of a tile, K, V, 52 rows and a mask are 21,504 bytes, which
    are gathered each time; the host takes 1.8 ms for its arithmetic."""
    talk = Conversation([40])
    model = replace(
        ROUND,
        gather_bytes_per_second=1e7,
        launch_seconds=1e-4,
        host_bytes_per_second=40 * 128 / 1e-3,
        host_multiply_adds_per_second=2 * 16 * 40 * HEADS * 16 / 1.8e-3,
    )
    tile = batch_of([list(talk.tables[0].blocks)], [40], [16])
    where = []
    for budget in (0, BUDGET):
        runtime = EmulatedAttention(
            talk.cache,
            HEADS,
            buckets=BUCKETS,
            host=CpuAttention(talk.cache, HEADS),
            placement=ByCost(model),
            resident_bytes=budget,
        )
        runtime.begin_step(batch_of([list(talk.tables[0].blocks)], [40], [1]))
        runtime.end_step()
        runtime.begin_step(tile)
        runtime.end_step()
        where.append([placed.device for placed in runtime.log.counts])
        runtime.close()
    assert where == [[False, False], [True, False]]
    talk.close()


class CopyingDevice(EmulatedDevice):
    reads_in_place = False


def test_a_device_that_copies_its_operands_gets_no_budget() -> None:
    cache = PagedKVCache.create(GEOMETRY, 4 * GEOMETRY.block_bytes)
    with pytest.raises(UsageError, match=r"1048576 bytes .* emulated device copies what it is given"):
        StagedAttention(cache, HEADS, CopyingDevice, buckets=BUCKETS, resident_bytes=BUDGET)
    StagedAttention(cache, HEADS, CopyingDevice, buckets=BUCKETS).close()


def test_a_negative_budget_is_refused() -> None:
    cache = PagedKVCache.create(GEOMETRY, 4 * GEOMETRY.block_bytes)
    with pytest.raises(UsageError, match="-1 bytes cannot be set aside"):
        EmulatedAttention(cache, HEADS, buckets=BUCKETS, resident_bytes=-1)


def test_the_budget_is_taken_at_start_and_given_back() -> None:
    regions = []

    def take(nbytes: int, _buffer_bytes: int) -> Region:
        regions.append(Region.anonymous(nbytes))
        return regions[-1]

    talk = Conversation([40])
    runtime = StagedAttention(talk.cache, HEADS, EmulatedDevice, buckets=BUCKETS, take=take, resident_bytes=BUDGET)
    assert regions[0].nbytes == arena_bytes(GEOMETRY, HEADS, buckets=BUCKETS) + BUDGET
    batch = AttentionBatch(np.array([0, 1], np.int32), np.array([40], np.int32), talk.tables[0].ids[np.newaxis].copy())
    runtime.begin_step(batch)
    talk.attend(runtime, 0, np.zeros((1, HEADS, GEOMETRY.head_dim), np.float32))
    runtime.end_step()
    runtime.close()
    assert regions[0].buffer.size == 0  # Region.close raises while anybody holds a view
    talk.close()

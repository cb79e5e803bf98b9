"""Windows on a device: what is staged of a context, what is masked, and what stays staged while a window slides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache import BlockTable
from hostcache.errors import NoBucket
from npu.attention import AttentionBatch
from npu.canary import CANARY_TOKENS
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.emulated_device import Faults
from npu.placement import Placed
from tests.npu.paged import batch_of, reference, seen_by
from tests.npu.test_emulated_attention import BUCKETS, HEADS, World
from tests.npu.test_resident_attention import Conversation

TOLERANCE = 4 * (2.0**-11 + 1e-4)
"""Values of four at most, rounded to fp16 once; and some 1e-4 of them for sums in float32."""


class Windowed(World):
    """Sequences with windows; what no row sees holds NaN."""

    def __init__(
        self, lengths: Sequence[int], rows: Sequence[int], windows: Sequence[int], sinks: Sequence[int]
    ) -> None:
        super().__init__(lengths, rows)
        for table, length, count, window, sink in zip(self.tables, lengths, rows, windows, sinks, strict=True):
            seen = {token for row in range(length - count, length) for token in seen_by(row, window, sink)}
            for token in set(range(length)) - seen:
                self.memory.view[table[token // 16], ..., token % 16, :] = np.nan
        self.batch = batch_of(self.tables, list(lengths), list(rows), windows=list(windows), sinks=list(sinks))


@settings(deadline=None, max_examples=80)
@given(data=st.data(), tiled=st.booleans(), resident=st.sampled_from([0, 1 << 20]))
def test_a_device_sees_what_windows_show_and_nothing_else(data: st.DataObject, tiled: bool, resident: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=4))
    rows = [data.draw(st.integers(1, min(length, 140)) | st.just(1)) for length in lengths]
    windows = [data.draw(st.integers(0, 80) | st.just(2**31 - 1)) for _ in lengths]
    sinks = [data.draw(st.integers(0, 40) | st.just(2**31 - 1)) for _ in lengths]
    world = Windowed(lengths, rows, windows, sinks)
    runtime = EmulatedAttention(world.cache, HEADS, cores=1, buckets=BUCKETS, tiled=tiled, resident_bytes=resident)
    with np.errstate(invalid="ignore"):  # the oracle computes with what is hidden, and drops it
        expected = world.expected()
    np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=TOLERANCE)
    assert runtime.cores.failures == 0
    runtime.close()


def test_a_batch_is_padded_with_what_may_be_seen() -> None:
    """Three sequences take a launch of four. Token 80, the first of the first window's block, holds NaN: the canary
    would find it in the fourth's heads."""
    world = Windowed([100, 40, 40], [1, 1, 1], [17, 0, 0], [0, 0, 0])
    runtime = EmulatedAttention(world.cache, HEADS, buckets=BUCKETS)
    with np.errstate(invalid="ignore"):
        expected = world.expected()
    np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=TOLERANCE)
    assert (runtime.cores.launches, runtime.cores.failures) == (1, 0)
    runtime.close()


def test_a_long_context_behind_a_window_takes_a_small_bucket() -> None:
    """A row over 250 tokens with a window of 40 and 4 sinks: a block of sinks, and blocks 13 (of token 210) to 15."""
    world = Windowed([250], [1], [40], [4])
    runtime = EmulatedAttention(world.cache, HEADS, buckets=(64, 128))
    world.attend(runtime)
    assert runtime.log.counts == {Placed("decode", 64, device=True): 1}
    assert 16 + 250 - 208 + CANARY_TOKENS > 64 - 16  # 58 tokens: the bucket has no block to spare
    runtime.close()


def test_without_a_host_a_window_beyond_every_bucket_is_an_error_that_names_it() -> None:
    world = Windowed([250], [1], [200], [0])
    runtime = EmulatedAttention(world.cache, HEADS, buckets=(64, 128))
    with pytest.raises(
        NoBucket, match=r"a context of 202 tokens behind a window of 200 is longer than the 126"
    ) as error:
        world.attend(runtime)
    assert error.value.values["window"] == 200
    runtime.close()


@pytest.mark.parametrize("faults", [Faults(), Faults(failing=range(100))], ids=["beyond", "failed"])
def test_what_the_host_attends_has_its_windows(faults: Faults) -> None:
    """A context that no bucket holds, and launches that fail: rows of a tile and of a shared launch."""
    world = Windowed([250, 100, 90, 95], [1, 20, 1, 1], [200, 30, 0, 17], [3, 2, 0, 20])
    runtime = EmulatedAttention(
        world.cache, HEADS, buckets=(64, 128), faults=faults, host=CpuAttention(world.cache, HEADS)
    )
    with np.errstate(invalid="ignore"):
        expected = world.expected()
    np.testing.assert_allclose(world.attend(runtime), expected, rtol=0, atol=TOLERANCE)
    assert runtime.log.counts[Placed("beyond", 0, device=False)] == 1
    assert runtime.cores.on_host == (2 if faults.failing else 0)
    runtime.close()


@pytest.mark.parametrize("host", [False, True])
def test_layers_with_windows_of_their_own_are_planned_apart(*, host: bool) -> None:
    world = World([200, 30], [1, 1])
    windows = (0, 50)
    runtime = EmulatedAttention(
        world.cache,
        HEADS,
        buckets=(64,) if host else BUCKETS,  # the first sequence's 200 tokens are the host's, its window the device's
        host=CpuAttention(world.cache, HEADS, windows=windows) if host else None,
        windows=windows,
    )
    runtime.begin_step(world.batch)
    for layer in (0, 1, 0):
        out = np.full_like(world.q, np.nan)
        runtime.attend(layer, world.q, out)
        own = batch_of(world.tables, [200, 30], [1, 1], windows=[windows[layer]] * 2)
        expected = reference(world.memory, layer, own, world.q)
        np.testing.assert_allclose(out, expected, rtol=0, atol=world.bound("output"))
    runtime.end_step()
    # Layer 0 launches each sequence in its own bucket, layer 1 both in one; without a bucket for 200, one each time.
    assert runtime.cores.launches == (1 + 1 + 1 if host else 2 + 1 + 2)
    runtime.close()


class Sliding(Conversation):
    """Conversations with a window and sinks, which let go of the blocks that no later row sees."""

    def __init__(self, lengths: list[int], window: int, sinks: int, **options: Any) -> None:
        super().__init__(lengths, **options)
        self.window, self.sinks = window, sinks
        self.gaps = dict.fromkeys(self.tables, 0)  # tokens

    def let_go(self, table: BlockTable) -> None:
        first = 16 * (-(-self.sinks // 16))
        self.gaps[table] = max(0, 16 * ((table.length - self.window + 1) // 16) - first)

    def batch(self, tables: list[BlockTable], tokens: int) -> AttentionBatch:
        kept, gaps = -(-self.sinks // 16), [self.gaps.get(table, 0) for table in tables]
        ids = [list(table.blocks) for table in tables]
        return batch_of(
            [blocks[:kept] + blocks[kept + gap // 16 :] for blocks, gap in zip(ids, gaps, strict=True)],
            [table.length - gap for table, gap in zip(tables, gaps, strict=True)],
            [tokens] * len(tables),
            windows=[self.window] * len(tables),
            sinks=[self.sinks] * len(tables),
        )


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("letting_go", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (30, 16), (28, 5)])
def test_what_stays_staged_follows_a_window_that_slides(
    window: int, sinks: int, *, letting_go: bool, tiled: bool
) -> None:
    """A step hides a token more; now and then a block falls out, or the table lets go of it: all behind it moves."""
    talk = Sliding([40, 17], window, sinks, tiled=tiled)
    for _ in range(40):
        talk.step(talk.tables)
        if letting_go:
            for table in talk.tables:
                talk.let_go(table)
    grown, whole = talk.counts
    assert whole == 2  # from the second step on, layers grow
    assert grown == 2 * 39
    assert talk.resident.cores.failures == 0
    talk.close()


def test_a_token_that_was_hidden_is_staged_again_when_a_row_sees_it() -> None:
    """A fork stands where its leader stood before, over the same blocks: its window shows what the leader's hid."""
    talk = Sliding([40], 20, 0)
    fork = talk.tables[0].fork()
    for _ in range(5):
        talk.step(talk.tables)  # position 44 sees tokens 25 to 44
    talk.step([fork])  # position 40 sees tokens 21 to 40
    talk.step([fork])
    assert talk.resident.cores.failures == 0
    assert talk.counts == (2 * 6, 2)
    talk.close()

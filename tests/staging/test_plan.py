"""Gather plans against copying one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache import KVGeometry
from hostcache.errors import NoBucket, UsageError
from staging import GatherPlan, StagingLayout
from tests.staging.flat import arena_of, flat, marked, noisy_cache, plan_of, tiles

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=8)
CACHE = noisy_cache(GEOMETRY, blocks=12)
TOKENS = 64  # four blocks


@settings(deadline=None)
@given(data=st.data(), layer=st.integers(0, 2), mask_rows=st.sampled_from([0, 4]), tiled=st.booleans())
def test_filling_is_copying_each_token_and_zeroing_the_rest(
    data: st.DataObject, layer: int, mask_rows: int, tiled: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(0, TOKENS), min_size=1, max_size=4))
    block = st.integers(0, CACHE.blocks - 1)  # blocks may be shared, within a table too
    tables = [
        data.draw(st.lists(block, min_size=GEOMETRY.blocks_for(length), max_size=6).filter(bool)) for length in lengths
    ]
    arena = arena_of(buffers=1, pages=12)
    buffer = arena.acquire()
    buffer.fill(CACHE, plan_of(CACHE, tables, lengths, TOKENS, mask_rows=mask_rows, tiled=tiled), layer)
    keys, values = flat(CACHE, tables, lengths, TOKENS, layer)
    if not mask_rows:
        keys = marked(keys, lengths)
    if tiled:
        keys, values = tiles(keys), tiles(values)
    np.testing.assert_array_equal(buffer.keys.view(np.uint16), keys)
    np.testing.assert_array_equal(buffer.values.view(np.uint16), values)
    behind = buffer.memory[buffer.layout.query_offset :]
    assert (behind == 0xEE).all()  # keys and values end on a cache line here, and nothing else was touched
    del behind


def test_copies_of_a_small_plan_worked_out_by_hand() -> None:
    # A token of a head is 16 bytes, a block row 256, K of a layer 512, a layer 1024, a block 3072.
    # 20 tokens in blocks 5 and 2: 16 and 4; 44 of 64 tokens are left, for each of two heads.
    plan = plan_of(CACHE, [[5, 2]], [20], TOKENS)
    (part,) = plan.parts
    assert part.runs.tolist() == [[5 * 3072, 0, 0, 16], [2 * 3072, 0, 16, 4]]
    assert (part.rows.row_bytes, part.rows.kv_bytes, part.rows.layer_bytes) == (256, 512, 1024)
    assert plan.tails.tolist() == [[0, 20, 44], [1, 20, 44]]
    assert part.blocks == [2, 5]


def test_a_full_bucket_has_no_tail_and_a_shared_block_is_fenced_once() -> None:
    plan = plan_of(CACHE, [[1, 2, 3, 4], [1, 2, 3, 5]], [64, 64], TOKENS)
    assert plan.tails.shape == (0, 3)
    assert plan.parts[0].blocks == [1, 2, 3, 4, 5]


def test_a_context_beyond_the_bucket_is_refused() -> None:
    with pytest.raises(NoBucket, match="65 tokens does not fit the bucket of 64"):
        plan_of(CACHE, [[0, 1, 2, 3, 4]], [65], TOKENS)


def test_a_table_shorter_than_its_context_is_refused() -> None:
    with pytest.raises(UsageError, match="33 tokens needs 3 blocks, its table holds 2"):
        plan_of(CACHE, [[0, 1]], [33], TOKENS)


@pytest.mark.parametrize("block", [-1, 12])
def test_a_block_outside_the_pool_is_refused(block: int) -> None:
    with pytest.raises(UsageError, match="outside a pool of 12 blocks") as caught:
        plan_of(CACHE, [[3, block]], [17], TOKENS)
    assert block in caught.value.values.values()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tables", np.array([[5.7, 2]])),
        ("lengths", np.array([20.5])),
        ("hidden", np.array([[0.0, 2.0]])),
        ("codecs", np.array([-1], np.int8)),
        ("codecs", np.array([np.nan])),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.dtype),
)
def test_numbers_of_another_kind_are_refused(name: str, array: NDArray[Any]) -> None:
    """C reads the bits of runs and tails as int64, and a code that is no codec's would leave old bytes staged."""
    arrays: dict[str, Any] = {"tables": np.array([[5, 2]], np.int32), "lengths": np.array([20], np.int32), name: array}
    layout = StagingLayout(batch=1, kv_heads=1, tokens=32, rows=4, head_dim=8, mask_rows=4)
    with pytest.raises(UsageError, match=f"{name} must be u?int(8|32|64), got {array.dtype}"):
        GatherPlan.build(KVGeometry(1, 1, 8), 8, layout=layout, **arrays)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(UsageError, match="a length is negative: -1"):
        plan_of(CACHE, [[0]], [-1], TOKENS)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (2, 16)])
def test_a_layout_of_another_model_is_refused(kv_heads: int, head_dim: int) -> None:
    layout = StagingLayout(1, kv_heads, TOKENS, 4, head_dim, 0)
    with pytest.raises(UsageError, match=f"the layout has {kv_heads} heads of {2 * head_dim} bytes, the cache 2 of 16"):
        GatherPlan.build(GEOMETRY, 12, np.zeros((1, 1), np.int32), np.ones(1, np.int32), layout)


def test_tables_and_lengths_of_another_batch_are_refused() -> None:
    layout = StagingLayout(2, 2, TOKENS, 4, 8, 0)
    with pytest.raises(UsageError, match="2 sequences need tables"):
        GatherPlan.build(GEOMETRY, 12, np.zeros((1, 1), np.int32), np.ones(2, np.int32), layout)

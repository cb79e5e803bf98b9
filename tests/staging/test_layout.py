"""Where the operands of a launch lie."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import UsageError
from staging import ALIGNMENT, StagingLayout
from tests.staging.flat import tiles


def test_offsets_of_a_launch_worked_out_by_hand() -> None:
    # 2 sequences of 3 heads, 64 tokens of 8 elements: keys 6 * 64 * 8 * 2 = 6144 bytes; query 6 * 4 * 8 * 2 = 384;
    # mask 2 * 64 * 4 * 2 = 1024. All are whole cache lines.
    layout = StagingLayout(batch=2, kv_heads=3, tokens=64, rows=4, head_dim=8, mask_rows=4)
    assert layout.keys_shape == layout.values_shape == (6, 64, 8)
    assert layout.query_shape == layout.out_shape == (6, 4, 8)
    assert layout.mask_shape == (2, 4, 64)
    assert layout.values_offset == 6144
    assert layout.query_offset == 12288
    assert layout.mask_offset == 12672
    assert layout.out_offset == 13696
    assert layout.nbytes == 14080


def test_keys_and_query_are_a_tile_wider_where_keys_carry_the_mask() -> None:
    # keys 6 * 64 * 16 * 2 = 12288, values 6144, query 6 * 4 * 16 * 2 = 768, no mask, out 384.
    layout = StagingLayout(batch=2, kv_heads=3, tokens=64, rows=4, head_dim=8, mask_rows=0)
    assert layout.keys_shape == (6, 64, 16)
    assert layout.values_shape == (6, 64, 8)
    assert layout.query_shape == (6, 4, 16)
    assert layout.out_shape == (6, 4, 8)
    assert layout.mask_shape == (2, 0, 64)
    assert layout.mask_offset == layout.out_offset == 12288 + 6144 + 768
    assert layout.nbytes == 12288 + 6144 + 768 + 384


def test_tiles_take_the_same_bytes_in_another_order() -> None:
    plain = StagingLayout(batch=1, kv_heads=2, tokens=64, rows=4, head_dim=16, mask_rows=0)
    tiled = replace(plain, tiled=True)
    assert tiled.keys_shape == (2, 3, 64, 8)
    assert tiled.values_shape == (2, 2, 64, 8)
    assert (tiled.values_offset, tiled.nbytes) == (plain.values_offset, plain.nbytes)
    keys = np.arange(2 * 64 * 24).reshape(plain.keys_shape)
    in_tiles = tiles(keys.astype(np.uint16))
    np.testing.assert_array_equal(tiled.by_token(in_tiles), plain.by_token(keys))
    assert plain.by_token(keys)[1, 5, 2, 7] == keys[1, 5, 23]


def test_a_head_that_is_no_whole_tiles_is_refused() -> None:
    with pytest.raises(UsageError, match="a head of 100 channels cannot be staged: the NPU takes multiples of 8"):
        StagingLayout(1, 2, 64, 4, head_dim=100, mask_rows=0)


@given(
    layout=st.builds(
        StagingLayout,
        batch=st.integers(1, 5),
        kv_heads=st.integers(1, 5),
        tokens=st.integers(1, 70),
        rows=st.integers(1, 30),
        head_dim=st.integers(1, 3).map(lambda tiles: 8 * tiles),
        mask_rows=st.integers(0, 30),
        tiled=st.booleans(),
    )
)
def test_no_operand_shares_a_cache_line_with_another(layout: StagingLayout) -> None:
    end = 0
    for offset, size in (
        (layout.keys_offset, 2 * prod(layout.keys_shape)),
        (layout.values_offset, 2 * prod(layout.values_shape)),
        (layout.query_offset, 2 * prod(layout.query_shape)),
        (layout.mask_offset, 2 * prod(layout.mask_shape)),
        (layout.out_offset, 2 * prod(layout.out_shape)),
    ):
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + size
    assert end <= layout.nbytes < end + ALIGNMENT

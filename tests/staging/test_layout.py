"""Where the operands of a launch lie."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from staging import ALIGNMENT, StagingLayout


def test_offsets_of_a_launch_worked_out_by_hand() -> None:
    # 2 sequences of 3 heads, 64 tokens of 8 elements: keys 6 * 64 * 8 * 2 = 6144 bytes; query 6 * 4 * 8 * 2 = 384;
    # mask 2 * 64 * 2 = 256. All are whole cache lines.
    layout = StagingLayout(batch=2, kv_heads=3, tokens=64, rows=4, head_dim=8, mask_rows=1)
    assert layout.kv_shape == (6, 64, 8)
    assert layout.query_shape == (6, 4, 8)
    assert layout.mask_shape == (2, 64, 1)
    assert layout.values_offset == 6144
    assert layout.query_offset == 12288
    assert layout.mask_offset == 12672
    assert layout.out_offset == 12928
    assert layout.nbytes == 13312


@given(
    layout=st.builds(
        StagingLayout,
        batch=st.integers(1, 5),
        kv_heads=st.integers(1, 5),
        tokens=st.integers(1, 70),
        rows=st.integers(1, 30),
        head_dim=st.integers(1, 20),
        mask_rows=st.integers(1, 30),
    )
)
def test_no_operand_shares_a_cache_line_with_another(layout: StagingLayout) -> None:
    kv, query = 2 * prod(layout.kv_shape), 2 * prod(layout.query_shape)
    end = 0
    for offset, size in (
        (layout.keys_offset, kv),
        (layout.values_offset, kv),
        (layout.query_offset, query),
        (layout.mask_offset, 2 * prod(layout.mask_shape)),
        (layout.out_offset, query),
    ):
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + size
    assert end <= layout.nbytes < end + ALIGNMENT

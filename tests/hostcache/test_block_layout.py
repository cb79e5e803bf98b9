from __future__ import annotations

import pytest

from hostcache.block_layout import BlockLayout
from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_fp16_lies_as_the_geometry_says(head_dim: int) -> None:
    geometry = KVGeometry(layers=3, kv_heads=2, head_dim=head_dim)
    layout = BlockLayout(geometry, FP16)
    for name in ("row_bytes", "kv_bytes", "layer_bytes", "block_bytes", "bytes_per_token"):
        assert getattr(layout, name) == getattr(geometry, name)
    assert layout.scale_bytes == 0


@pytest.mark.parametrize(
    ("codec", "head_dim", "row_bytes"),
    [
        (INT8, 64, 16 * (64 + 2)),
        (INT8, 128, 16 * (128 + 2)),
        (INT8, 5, 16 * (5 + 2)),
        (INT4, 64, 16 * (32 + 2 * 2)),
        (INT4, 128, 16 * (64 + 4 * 2)),
        (INT4, 80, 16 * (40 + 2)),  # 32 does not divide it: one scale
        (INT4, 96, 16 * (48 + 3 * 2)),
    ],
)
def test_a_row_is_its_codes_and_then_its_scales(codec: Codec, head_dim: int, row_bytes: int) -> None:
    layout = BlockLayout(KVGeometry(layers=5, kv_heads=3, head_dim=head_dim), codec)
    assert layout.row_bytes == row_bytes == layout.payload_bytes + layout.scale_bytes
    assert layout.block_bytes == 5 * 2 * 3 * row_bytes
    assert layout.bytes_per_token * 16 == layout.block_bytes


def test_rows_are_padded_to_sixteen_bytes() -> None:
    layout = BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=10, block_tokens=3), INT8)
    assert layout.payload_bytes + layout.scale_bytes == 3 * 12
    assert layout.row_bytes == 48


@pytest.mark.parametrize("head_dim", [64, 128])
def test_codecs_save_what_is_promised(head_dim: int) -> None:
    """Of the bytes alone; how many sessions that makes is the pool's to show."""
    geometry = KVGeometry(layers=2, kv_heads=2, head_dim=head_dim)
    fp16, int8, int4 = (BlockLayout(geometry, codec).block_bytes for codec in CODECS.values())
    assert fp16 / int8 >= 1.9
    assert fp16 / int4 >= 3.5


@pytest.mark.parametrize("codec", [INT8, INT4], ids=lambda codec: codec.name)
def test_a_head_beyond_what_c_holds_is_not_quantised(codec: Codec) -> None:
    assert BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=1024), codec).groups
    with pytest.raises(UsageError, match=f"{codec.name} quantises heads of up to 1024 elements, not 1032: use fp16"):
        BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=1032), codec)
    assert BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=1032), FP16).row_bytes == 16 * 1032 * 2


def test_an_odd_head_has_no_int4() -> None:
    with pytest.raises(UsageError, match="int4 puts two elements into a byte, and a head has 9: use int8 or fp16"):
        BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=9), INT4)


@pytest.mark.parametrize(("codec", "head_dim"), [(INT8, 9), (INT4, 10)], ids=["int8", "int4"])
def test_scales_lie_at_even_addresses(codec: Codec, head_dim: int) -> None:
    """C reads and writes them as whole numbers of 16 bits, which the language asks to be aligned."""
    with pytest.raises(UsageError, match=r"3 tokens of \d bytes .* at an odd address: give a block an even number"):
        BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=head_dim, block_tokens=3), codec)
    even = BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=head_dim, block_tokens=2), codec)
    assert even.payload_bytes % 2 == even.row_bytes % 2 == 0
    assert BlockLayout(KVGeometry(layers=1, kv_heads=1, head_dim=head_dim, block_tokens=3), FP16).groups == 0

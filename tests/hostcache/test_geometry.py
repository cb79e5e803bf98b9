from __future__ import annotations

import pytest

from hostcache import KVGeometry
from hostcache.errors import UsageError

REFERENCE = KVGeometry(layers=24, kv_heads=2, head_dim=128)


def test_the_reference_model_costs_what_the_ledger_says() -> None:
    assert REFERENCE.bytes_per_token == 24 * 1024
    assert REFERENCE.block_bytes == 384 * 1024
    assert 2048 * REFERENCE.bytes_per_token == 48 << 20
    assert (192 << 20) // REFERENCE.block_bytes == 512


def test_strides_nest() -> None:
    assert REFERENCE.row_bytes == 4096  # 16 tokens x 128 x fp16: one page
    assert REFERENCE.kv_bytes == 2 * 4096
    assert REFERENCE.layer_bytes == 4 * 4096
    assert REFERENCE.block_bytes == 24 * REFERENCE.layer_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (512, 32)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert REFERENCE.blocks_for(tokens) == blocks


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_tokens", "itemsize"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_field_that_is_no_positive_integer_is_refused_by_name(field: str, value: int) -> None:
    fields = {"layers": 1, "kv_heads": 1, "head_dim": 8, field: value}
    with pytest.raises(UsageError, match=f"{field} must be a positive integer, got {value}"):
        KVGeometry(**fields)

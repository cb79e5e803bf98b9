from __future__ import annotations

import pytest

from hostcache.codec import CODECS, FP16, INT4, INT8, codec_named
from hostcache.errors import UsageError


def test_codecs_are_found_by_name_and_numbered_in_order() -> None:
    assert [codec_named(name).code for name in ("fp16", "int8", "int4")] == [0, 1, 2]
    assert list(CODECS) == ["fp16", "int8", "int4"]
    with pytest.raises(UsageError, match="no KV codec 'int5': choose one of fp16, int8, int4"):
        codec_named("int5")
    with pytest.raises(UsageError, match=r"no KV codec \['int8'\]: choose one of fp16, int8, int4"):
        codec_named(["int8"])  # type: ignore[arg-type] # as JSON may have it


def test_as_many_blocks_fit_into_an_extent_as_elements_are_smaller() -> None:
    assert [16 // codec.bits for codec in (FP16, INT8, INT4)] == [1, 2, 4]
    assert [codec.blocks_per_extent for codec in (FP16, INT8, INT4)] == [1, 2, 4]
    assert [codec.scaled for codec in (FP16, INT8, INT4)] == [False, True, True]


@pytest.mark.parametrize(
    ("head_dim", "int4_group", "rotation"),
    [(8, 8, 8), (64, 32, 64), (80, 80, 16), (96, 32, 32), (100, 100, 4), (128, 32, 128), (256, 32, 256)],
)
def test_groups_divide_a_head_and_rotation_takes_a_power_of_two(head_dim: int, int4_group: int, rotation: int) -> None:
    assert INT8.group(head_dim) == head_dim
    assert INT4.group(head_dim) == int4_group
    assert INT4.rotation(head_dim) == INT8.rotation(head_dim) == rotation
    assert FP16.rotation(head_dim) == 1

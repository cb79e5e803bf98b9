"""Which bucket a context takes."""

from __future__ import annotations

import pytest

from hostcache.errors import NoBucket, UsageError
from staging import Buckets


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 64), (64, 64), (65, 128), (513, 1024), (4095, 4096), (4096, 4096)])
def test_the_smallest_bucket_that_holds_the_context(tokens: int, bucket: int) -> None:
    assert Buckets().fit(tokens) == bucket


def test_beyond_the_largest_bucket_the_context_must_take_another_way() -> None:
    with pytest.raises(NoBucket, match="4097 tokens is longer than the largest bucket of 4096") as caught:
        Buckets().fit(4097)
    assert caught.value.values == {"tokens": 4097, "largest": 4096}


@pytest.mark.parametrize("sizes", [[], [0, 64], [64, 64], [128, 64], [62, 128], [-4, 64]])
def test_a_bucket_list_the_device_cannot_take_is_refused(sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="ascending positive multiples of 4"):
        Buckets(sizes)

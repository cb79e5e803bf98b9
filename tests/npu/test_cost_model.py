"""What attention costs where, in round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hostcache.errors import UsageError
from npu.cost_model import PUBLISHED, CostModel, Work

ROUND = CostModel(
    launch_seconds=1e-3,
    gather_bytes_per_second=1e9,
    device_bytes_per_second=2e9,
    device_multiply_adds_per_second=100e9,
    host_bytes_per_second=0.5e9,
    host_multiply_adds_per_second=10e9,
    cores=3,
    source="round numbers",
)


def test_the_host_takes_as_long_as_its_slower_part() -> None:
    # 1 MB at 0.5 GB/s are 2 ms; 5 million multiply-adds at 10e9 are 0.5 ms, 50 million are 5 ms.
    assert ROUND.on_host(Work(1_000_000, 2_000_000, 5_000_000, 2_000_000)) == pytest.approx(2e-3)
    assert ROUND.on_host(Work(1_000_000, 2_000_000, 50_000_000, 2_000_000)) == pytest.approx(5e-3)


def test_a_device_waits_for_the_gather_and_shares_the_rest_among_its_cores() -> None:
    # 2 MB at 1 GB/s are 2 ms to gather; a launch is 1 ms, reading 2 MB at 2 GB/s is 1 ms.
    work = Work(1_000_000, 2_000_000, 5_000_000, 2_000_000)
    assert ROUND.on_device(work) == pytest.approx(2e-3 + 2e-3)
    assert ROUND.on_device(work, launches=2) == pytest.approx(2e-3 + 1e-3)
    assert ROUND.on_device(work, launches=9) == pytest.approx(2e-3 + 2e-3 / 3)  # there are three cores
    # 500 million multiply-adds at 100e9 are 5 ms.
    assert ROUND.on_device(replace(work, multiply_adds=500_000_000)) == pytest.approx(2e-3 + 1e-3 + 5e-3)
    # What is there already need not be gathered, but the device reads it.
    assert ROUND.on_device(replace(work, gathered_bytes=10_000)) == pytest.approx(1e-5 + 2e-3)


@pytest.mark.parametrize("name", sorted(PUBLISHED.figures()))
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast"])
def test_a_figure_that_is_no_speed_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is .*, it must be a positive number"):
        replace(PUBLISHED, **{name: value})

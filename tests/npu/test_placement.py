"""Which launches go to the device, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hostcache import KVGeometry
from npu.cost_model import PUBLISHED, CostModel
from npu.cpu import CpuAttention
from npu.emulated_device import EmulatedDevice
from npu.launch import Cut, LaunchPlanner
from npu.placement import ByCost, Everything, Placed, PlacementLog
from npu.staged import StagedAttention
from staging import Buckets
from tests.npu.paged import batch_of
from tests.npu.test_cost_model import ROUND
from tests.npu.test_emulated_attention import BUCKETS, HEADS, World

REFERENCE = KVGeometry(layers=24, kv_heads=2, head_dim=128)
PLANNER = LaunchPlanner(REFERENCE, 4096, 12, Buckets())


def cuts(lengths: list[int], rows: list[int]) -> list[Cut]:
    tables = [list(range(REFERENCE.blocks_for(length))) for length in lengths]
    return PLANNER.cut(batch_of(tables, lengths, rows), np.arange(len(lengths), dtype=np.int64))


def test_work_of_a_launch_counted_by_hand() -> None:
    # K and V of a token are 2 * 2 * 128 * 2 = 1024 bytes a layer. Scores and values: 2 * 12 * 128 per row and token.
    [decode] = cuts([100, 90], [1, 1])
    assert decode.work.kv_bytes == 190 * 1024
    assert decode.work.multiply_adds == 190 * 2 * 12 * 128
    assert decode.work.staged_bytes == decode.layout.nbytes
    assert (decode.layout.batch, decode.layout.tokens) == (2, 128)
    [tile] = cuts([500], [64])
    assert tile.work.multiply_adds == 64 * 500 * 2 * 12 * 128
    np.testing.assert_array_equal(tile.share.rows, np.arange(64))


def test_published_figures_keep_short_decodes_on_the_host_and_send_prompts_to_the_npu() -> None:
    """100 tokens are 0.1 MB: 0.02 ms on the host, and a launch alone is 0.4. A tile over 2000 tokens is 393 million
    multiply-adds: 20 ms on the host, and 2 on the NPU."""
    by_cost = ByCost(PUBLISHED)
    assert by_cost.on_device(cuts([100, 100], [1, 1])) == [False]  # one launch
    [tile] = cuts([2000], [64])
    assert by_cost.on_device([tile]) == [True]
    host, device = PUBLISHED.on_host(tile.work), PUBLISHED.on_device(tile.work)
    assert host == pytest.approx(64 * 2000 * 2 * 12 * 128 / 20e9)
    assert device < host / 4


def test_the_crossover_is_where_the_costs_are_equal() -> None:
    [decode] = cuts([1000], [1])
    host = ROUND.on_host(decode.work)
    others = ROUND.on_device(decode.work) - ROUND.launch_seconds
    for share, device in ((0.999, True), (1.001, False)):
        model = replace(ROUND, launch_seconds=max((host - others) * share, 1e-9))
        assert host > others, "the case must be able to go either way"
        assert ByCost(model).on_device([decode]) == [device]


def test_a_log_says_what_went_where_in_order() -> None:
    log = PlacementLog()
    for _ in range(3):
        log.add(Placed("tile", 256, device=True), "device 1.00 ms, host 2.00 ms a layer")
    log.add(Placed("decode", 64, device=False), "device 0.50 ms, host 0.10 ms a layer")
    log.add(Placed("beyond", 0, device=False), "longer than 4094 tokens")
    assert log.lines() == [
        "     1 x beyond: CPU (longer than 4094 tokens)",
        "     1 x decode in 64 tokens: CPU (device 0.50 ms, host 0.10 ms a layer)",
        "     3 x tile in 256 tokens: NPU (device 1.00 ms, host 2.00 ms a layer)",
    ]


# 70 rows over 254 tokens are 3 million multiply-adds, a row over 100 are 19,200, and each launch stages 0.1 MB.
TILES_ONLY = replace(
    ROUND, launch_seconds=1e-4, host_multiply_adds_per_second=1e9, device_multiply_adds_per_second=1e12
)
NOTHING = replace(ROUND, launch_seconds=1.0)


@pytest.mark.parametrize("model", [TILES_ONLY, NOTHING], ids=["tiles", "nothing"])
def test_a_step_is_split_between_device_and_host_and_stays_right(model: CostModel) -> None:
    world = World([254, 100, 30, 400], [70, 1, 1, 2])
    host = CpuAttention(world.cache, HEADS)
    placed = StagedAttention(
        world.cache,
        HEADS,
        EmulatedDevice,
        buckets=BUCKETS,
        host=host,
        placement=ByCost(model),
    )
    assert placed.numerics == f"emulated-output-64-128-256+{host.numerics}"
    np.testing.assert_allclose(world.attend(placed), world.expected(), rtol=0, atol=0.004)
    where = {(each.kind, each.device) for each in placed.log.counts}
    tiles_to_device = model is TILES_ONLY
    assert where == {("tile", tiles_to_device), ("decode", False), ("beyond", False)}
    assert placed.cores.launches == (2 if tiles_to_device else 0)
    placed.close()


def test_everything_that_fits_goes_to_the_device_by_default() -> None:
    world = World([254, 100, 400], [70, 1, 2])
    staged = StagedAttention(world.cache, HEADS, EmulatedDevice, buckets=BUCKETS, host=CpuAttention(world.cache, HEADS))
    world.attend(staged)
    assert staged.log.lines() == [
        "     1 x beyond: CPU (longer than 254 tokens)",
        "     1 x decode in 128 tokens: NPU (asked for)",
        "     2 x tile in 256 tokens: NPU (asked for)",
    ]
    assert Everything().on_device([]) == []
    staged.close()


def test_launches_of_a_step_share_the_cores_when_they_are_weighed() -> None:
    """A launch that is not worth it alone may be worth it as one of three."""
    tiles = cuts([2000, 2000, 2000], [64, 64, 64])
    work = tiles[0].work
    alone, shared = ROUND.on_device(work), ROUND.on_device(work, launches=3)
    between = replace(ROUND, host_multiply_adds_per_second=work.multiply_adds / ((alone + shared) / 2))
    assert ByCost(between).on_device(tiles[:1]) == [False]
    assert ByCost(between).on_device(tiles) == [True] * 3

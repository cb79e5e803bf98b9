"""What people are told of where attention ran."""

from __future__ import annotations

from npu.cost_model import PUBLISHED
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.emulated_device import Faults
from npu.explain import explain_placement
from npu.placement import ByCost
from tests.npu.test_emulated_attention import BUCKETS, HEADS, World


def test_the_cpu_runtime_has_one_clear_line() -> None:
    world = World([30], [1])
    runtime = CpuAttention(world.cache, HEADS)
    assert explain_placement(runtime) == ["runtime cpu: all attention ran on the CPU, straight through the block table"]
    runtime.close()


def test_costs_failures_and_long_contexts_are_named() -> None:
    """Each step has two tiles and a row for the device, and 400 tokens that fit no bucket.

    The first run fails, and its second try falls to core 1, which is dead: that one is the host's. After three failures
    core 1 gets no more jobs.
    """
    world = World([254, 100, 400], [70, 1, 2])
    runtime = EmulatedAttention(
        world.cache,
        HEADS,
        buckets=BUCKETS,
        host=CpuAttention(world.cache, HEADS),
        faults=Faults(failing={0}, dead_cores={1}),
        resident_bytes=1 << 20,
    )
    for _ in range(3):
        world.attend(runtime)
    assert explain_placement(runtime) == [
        "runtime emulated: where the launches of all steps ran, and why",
        "     3 x beyond: CPU (longer than 254 tokens)",
        "     3 x decode in 128 tokens: NPU (asked for)",
        "     6 x tile in 256 tokens: NPU (asked for)",
        "jobs, one a layer: 8 done, 4 failed, 1 left to the CPU for that",
        "cores that get no more jobs: 1 of 0 to 2, see the log",
        "staged copies: 2 grew by what was new, 1 were gathered whole",
    ]
    runtime.close()


def test_costs_name_their_source() -> None:
    world = World([30], [1])
    runtime = EmulatedAttention(
        world.cache, HEADS, buckets=BUCKETS, host=CpuAttention(world.cache, HEADS), placement=ByCost(PUBLISHED)
    )
    assert explain_placement(runtime)[1] == "     0: nothing was attended"
    world.attend(runtime)
    lines = explain_placement(runtime)
    assert lines[1].startswith("     1 x decode in 64 tokens: CPU (device 0.4")
    assert lines[2] == f"costs: {PUBLISHED.source}"
    assert lines[3] == "jobs, one a layer: 0 done, 0 failed, 0 left to the CPU for that"
    assert len(lines) == 4
    runtime.close()

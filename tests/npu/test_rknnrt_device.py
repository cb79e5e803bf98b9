"""A board's NPU by the vendor's C library, over a stub of it: right, whatever fails."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache
from hostcache.errors import DeviceError, RegionError, UsageError
from npu import rknnrt_device
from npu.board_device import NPU, BoardRun
from npu.cores import QUARANTINE_AFTER, Cores
from npu.cpu import CpuAttention
from npu.device_lock import DeviceLock
from npu.rknnrt_device import RknnrtDevice
from npu.runtimes import open_runtime
from npu.staged import StagedAttention
from tests.hostcache.fake_heaps import open_descriptors
from tests.npu.rknnrt_bed import RknnrtBed
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.test_emulated_attention import GEOMETRY, HEADS, World

SHAPE = (GEOMETRY.kv_heads, HEADS, GEOMETRY.head_dim)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_stub_graphs(tmp_path_factory.mktemp("rknnrt"), *SHAPE)


def opened(world: World, graphs: Path, resident_bytes: int = 0) -> closing[StagedAttention]:
    runtime = open_runtime("rknnrt", world.cache, HEADS, graphs=graphs, resident_bytes=resident_bytes)
    assert isinstance(runtime, StagedAttention)
    return closing(runtime)


def opened_by_hand(
    world: World, graphs: Path, library: Path, cores: int, seconds: float
) -> tuple[RknnrtDevice, StagedAttention]:
    device = RknnrtDevice(graphs, *SHAPE, cores=cores, seconds=seconds, library=library)
    host = CpuAttention(world.cache, HEADS)
    runtime = StagedAttention(
        world.cache, HEADS, lambda _memory: device, cores=cores, buckets=device.buckets, host=host, take=device.take
    )
    return device, runtime


def close_to_exact(out: NDArray[np.float32], world: World, layer: int = 1) -> bool:
    return bool(np.abs(out - world.expected(layer)).max() <= world.bound("output", layer))


# --- the way through it -----------------------------------------------------------------------------------------------


def test_each_launch_is_read_where_it_was_gathered(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    """Four single rows in two buckets, a tile of 16 tokens and, of a chunk of 70, tiles of 64 and of 6."""
    world = World([30, 60, 100, 200, 90, 150], [1, 1, 1, 1, 16, 70])
    with opened(world, graphs) as runtime:
        rknnrt_bed.stub.fail("")
        for layer in (0, 1):
            assert close_to_exact(world.attend(runtime, layer), world, layer)
        assert (runtime.cores.launches, runtime.cores.failures, runtime.cores.on_host) == (12, 0, 0)
        assert rknnrt_bed.stub.calls("rknn_run") == 12
        assert rknnrt_bed.stub.calls("rknn_inputs_set") == rknnrt_bed.stub.calls("rknn_outputs_get") == 0
        assert runtime.numerics.startswith("rknnrt-2.5.0-")


def test_a_job_syncs_its_buffer_once_and_what_the_core_lays_out_itself(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    """Dma-bufs are numbered as they were taken: 0 to 2 the cores' own, then two buffers for each core."""
    world = World([30, 200], [1, 1])
    with opened(world, graphs) as runtime:
        assert len(rknnrt_bed.heaps.handed_out) == 3 + 6
        rknnrt_bed.heaps.synced.clear()
        world.attend(runtime)
        assert sorted(rknnrt_bed.heaps.synced) == [
            *(("begin", number) for number in (0, 1)),
            *(("end", number) for number in (0, 1, 3, 4)),
        ]


def test_many_steps_make_no_memory_and_leave_none(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    world = World([30, 60, 100, 90], [1, 1, 1, 16])
    before = open_descriptors(), threading.active_count()
    with opened(world, graphs) as runtime:
        for step in range(20):  # until each core has seen each buffer that it will
            world.attend(runtime, step % 2)
        memories, descriptors = rknnrt_bed.stub.memories, open_descriptors()
        for step in range(100):
            assert close_to_exact(world.attend(runtime, step % 2), world, step % 2)
        assert runtime.cores.failures == 0
        assert (rknnrt_bed.stub.memories, open_descriptors()) == (memories, descriptors)
    shadows = len(rknnrt_bed.heaps.handed_out)
    assert (open_descriptors() - shadows, threading.active_count()) == before
    assert rknnrt_bed.stub.memories == 0


def test_what_stays_staged_grows_token_by_token_in_the_npus_own_order(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    geometry = KVGeometry(layers=3, kv_heads=GEOMETRY.kv_heads, head_dim=GEOMETRY.head_dim)
    cache = PagedKVCache.create(geometry, 16 * geometry.block_bytes)
    world = World([5], [1])  # to open over its cache's twin
    world.cache, random = cache, np.random.default_rng(5)
    tables = [cache.table() for _ in range(2)]
    host = CpuAttention(cache, HEADS)

    def grow(tokens: int) -> None:
        for table in tables:
            table.append(tokens)
            for layer in range(geometry.layers):
                rows = random.standard_normal((2, tokens, geometry.kv_heads, geometry.head_dim), np.float32)
                cache.write(layer, table.slots(table.length - tokens, table.length), *rows)

    grow(40)
    with opened(world, graphs, resident_bytes=1 << 20) as runtime:
        assert runtime.residency is not None
        rknnrt_bed.heaps.synced.clear()
        for _ in range(10):
            grow(1)
            lengths = np.array([table.length for table in tables], np.int32)
            batch = type(world.batch)(np.arange(3, dtype=np.int32), lengths, np.stack([t.ids for t in tables]))
            q = random.standard_normal((2, HEADS, geometry.head_dim), np.float32)
            for each in (runtime, host):
                each.begin_step(batch)
            for layer in range(geometry.layers):
                out, exact = np.empty_like(q), np.empty_like(q)
                runtime.attend(layer, q, out)
                host.attend(layer, q, exact)
                np.testing.assert_allclose(out, exact, rtol=0, atol=0.004)
            for each in (runtime, host):
                each.end_step()
        assert (runtime.residency.counts.grown, runtime.residency.counts.whole) == (3 * 9, 3)
        assert (runtime.cores.failures, runtime.cores.on_host) == (0, 0)
        arena = [number for which, number in rknnrt_bed.heaps.synced if which == "end" and number >= 3]
        assert len(arena) == 10 * 3  # once a job, however many ranges were written
    host.close()


# --- what goes wrong in a run -----------------------------------------------------------------------------------------

LAUNCHES = 3
FAULTS = {
    # `late` costs nothing; the canary finds what was reported as done and was not.
    "rknn_set_io_mem": ("-1", "timeout:2", "stale", "garbage", "late:2"),
    "rknn_run": ("-1", "timeout:2", "stale", "garbage", "late:2"),
    "rknn_set_input_shapes": ("-5", "garbage"),
    "rknn_create_mem_from_fd": ("-1", "stale", "garbage"),
}


@pytest.mark.parametrize(("call", "deed"), [(call, deed) for call, deeds in FAULTS.items() for deed in deeds])
def test_no_fault_of_a_call_changes_a_result(rknnrt_bed: RknnrtBed, graphs: Path, call: str, deed: str) -> None:
    """A launch of two decoding sequences, one of a longer one, and one of a prompt's tile; four or five operands each.

    Each is set up anew, as after one of another shape.
    """
    world = World([30, 50, 100, 60], [1, 1, 1, 10])
    failures = 0
    with opened(world, graphs) as runtime:
        for number in range(1, 14 if call == "rknn_set_io_mem" else 6):
            runtime.cores = Cores(3)
            for contexts in runtime._device._contexts:  # type: ignore[attr-defined] # it is an RknnrtDevice
                for context in contexts.values():
                    context._current = None
            rknnrt_bed.stub.fail(f"{call}@{number}={deed}")
            layer = number % 2  # in the other one, an old result were right
            assert close_to_exact(world.attend(runtime, layer), world, layer), number
            assert runtime.cores.on_host == 0
            assert runtime.cores.failures <= 1
            failures += runtime.cores.failures
    assert (failures > 0) == (not deed.startswith("late"))


OPERANDS = {"decode": ("q", "K", "V", "out"), "tile": ("q", "K", "V", "mask", "out")}
"""In the order in which they are set."""


@pytest.fixture
def from_the_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two heads one in 64 old operands passes: the same ones are asked in every run, so that it is none of these."""
    monkeypatch.setattr("npu.canary._launches", itertools.count())


@pytest.mark.usefixtures("from_the_first_question")
@pytest.mark.parametrize(
    ("kind", "operand"),
    [(kind, operand) for kind, operands in OPERANDS.items() for operand in range(2 * len(operands))],
)
def test_an_operand_that_was_not_set_is_noticed_though_the_others_are_new(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path, kind: str, operand: int
) -> None:
    """Two launches of the same shapes take turns in two buffers: K and V are elsewhere than those of the launch before.

    Query, mask and result lie in the core's own memory, where they did before: so nothing is wrong.
    """
    world = World([200] * 4, [1] * 4) if kind == "decode" else World([60, 50], [16, 16])
    _, runtime = opened_by_hand(world, graphs, stub_library, cores=1, seconds=30)
    world.attend(runtime, 0)
    world.attend(runtime, 1)
    rknnrt_bed.stub.fail(f"rknn_set_io_mem@{operand + 1}=stale")
    assert close_to_exact(world.attend(runtime, 0), world, 0)
    name = (OPERANDS[kind] * 2)[operand]
    assert runtime.cores.failures == runtime.cores.on_host == (1 if name in {"K", "V"} else 0)
    runtime.close()


@pytest.mark.usefixtures("from_the_first_question")
@pytest.mark.parametrize("number", range(1, 20))
def test_memory_that_is_another_than_was_imported_is_noticed(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path, number: int
) -> None:
    """For good: the wrong import is used again by each launch in that buffer."""
    world = World([30, 60, 100, 200, 90, 150], [1, 1, 1, 1, 16, 70])
    _, runtime = opened_by_hand(world, graphs, stub_library, cores=2, seconds=30)
    rknnrt_bed.stub.fail(f"rknn_create_mem_from_fd@{number}=stale")
    for step in range(4):
        assert close_to_exact(world.attend(runtime, step % 2), world, step % 2)
    assert runtime.cores.failures > 0
    runtime.close()


def test_shapes_that_were_not_set_are_noticed(rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path) -> None:
    world = World([30, 100], [1, 1])
    _, runtime = opened_by_hand(world, graphs, stub_library, cores=1, seconds=30)
    world.attend(runtime)
    rknnrt_bed.stub.fail("rknn_set_input_shapes@1=stale")
    assert close_to_exact(world.attend(runtime), world)
    assert (runtime.cores.failures, runtime.cores.on_host) == (1, 1)
    assert close_to_exact(world.attend(runtime), world)
    assert runtime.cores.on_host == 1
    runtime.close()


def test_a_dead_core_is_quarantined_and_without_any_the_host_attends(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    world = World([50, 100, 200], [1, 1, 1])
    with opened(world, graphs) as runtime:
        rknnrt_bed.stub.fail("rknn_run@core1=stale")
        for step in range(QUARANTINE_AFTER):
            assert close_to_exact(world.attend(runtime, step % 2), world, step % 2)
        assert runtime.cores.quarantined == [1]
        rknnrt_bed.stub.fail("rknn_run@all=-1")
        for step in range(QUARANTINE_AFTER + 1):
            assert close_to_exact(world.attend(runtime, step % 2), world, step % 2)
        assert runtime.cores.quarantined == [0, 1, 2]


def test_a_sync_that_fails_costs_a_launch_and_no_token(
    rknnrt_bed: RknnrtBed, graphs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World([50], [1])
    with opened(world, graphs) as runtime:
        rknnrt_bed.heaps.refusal = 19
        with caplog.at_level(logging.WARNING):
            assert close_to_exact(world.attend(runtime), world)
        assert runtime.cores.on_host == 1
        assert "DMA_BUF_IOCTL_SYNC of pieces range(0, 1) from heap cma said" in caplog.text
        rknnrt_bed.heaps.refusal = 0
        assert close_to_exact(world.attend(runtime), world)
        assert (runtime.cores.on_host, runtime.cores.launches) == (1, 1)


def test_a_run_that_hangs_keeps_its_memory_until_it_ends(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World([50], [1])
    device, runtime = opened_by_hand(world, graphs, stub_library, cores=2, seconds=0.2)
    rknnrt_bed.stub.fail("rknn_run@core0=late:1500")
    with caplog.at_level(logging.WARNING):
        assert close_to_exact(world.attend(runtime), world)
    assert runtime.cores.quarantined == [0]
    (stuck,) = (buffer for buffer in runtime._arena.buffers if buffer.state.value == "in flight")
    assert stuck.index == 0
    assert close_to_exact(world.attend(runtime, 0), world, 0)  # by the other core
    device._workers[0].submit(lambda: None).result(30)
    assert close_to_exact(world.attend(runtime), world)
    assert [buffer.state.value for buffer in runtime._arena.buffers] == ["free"] * 4
    runtime.close()


def test_what_a_core_that_hangs_works_on_is_not_given_back(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World([50], [1])
    device, runtime = opened_by_hand(world, graphs, stub_library, cores=2, seconds=0.2)
    worker, contexts, side = device._workers[0], list(device._contexts[0].values()), device._side
    rknnrt_bed.stub.fail("rknn_run@core0=late:1500")
    assert close_to_exact(world.attend(runtime), world)
    with caplog.at_level(logging.ERROR):
        runtime.close()
        device.close()
    assert "NPU core 0 still works on a job" in caplog.text
    assert side.buffer.size > 0
    assert rknnrt_bed.stub.contexts == 3
    assert rknnrt_bed.stub.memories == 4  # of the run
    assert worker.stopped(30)
    for context in contexts:
        context.release()
    side.close()


def test_ctrl_c_again_and_again_leaves_no_buffer_behind(
    rknnrt_bed: RknnrtBed, graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the wait for a run, and in those for the runs that are left then."""
    world = World([30, 60, 100, 90], [1, 1, 1, 16])
    with opened(world, graphs) as runtime:
        real, interruptions = BoardRun.wait, iter([KeyboardInterrupt, KeyboardInterrupt])

        def wait(run: BoardRun) -> None:
            for interruption in interruptions:
                raise interruption
            real(run)

        monkeypatch.setattr(BoardRun, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            world.attend(runtime)
        runtime.end_step()
        for worker in runtime._device._workers:  # type: ignore[attr-defined] # it is an RknnrtDevice
            worker.submit(lambda: None).result(30)
        assert close_to_exact(world.attend(runtime), world)
        assert {buffer.state.value for buffer in runtime._arena.buffers} == {"free"}
        assert runtime.cores._in_flight == [0, 0, 0]


def test_a_run_that_was_given_up_and_then_failed_holds_nothing(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path
) -> None:
    """Without a garbage collection, too, all memory can be given back."""
    world = World([50], [1])
    device, runtime = opened_by_hand(world, graphs, stub_library, cores=1, seconds=0.2)
    gc.disable()
    try:
        rknnrt_bed.stub.fail("rknn_run@core0=timeout:600")
        assert close_to_exact(world.attend(runtime), world)
        assert runtime.cores.quarantined == [0]
        device._workers[0].submit(lambda: None).result(30)
        runtime.close()
    finally:
        gc.enable()
    assert (rknnrt_bed.stub.contexts, rknnrt_bed.stub.memories) == (0, 0)


def test_a_forked_child_leaves_its_parents_contexts_alone(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RknnrtDevice(graphs, *SHAPE, cores=1, library=stub_library)
    in_child = copy.copy(device)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    in_child.close()
    assert rknnrt_bed.stub.contexts == 3
    monkeypatch.undo()
    device.close()


# --- what cannot be opened --------------------------------------------------------------------------------------------


def refused(world: World, graphs: Path, error: type[Exception], said: str) -> None:
    before = open_descriptors()
    with pytest.raises(error, match=said):
        open_runtime("rknnrt", world.cache, HEADS, graphs=graphs)
    DeviceLock(NPU).release()  # nobody holds the NPU
    world.memory.buffer = np.empty(0, np.uint8)
    world.cache.close()  # nor the cache
    gc.collect()  # the error's frames
    assert open_descriptors() <= before + 9  # shadows, which the test keeps


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rknn_init@5=-4", "core 1: rknn_init returned -4: RKNN_ERR_MALLOC_FAIL; no memory for the NPU"),
        ("rknn_set_core_mask@9=-1", "core 2: rknn_set_core_mask returned -1: .*; the chip has no such core"),
        ("rknn_create_mem_from_fd@all=-1", "the driver did not take .*: the NPU's 4 GB of addresses are used up"),
        ("rknn_create_mem_from_fd@all=stale", "do not answer this launch"),
        ("rknn_set_io_mem@core2=stale", "rknn_run|do not answer this launch"),
        ("rknn_run@7=-1", "core 2: rknn_run returned -1: RKNN_ERR_FAIL"),
        ("rknn_run@9=garbage", "do not answer this launch"),
    ],
)
def test_what_fails_at_the_start_or_in_a_trial_is_an_error_and_nothing_is_left(
    rknnrt_bed: RknnrtBed, graphs: Path, fault: str, said: str
) -> None:
    rknnrt_bed.stub.fail(fault)
    refused(World([5], [1]), graphs, DeviceError, said)


def test_a_trial_compares_with_the_cpu(rknnrt_bed: RknnrtBed, graphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the canary does not see: rows that are wrong while its own is right."""
    run = rknnrt_device.RknnrtDevice._run

    def wrong_on_core_1(self: RknnrtDevice, context: object, job: object, core: int) -> None:
        run(self, context, job, core)  # type: ignore[arg-type] # handed on
        if core == 1:
            job.out[:, 0] += 1  # type: ignore[attr-defined] # a job

    monkeypatch.setattr(RknnrtDevice, "_run", wrong_on_core_1)
    refused(
        World([5], [1]), graphs, DeviceError, "a trial of core 1 by the rknnrt runtime is off by 1: .* another runtime"
    )


@pytest.mark.parametrize("native", ["nhwc", "stride"])
def test_a_library_that_lays_operands_out_otherwise_is_refused(
    rknnrt_bed: RknnrtBed, graphs: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_STUB_NATIVE", native)
    refused(World([5], [1]), graphs, DeviceError, "the NPU wants q in format.* use the rknnlite runtime")
    assert rknnrt_bed.stub.calls("rknn_run") == 0


def test_every_exported_launch_is_looked_at_before_any_is_run(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    """Three graphs, three buckets, of which decode has three batches: 15 sets of shapes; the last lies otherwise."""
    with opened(World([5], [1]), graphs):
        pass
    rknnrt_bed.stub.fail("")
    queries = 3 * 3 * (3 + 1) + 2 * 3 * (4 + 1)  # decode has three inputs and an output, a tile four
    at_open = 9 * 2 + 3 * (3 + 4 + 4)  # version and number; each input
    rknnrt_bed.stub.fail(f"rknn_query@{at_open + queries}=garbage")
    refused(World([5], [1]), graphs, DeviceError, "the NPU wants .* use the rknnlite runtime")


def test_a_library_of_an_unknown_version_is_refused(
    rknnrt_bed: RknnrtBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_STUB_VERSION", "2.6.0")
    folder = export_stub_graphs(tmp_path, *SHAPE, version="2.6.0")
    refused(World([5], [1]), folder, DeviceError, r"'2\.6\.0', rockpage knows the structs of 2\.3\.2 to 2\.5\.0")


def test_graphs_of_another_compiler_are_refused(
    rknnrt_bed: RknnrtBed, graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_STUB_VERSION", "2.3.2")
    refused(World([5], [1]), graphs, DeviceError, r"librknnrt.so is 2\.3\.2, the graphs were compiled by .* 2\.5\.0")


def test_without_a_heap_that_gives_memory_there_is_an_error_and_no_context(rknnrt_bed: RknnrtBed, graphs: Path) -> None:
    rknnrt_bed.heaps.budget["cma"] = 4096
    refused(World([5], [1]), graphs, RegionError, "cannot take 3 x .* MiB for DMA .*heap cma: Cannot allocate memory")
    assert rknnrt_bed.stub.calls("rknn_init") == 0


def test_heaps_that_are_closed_are_named_with_their_owners(
    rknnrt_bed: RknnrtBed, graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open: Callable[..., int] = os.open

    def closed(path: str | Path, *rest: int, **options: int) -> int:  # root, who may run the tests, may open any
        if str(path).endswith("/cma"):
            raise PermissionError(13, "Permission denied")
        return really_open(path, *rest, **options)

    monkeypatch.setattr(os, "open", closed)
    refused(World([5], [1]), graphs, RegionError, r"heap cma: Permission denied, \S*/cma is \d{4} \w+:\w+.*GROUP=")


def test_an_npu_that_another_process_holds_is_refused(rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path) -> None:
    with DeviceLock(NPU), pytest.raises(DeviceError, match=r"fdab0000\.npu is in use by process"):
        RknnrtDevice(graphs, *SHAPE, library=stub_library)
    assert rknnrt_bed.stub.calls("rknn_init") == 0


def test_buckets_that_are_no_whole_tiles_are_refused(rknnrt_bed: RknnrtBed, tmp_path: Path, stub_library: Path) -> None:
    folder = export_stub_graphs(tmp_path, *SHAPE, buckets=(64, 100))
    with pytest.raises(DeviceError, match="a bucket of 100 tokens does not fill tiles of 8"):
        RknnrtDevice(folder, *SHAPE, library=stub_library)
    with pytest.raises(UsageError, match="at least one core, got 0"):
        RknnrtDevice(folder, *SHAPE, cores=0, library=stub_library)
    assert rknnrt_bed.heaps.handed_out == []


# --- its memory -------------------------------------------------------------------------------------------------------


def test_an_arena_is_what_the_npu_can_address_and_one_for_each_device(
    rknnrt_bed: RknnrtBed, graphs: Path, stub_library: Path
) -> None:
    device = RknnrtDevice(graphs, *SHAPE, cores=1, library=stub_library)
    with pytest.raises(UsageError, match="has no arena"):
        device.sync_to_device(0, 1)
    taken = len(rknnrt_bed.heaps.handed_out)
    with pytest.raises(
        RegionError, match=r"an arena of 1 x 2048\.0 MiB is beyond the 4 GiB .* the 2 GiB of one dma-buf"
    ):
        device.take(1 << 31, 1 << 31)
    with pytest.raises(RegionError, match=r"an arena of 4096 x 1\.0 MiB is beyond"):
        device.take(4 << 30, 1 << 20)
    assert len(rknnrt_bed.heaps.handed_out) == taken
    region = device.take(3 * 4096 + 1, 4096)
    assert (region.nbytes, region.piece_bytes) == (4 * 4096, 4096)
    with pytest.raises(UsageError, match="has an arena already"):
        device.take(4096, 4096)
    device.close()
    device.close()
    region.close()

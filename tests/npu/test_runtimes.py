"""Which runtime a name opens, and by what its launches are placed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from hostcache.errors import DeviceError, RegionError, UsageError
from npu.board import Board as Machine
from npu.board import Heap
from npu.calibration import CalibrationKey, save_cost_model
from npu.cost_model import PUBLISHED
from npu.cpu import CpuAttention
from npu.device_node import DeviceNode
from npu.discovery import discover
from npu.placement import ByCost, Everything
from npu.runtime_choice import choose
from npu.runtimes import open_runtime
from npu.staged import StagedAttention
from tests.npu.beds import BEDS
from tests.npu.rknnlite_stand_in import Board
from tests.npu.rknnrt_bed import RknnrtBed
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.test_cost_model import ROUND
from tests.npu.test_emulated_attention import GEOMETRY, HEADS, World


@pytest.fixture
def world() -> World:
    return World([30, 40], [1, 20])


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Board]:
    monkeypatch.setattr("npu.device_lock.lock_folders", lambda: [tmp_path])
    board = Board()
    board.install(monkeypatch)
    yield board
    assert board.alive == []


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_stub_graphs(tmp_path_factory.mktemp("graphs"), GEOMETRY.kv_heads, HEADS, GEOMETRY.head_dim)


Pretend: TypeAlias = Callable[[str], None]


@pytest.fixture
def machine_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretend:
    """Lets this machine be another, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def pretend(name: str) -> None:
        bed = BEDS[name].write(tmp_path / "machine")
        monkeypatch.setattr("npu.runtimes.discover", lambda: discover(bed))

    return pretend


@pytest.mark.parametrize(
    ("machine", "given", "expected"),
    [
        ("vendor", False, "cpu"),
        ("vendor", True, "rknnlite"),
        ("rocket", True, "cpu"),  # the vendor's runtime cannot use mainline Linux's driver
        ("pc", True, "cpu"),
    ],
)
@pytest.mark.usefixtures("board")
def test_auto_is_the_cpu_unless_there_is_an_npu_and_its_graphs_are_given(
    world: World, graphs: Path, machine_is: Pretend, machine: str, *, given: bool, expected: str
) -> None:
    machine_is(machine)
    runtime = open_runtime("auto", world.cache, HEADS, graphs=graphs if given else None)
    assert runtime.name == expected
    assert expected == "cpu" or isinstance(getattr(runtime, "placement", None), ByCost)
    runtime.close()


def test_auto_reads_in_place_where_library_and_heap_are_there_and_gives_it_what_gains(
    rknnrt_bed: RknnrtBed, world: World, graphs: Path, machine_is: Pretend, caplog: pytest.LogCaptureFixture
) -> None:
    machine_is("vendor")
    with caplog.at_level(logging.INFO, "npu.runtimes"):
        runtime = open_runtime("auto", world.cache, HEADS, graphs=graphs)
    assert isinstance(runtime, StagedAttention)
    assert runtime.name == "rknnrt"
    assert isinstance(runtime.placement, ByCost)
    assert caplog.messages[0].startswith("attention runtime rknnrt: fdab0000.npu, its graphs, /")
    assert len(caplog.messages) == 1
    runtime.close()


@pytest.mark.parametrize(("given", "warnings"), [(True, 1), (False, 0)])
def test_auto_warns_if_graphs_are_given_for_nothing(
    world: World, graphs: Path, machine_is: Pretend, caplog: pytest.LogCaptureFixture, *, given: bool, warnings: int
) -> None:
    machine_is("pc")
    with caplog.at_level(logging.WARNING, "npu.runtimes"):
        runtime = open_runtime("auto", world.cache, HEADS, graphs=graphs if given else None)
    assert runtime.name == "cpu"
    said = ["attention runtime cpu: there is no NPU with the vendor's driver"]
    assert caplog.messages == said * warnings
    runtime.close()


@pytest.mark.parametrize(
    ("fault", "budget", "said"),
    [
        ("rknn_run@8=stale", 1 << 30, "do not answer this launch"),
        ("rknn_set_core_mask@2=-1", 1 << 30, "the chip has no such core"),
        ("", 1 << 16, "cannot take 3 x .* MiB for DMA"),
    ],
)
def test_auto_takes_the_wheel_where_the_library_cannot_be_used_and_warns_once(
    rknnrt_bed: RknnrtBed,
    board: Board,
    world: World,
    *,
    graphs: Path,
    machine_is: Pretend,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    budget: int,
    said: str,
) -> None:
    machine_is("vendor")
    rknnrt_bed.stub.fail(fault)
    rknnrt_bed.heaps.budget["cma"] = budget
    with caplog.at_level(logging.WARNING):
        runtime = open_runtime("auto", world.cache, HEADS, graphs=graphs)
    (message,) = caplog.messages
    assert re.search(f"^the rknnrt runtime cannot be used, so rknnlite is: .*{said}", message)
    assert (runtime.name, len(board.alive)) == ("rknnlite", 9)
    np.testing.assert_allclose(world.attend(runtime), world.expected(), rtol=0, atol=0.004)
    runtime.close()


@pytest.mark.usefixtures("rknnrt_bed", "board")
def test_auto_takes_the_wheel_where_a_bucket_is_not_whole_tiles(
    world: World, tmp_path: Path, machine_is: Pretend, caplog: pytest.LogCaptureFixture
) -> None:
    machine_is("vendor")
    graphs = export_stub_graphs(tmp_path, GEOMETRY.kv_heads, HEADS, GEOMETRY.head_dim, buckets=(64, 100))
    runtime = open_runtime("auto", world.cache, HEADS, graphs=graphs)
    assert runtime.name == "rknnlite"
    assert "rknnlite is: a bucket of 100 tokens does not fill tiles of 8" in caplog.text
    runtime.close()


@pytest.mark.usefixtures("board")
def test_auto_says_why_nothing_can_stay_staged(
    rknnrt_bed: RknnrtBed, world: World, graphs: Path, machine_is: Pretend
) -> None:
    """And not that the runtime which would come next is of no use for it."""
    machine_is("vendor")
    rknnrt_bed.heaps.budget["cma"] = 1 << 16
    with pytest.raises(RegionError, match=r"cannot take 3 x .* MiB for DMA"):
        open_runtime("auto", world.cache, HEADS, graphs=graphs, resident_bytes=1 << 20)


@pytest.mark.usefixtures("rknnrt_bed", "board")
def test_what_was_asked_for_by_name_is_not_replaced(world: World, graphs: Path, rknnrt_bed: RknnrtBed) -> None:
    rknnrt_bed.stub.fail("rknn_run@8=stale")
    with pytest.raises(DeviceError, match="do not answer this launch"):
        open_runtime("rknnrt", world.cache, HEADS, graphs=graphs)
    with pytest.raises(UsageError, match="the rknnrt runtime needs the model's attention graphs"):
        open_runtime("rknnrt", world.cache, HEADS)


def test_what_auto_tries_follows_from_driver_graphs_library_heaps_and_iommu(tmp_path: Path) -> None:
    vendor = discover(BEDS["vendor"].write(tmp_path))
    assert vendor.npu is not None
    library = tmp_path / "librknnrt.so"
    library.touch()

    def chosen(board: Machine, *, graphs: bool = True, library: Path = library) -> tuple[list[str], str]:
        return choose(board, graphs=graphs, library=library)

    def heaps(*names: str, usable: bool = True) -> tuple[Heap, ...]:
        node = DeviceNode("/dev/dma_heap/x", "device", (1, 1), 0o660, "root", "video", usable)
        return tuple(Heap(name, replace(node, path=f"/dev/dma_heap/{name}")) for name in names)

    both, copying = ["rknnrt", "rknnlite"], ["rknnlite"]
    assert chosen(replace(vendor, heaps=heaps("system")))[0] == both
    assert chosen(replace(vendor, heaps=heaps("cma")))[0] == both
    assert chosen(replace(vendor, npu=None)) == (["cpu"], "there is no NPU with the vendor's driver")
    assert chosen(vendor, graphs=False)[0] == ["cpu"]
    assert chosen(vendor, library=tmp_path / "nowhere") == (
        copying,
        f"{tmp_path / 'nowhere'} is not there to be called",
    )
    names, why = chosen(replace(vendor, heaps=heaps("cma", "system", usable=False)))
    assert names == copying
    assert why == (
        "no DMA heap is open to this user: /dev/dma_heap/cma (0660 root:video), /dev/dma_heap/system (0660 root:video)"
    )
    names, why = chosen(replace(vendor, heaps=heaps("system-uncached")))
    assert (names, why.startswith("no DMA heap is open to this user: none of cma, ")) == (copying, True)
    bare = replace(vendor, npu=replace(vendor.npu, iommu=False))
    assert chosen(replace(bare, heaps=heaps("system")))[0] == copying  # it would not see such memory in one piece
    assert chosen(replace(bare, heaps=heaps("reserved")))[0] == both


@pytest.mark.parametrize(("placement", "kind"), [(None, Everything), ("device", Everything), ("cost", ByCost)])
def test_a_device_that_was_asked_for_gets_everything_unless_told_otherwise(
    world: World, tmp_path: Path, placement: Any, kind: type
) -> None:
    runtime = open_runtime("emulated", world.cache, HEADS, placement=placement, cache_dir=tmp_path)
    assert isinstance(runtime, StagedAttention)
    assert isinstance(runtime.placement, kind)
    runtime.close()


BUCKETS = "64-128-256-512-1024-2048-4096"


def test_costs_are_those_measured_for_this_runtime_and_these_threads(world: World, tmp_path: Path) -> None:
    def source(threads: int = 1, rounding: Any = "output") -> str:
        runtime = open_runtime(
            "emulated", world.cache, HEADS, threads=threads, rounding=rounding, placement="cost", cache_dir=tmp_path
        )
        assert isinstance(runtime, StagedAttention)
        assert isinstance(runtime.placement, ByCost)
        model = runtime.placement.model
        runtime.close()
        assert model.source != PUBLISHED.source or model == replace(PUBLISHED, cores=3)
        return model.source

    assert source() == PUBLISHED.source
    host = CpuAttention(world.cache, HEADS)
    key = CalibrationKey.here(f"emulated-output-{BUCKETS}+{host.numerics}", GEOMETRY, HEADS, threads=1)
    save_cost_model(key, ROUND, tmp_path)
    assert source() == ROUND.source
    assert source(threads=2) == PUBLISHED.source
    assert source(rounding="op") == PUBLISHED.source
    host.close()


@pytest.mark.usefixtures("board")
def test_the_published_costs_are_told_a_chips_cores(world: World, graphs: Path, machine_is: Pretend) -> None:
    machine_is("fused")
    runtime = open_runtime("auto", world.cache, HEADS, graphs=graphs)
    assert isinstance(runtime, StagedAttention)
    assert isinstance(runtime.placement, ByCost)
    assert runtime.placement.model == replace(PUBLISHED, cores=2)
    runtime.close()


def test_measured_costs_decide_where_a_step_runs(world: World, tmp_path: Path) -> None:
    """A launch that takes a second goes nowhere, one that takes nothing goes to the device."""
    host = CpuAttention(world.cache, HEADS)
    key = CalibrationKey.here(f"emulated-output-{BUCKETS}+{host.numerics}", GEOMETRY, HEADS, threads=1)
    for launch, host_speed, launches in ((1.0, 1e12, 0), (1e-9, 1.0, 2)):
        model = replace(
            ROUND, launch_seconds=launch, host_bytes_per_second=host_speed, host_multiply_adds_per_second=host_speed
        )
        save_cost_model(key, model, tmp_path)
        runtime = open_runtime("emulated", world.cache, HEADS, placement="cost", cache_dir=tmp_path)
        assert isinstance(runtime, StagedAttention)
        np.testing.assert_allclose(world.attend(runtime), world.expected(), rtol=0, atol=0.004)
        assert runtime.cores.launches == launches  # a row, and 20 rows as one tile
        runtime.close()
    host.close()


def test_without_a_home_only_costs_ask_for_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise UsageError("user 1 has no home folder for the cache")

    monkeypatch.setattr("npu.runtimes.default_cache_dir", no_home)
    open_runtime("emulated", world.cache, HEADS).close()
    with pytest.raises(UsageError, match="no home folder"):
        open_runtime("emulated", world.cache, HEADS, placement="cost")


@pytest.mark.usefixtures("board")
def test_memory_to_stay_staged_goes_where_it_is_of_use(world: World, graphs: Path, machine_is: Pretend) -> None:
    runtime = open_runtime("emulated", world.cache, HEADS, resident_bytes=1 << 20)
    assert isinstance(runtime, StagedAttention)
    assert runtime.residency is not None
    runtime.close()
    with pytest.raises(UsageError, match="the cpu runtime stages nothing, so it cannot keep 4096 bytes"):
        open_runtime("cpu", world.cache, HEADS, resident_bytes=4096)
    machine_is("vendor")
    with pytest.raises(UsageError, match=r"4096 bytes .* the rknnlite device copies what it is given"):
        open_runtime("rknnlite", world.cache, HEADS, graphs=graphs, resident_bytes=4096)


def test_unknown_names_are_refused(world: World) -> None:
    with pytest.raises(UsageError, match="no runtime is called 'gpu': use one of auto, cpu, emulated, simulator, rkn"):
        open_runtime("gpu", world.cache, HEADS)
    with pytest.raises(UsageError, match="no placement is called 'npu': use one of device, cost"):
        open_runtime("emulated", world.cache, HEADS, placement="npu")  # type: ignore[arg-type] # the point

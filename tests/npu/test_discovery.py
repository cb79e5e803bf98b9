"""Discovery on machines made of files: which NPU, which chip, and what is not taken for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu.board import Board, ThermalZone
from npu.discovery import discover
from npu.machine import Machine
from tests.npu.beds import BEDS
from tests.npu.fake_machine import Bed, FakeDevice, FakeNode, TreeMachine


@pytest.fixture
def found(tmp_path: Path, request: pytest.FixtureRequest) -> Board:
    """The board of the bed that a test names."""
    return discover(BEDS[request.param].write(tmp_path))


EXPECTED = {
    # bed: chip, driver, form, cores, nodes by their stable names
    "vendor": (
        "RK3588",
        "rknpu",
        "drm",
        3,
        ["by-path/platform-fdab0000.npu-render", "by-path/platform-fdab0000.npu-card"],
    ),
    "misc": ("RK3588", "rknpu", "misc", 3, ["/dev/rknpu"]),
    "rocket": ("RK3588", "rocket", "accel", 3, ["/dev/accel/accel0"]),
    "rk3576": ("RK3576", "rknpu", "drm", 2, ["renderD129", "card1"]),
    "rk3568": ("RK3568", "rknpu", "drm", 1, ["renderD129", "card1"]),
    "headless": ("RK3588", "rknpu", "drm", 3, ["by-path/platform-fdab0000.npu-render", "card0"]),
    "closed": (
        "RK3588",
        "rknpu",
        "drm",
        3,
        ["by-path/platform-fdab0000.npu-render", "by-path/platform-fdab0000.npu-card"],
    ),
    "unbound": ("RK3588", None, None, 0, []),
    "container": ("RK3588", "rknpu", "drm", 3, ["renderD129", "card1"]),
    "fused": (
        "RK3583",
        "rknpu",
        "drm",
        2,
        ["by-path/platform-fdab0000.npu-render", "by-path/platform-fdab0000.npu-card"],
    ),
}


@pytest.mark.parametrize(("found", "expected"), EXPECTED.items(), indirect=["found"], ids=EXPECTED)
def test_the_npu_is_found_by_its_driver(found: Board, expected: tuple[str, str, str, int, list[str]]) -> None:
    soc, driver, form, cores, nodes = expected
    npu = found.npu
    assert npu is not None
    assert found.soc is not None
    assert (found.soc.name, npu.driver, npu.form, npu.cores) == (soc, driver, form, cores)
    assert [node.stable_path for node in npu.nodes] == [os.path.join("/dev/dri", node) for node in nodes]
    assert npu.name == {"RK3576": "27700000.npu", "RK3568": "fde40000.npu"}.get(soc, "fdab0000.npu")
    assert npu.iommu == (driver is not None)


@pytest.mark.parametrize("found", ["disabled", "pc", "nothing"], indirect=True)
def test_displays_and_other_makers_npus_are_none(found: Board) -> None:
    assert found.npu is None
    assert found.npu_clock is None


@pytest.mark.parametrize("found", ["disabled"], indirect=True)
def test_a_device_tree_that_switches_the_npu_off_is_named(found: Board) -> None:
    assert found.disabled == ("npu@fdab0000", "npu@fdac0000", "npu@fdad0000")
    assert found.is_board


@pytest.mark.parametrize("found", ["pc", "nothing"], indirect=True)
def test_what_is_no_board_says_so(found: Board) -> None:
    assert not found.is_board
    assert not found.device_tree
    assert found.model is None


@pytest.mark.parametrize("found", ["vendor"], indirect=True)
def test_what_belongs_to_the_npu_is_read(found: Board) -> None:
    assert found.source == "sysfs"
    assert found.model == "Radxa ROCK 5B"
    assert found.device_tree
    assert found.npu is not None
    assert found.npu.version == "0.9.8"
    render = found.npu.nodes[0]
    assert (render.path, render.kind, render.number, render.mode) == (
        "/dev/dri/renderD129",
        "device",
        (226, 129),
        0o660,
    )
    assert found.rknpu.kind == "missing"
    assert found.npu_clock is not None
    assert (found.npu_clock.governor, found.npu_clock.current, found.npu_clock.highest) == (
        "rknpu_ondemand",
        10**9,
        10**9,
    )
    assert found.ddr_clock is not None
    assert (found.ddr_clock.current, found.ddr_clock.highest) == (528_000_000, 2_112_000_000)
    assert [(clock.name, clock.highest) for clock in found.cpu_clocks] == [
        ("policy0", 1_800_000_000),
        ("policy4", 2_400_000_000),
    ]
    assert [heap.name for heap in found.heaps] == ["cma", "system", "system-uncached"]
    assert found.thermal == (
        ThermalZone("soc-thermal", 44.0, passive=75.0, critical=115.0),
        ThermalZone("npu-thermal", 43.5, passive=None, critical=115.0),
    )


@pytest.mark.parametrize("found", ["container"], indirect=True)
def test_without_a_device_tree_the_npu_tells_the_chip(found: Board) -> None:
    assert not found.device_tree
    assert found.runs_graphs


@pytest.mark.parametrize("found", ["rk3576"], indirect=True)
def test_a_chip_that_the_graphs_are_not_for_is_a_board_all_the_same(found: Board) -> None:
    assert found.is_board
    assert not found.runs_graphs


@pytest.mark.parametrize("found", ["closed"], indirect=True)
def test_closed_nodes_are_there_and_not_usable(found: Board) -> None:
    assert found.npu is not None
    assert [(node.kind, node.usable) for node in found.npu.nodes] == [("device", False)] * 2
    assert [heap.node.usable for heap in found.heaps] == [False] * 3


def test_nodes_that_only_the_kernel_has_are_missing(tmp_path: Path) -> None:
    machine = BEDS["vendor"].write(tmp_path)
    for node in ("dri/renderD129", "dri/card1", "dma_heap/cma"):
        (tmp_path / "dev" / node).unlink()
    board = discover(machine)
    assert board.npu is not None
    assert [(node.path, node.kind) for node in board.npu.nodes] == [
        ("/dev/dri/renderD129", "missing"),
        ("/dev/dri/card1", "missing"),
    ]
    assert [heap.node.kind for heap in board.heaps] == ["missing", "device", "device"]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("link", lambda path: path.symlink_to("/dev/dri/renderD129")),
        ("file", lambda path: path.write_bytes(b"")),
        ("missing", lambda path: None),
    ],
)
def test_what_stands_at_dev_rknpu_is_not_followed(tmp_path: Path, kind: str, make: object) -> None:
    machine = BEDS["vendor"].write(tmp_path)
    assert callable(make)
    make(tmp_path / "dev/rknpu")
    rknpu = discover(machine).rknpu
    assert (rknpu.kind, rknpu.usable) == (kind, False)
    assert rknpu.target == ("/dev/dri/renderD129" if kind == "link" else None)


@pytest.mark.parametrize(
    ("names", "soc"),
    [
        (["xunlong,orangepi-5", "rockchip,rk3588s"], "RK3588S"),
        (["radxa,e52c", "rockchip,rk3582", "rockchip,rk3588s"], "RK3582"),
        (["some,board", "rockchip,rk3583", "rockchip,rk3588"], "RK3583"),
        (["radxa,zero3", "rockchip,rk3566"], "RK3566"),
        (["hardkernel,odroid-m1", "rockchip,rk3568"], "RK3568"),
        (["some,board", "rockchip,rk3562"], "RK3562"),
        (["raspberrypi,5-model-b", "brcm,bcm2712"], None),
    ],
)
def test_chips_are_told_apart_by_the_device_tree(tmp_path: Path, names: list[str], soc: str | None) -> None:
    text = "".join(f"{name}\0" for name in names).encode()
    board = discover(Bed(files={"/proc/device-tree/compatible": text}).write(tmp_path))
    assert (board.soc.name if board.soc else None) == soc


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("/sys/module/rknpu/version", b"0.9.6\n", "0.9.6"),
        ("/proc/rknpu/version", b"RKNPU driver: v0.9.3\n", "0.9.3"),
        ("/sys/kernel/debug/rknpu/version", b"RKNPU driver: v0.8.2\n", "0.8.2"),
        ("/sys/module/rknpu/version", b"out of tree\n", None),
    ],
)
def test_the_driver_says_its_version_in_one_of_three_places(
    tmp_path: Path, file: str, text: bytes, version: str | None
) -> None:
    files = {name: content for name, content in BEDS["vendor"].files.items() if "rknpu" not in name}
    board = discover(replace(BEDS["vendor"], files={**files, file: text}).write(tmp_path))
    assert board.npu is not None
    assert board.npu.version == version


@pytest.mark.parametrize(
    ("mark", "text", "kind"),
    [
        ("/.dockerenv", b"", "docker"),
        ("/run/.containerenv", b"", "podman"),
        ("/run/systemd/container", b"lxc\n", "lxc"),
    ],
)
def test_containers_are_named(tmp_path: Path, mark: str, text: bytes, kind: str) -> None:
    assert discover(Bed(files={mark: text}).write(tmp_path)).container == kind


def test_a_fuse_that_another_chip_names_takes_no_core(tmp_path: Path) -> None:
    """Only for the RK3588's NPU does the driver read it."""
    npu, *others = BEDS["rk3576"].devices
    bed = replace(BEDS["rk3576"], devices=(replace(npu, attributes={"of_node/nvmem-cell-names": b"cores\0"}), *others))
    board = discover(bed.write(tmp_path))
    assert board.npu is not None
    assert board.soc is not None
    assert (board.soc.name, board.npu.cores) == ("RK3576", 2)


@pytest.mark.parametrize(
    "uevent",
    [
        "",
        "OF_COMPATIBLE_N=x\n",
        "OF_COMPATIBLE_N=3\nOF_COMPATIBLE_0=rockchip,rk3588-rknpu\n",
        "no separator\n=\nDRIVER=",
    ],
)
def test_a_strange_uevent_is_read_as_far_as_it_goes(tmp_path: Path, uevent: str) -> None:
    machine = BEDS["unbound"].write(tmp_path)
    (tmp_path / "sys/devices/platform/fdab0000.npu/uevent").write_text(uevent)
    npu = discover(machine).npu
    assert (npu is not None) == ("rk3588-rknpu" in uevent)


def test_a_link_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "board/sys/class/drm").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "board/sys/class/drm/card9").symlink_to("../../../../outside")
    machine = Machine(tmp_path / "board")
    assert machine.resolved("/sys/class/drm/card9") is None
    assert machine.resolved("/sys/class/drm") == "/sys/class/drm"
    assert discover(machine).npu is None


class Unplugging(TreeMachine):
    """Loses files while it is looked at: before the n-th access, those whose path holds a word."""

    def __init__(self, machine: TreeMachine, word: str, after: int) -> None:
        super().__init__(machine.root, machine.nodes)
        self.word = word
        self.left = after

    def path(self, name: str) -> Path:
        self.left -= 1
        if self.left == 0:
            for path in sorted(self.files(), reverse=True):
                if self.word in str(path.relative_to(self.root)):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        return super().path(name)

    def files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.root):
            yield from (Path(folder, name) for name in folders + files)


@settings(max_examples=30, deadline=None)  # each writes some hundred files, on a disk that others use, too
@given(
    word=st.sampled_from(["fdab0000", "drm", "renderD129", "uevent", "thermal", "trip", "device-tree"]), data=st.data()
)
def test_a_device_that_goes_away_is_no_error(
    tmp_path_factory: pytest.TempPathFactory, word: str, data: st.DataObject
) -> None:
    machine = BEDS["vendor"].write(tmp_path_factory.mktemp("bed"))
    after = data.draw(st.integers(1, 110))  # a whole look at this bed takes 104
    board = discover(Unplugging(machine, word, after))
    # Whatever was found has the shape of something whole.
    assert board.npu is None or board.npu.name == "fdab0000.npu"
    assert all(zone.name.endswith("-thermal") for zone in board.thermal)


def test_a_board_is_asked_for_no_file_that_wakes_the_npu(tmp_path: Path) -> None:
    """The debug file `freq` powers the NPU on, and devfreq's `load` holds nothing."""

    class Watched(TreeMachine):
        read_names: list[str]

        def read(self, name: str) -> bytes:
            self.read_names.append(name)
            return super().read(name)

    bed = BEDS["vendor"].with_files(sys__kernel__debug__rknpu__freq=b"1000000000\n")
    machine = bed.write(tmp_path)
    watched = Watched(machine.root, machine.nodes)
    watched.read_names = []
    discover(watched)
    assert any(name.endswith("/cur_freq") for name in watched.read_names)
    assert not [name for name in watched.read_names if name.endswith(("/freq", "/load", "/volt", "/power"))]


def test_two_platform_devices_are_not_mixed_up(tmp_path: Path) -> None:
    """A device whose path begins like the NPU's is not below it."""
    other = FakeDevice(
        "/devices/platform/fdab0000.npu2/drm/renderD130", "drm", node=FakeNode("/dev/dri/renderD130", (226, 130))
    )
    bed = replace(BEDS["vendor"], devices=(*BEDS["vendor"].devices, other))
    npu = discover(bed.write(tmp_path)).npu
    assert npu is not None
    assert [node.path for node in npu.nodes] == ["/dev/dri/renderD129", "/dev/dri/card1"]


def test_another_maker_s_accelerator_beside_rocket_is_not_its_node(tmp_path: Path) -> None:
    other = FakeDevice(
        "/devices/pci0000:00/0000:00:01.0/accel/accel1", "accel", node=FakeNode("/dev/accel/accel1", (261, 1))
    )
    npu = discover(replace(BEDS["rocket"], devices=(other, *BEDS["rocket"].devices)).write(tmp_path)).npu
    assert npu is not None
    assert [node.path for node in npu.nodes] == ["/dev/accel/accel0"]

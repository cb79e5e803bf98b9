"""Each of the doctor's checks: one change to a healthy board, and what must be said about it."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from npu import doctor_vendor
from tests.npu.beds import BEDS
from tests.npu.doctor_cases import HEALTHY, PROCESS, Files, answer, case, elf
from tests.npu.fake_machine import Bed, FakeDevice


def with_device(bed: Bed, path: str, **attributes: bytes) -> Bed:
    """The bed with other attributes of one device."""
    return replace(
        bed,
        devices=tuple(
            replace(d, attributes={**d.attributes, **attributes}) if d.path == path else d for d in bed.devices
        ),
    )


NPU_CLOCK = "/devices/platform/fdab0000.npu/devfreq/fdab0000.npu"
DDR_CLOCK = "/devices/platform/dmc/devfreq/dmc"
NPU_HEAT = "/devices/virtual/thermal/thermal_zone6"
SOC_HEAT = "/devices/virtual/thermal/thermal_zone0"
HUGE = b"9" * 400  # beyond what a float holds


@pytest.mark.parametrize(
    ("files", "name", "status", "words"),
    [
        ({"/sys/module/rknpu/version": b"0.9.3"}, "driver_version", "warn", "cores 1 and 2"),
        ({"/sys/module/rknpu/version": b"0.9.2"}, "driver_version", "warn", "cores 1 and 2"),
        ({"/sys/module/rknpu/version": b"0.8.8"}, "driver_version", "warn", "older than 0.9.6"),
        ({"/sys/module/rknpu/version": b"0.9.6"}, "driver_version", "ok", "0.9.6"),
        ({"/sys/module/rknpu/version": b"0.10.0"}, "driver_version", "ok", "0.10.0"),
        ({"/usr/lib/librknnrt.so": None}, "librknnrt", "fail", "/usr/lib/librknnrt.so is missing"),
        ({"/usr/lib/librknnrt.so": b""}, "librknnrt", "fail", "cannot be read, or is no library for aarch64"),
        ({"/usr/lib/librknnrt.so": elf(b"", machine=62)}, "librknnrt", "fail", "no library for aarch64"),
        ({"/usr/lib/librknn_runtime.so": elf(b"")}, "librknnrt", "warn", "librknn_runtime.so is taken in its place"),
        (
            {"/usr/lib/librknnrt.so": None, "/usr/lib/aarch64-linux-gnu/librknnrt.so": elf(b"")},
            "librknnrt",
            "fail",
            "/usr/lib/aarch64-linux-gnu/librknnrt.so is not where",
        ),
        ({"/usr/lib/librknnrt.so": elf(b"nothing")}, "runtime_versions", "unknown", "no librknnrt.so that says"),
        (
            {"/usr/lib/librknnrt.so": elf(b"librknnrt version: 2.3.2 (429)")},
            "runtime_versions",
            "warn",
            "librknnrt.so 2.3.2",
        ),
        ({"/proc/cpuinfo": b"Features\t: fp asimd\n"}, "cpu_features", "warn", "fphp, asimdhp, asimddp missing"),
        ({"/proc/cpuinfo": None}, "cpu_features", "unknown", "does not tell"),
        ({"/proc/device-tree/compatible": None}, "device_tree", "fail", "cannot be read"),
        ({"/sys/kernel/debug/rknpu/mm": None}, "sram", "info", "none"),
        ({}, "sram", "info", "SRAM total size: 978944"),
        ({}, "npu_load", "info", "cores at 0 %, 11 %, 0 %"),
        ({"/proc/rknpu/load": b"NPU load:  7%\n"}, "npu_load", "info", "cores at 7 %"),
        ({"/sys/kernel/debug/rknpu/load": b"strange\n"}, "npu_load", "unknown", "does not tell"),
        (
            {"/boot/config-6.1.99-rockchip": b"CONFIG_CMA=y\nCONFIG_UDMABUF=m\n"},
            "kernel_config",
            "info",
            "DMABUF_HEAPS,",
        ),
        ({"/boot/config-6.1.99-rockchip": None}, "kernel_config", "unknown", "does not show"),
        ({"/proc/config.gz": gzip.compress(b"# CONFIG_CMA is not set\n")}, "kernel_config", "info", "off: CMA, "),
        ({"/proc/config.gz": b"no gzip"}, "kernel_config", "ok", "all that is used"),
        ({"/proc/config.gz": gzip.compress(b"CONFIG_CMA=y\n")[:-9]}, "kernel_config", "ok", "all that is used"),
        ({"/proc/config.gz": b"\x1f\x8b\x08" + bytes(7) + b"damaged"}, "kernel_config", "ok", "all that is used"),
        ({"/proc/self/mountinfo": b"\n31 25\n"}, "cgroup_memory", "ok", "no limit below"),
        ({"/proc/meminfo": b"MemTotal: %b kB\nMemAvailable: %b kB\n" % (HUGE, HUGE)}, "memory", "unknown", "not tell"),
        ({f"/sys{NPU_CLOCK}/cur_freq": HUGE}, "npu_clock", "ok", "fdab0000.npu at an unknown clock"),
        ({f"/sys{NPU_CLOCK}/available_frequencies": HUGE}, "npu_clock", "ok", "fdab0000.npu 1000 MHz"),
        ({f"/sys{NPU_HEAT}/temp": HUGE}, "thermal", "ok", "soc-thermal 44"),
        ({f"/sys{NPU_HEAT}/trip_point_0_temp": HUGE}, "thermal", "ok", "soc-thermal 44"),
        ({"/dev/kmsg": None}, "kernel_log", "unknown", "no log"),
        (
            {
                "/dev/kmsg": b"6,1,1,-;RKNPU: job timeout, flags: 0x0:\n SUBSYSTEM=platform\n"
                b"6,2,2,-;RKNPU: failed to wait job, task counter: 0, flags: 0x5, ret = 0\n"
            },
            "kernel_log",
            "warn",
            "2 complaints of the NPU's driver, the last: failed to wait job",
        ),
        (
            {"/dev/kmsg": b"6,1,1,-;RKNPU fdab0000.npu: can't request region for resource\n"},
            "kernel_log",
            "ok",
            "no comp",
        ),
        ({"/.dockerenv": b""}, "container", "info", "docker"),
        ({"/run/.containerenv": b""}, "container", "info", "podman"),
    ],
)
def test_files_that_differ(tmp_path: Path, files: Files, name: str, status: str, words: str) -> None:
    check = answer(name, tmp_path, files=files)
    assert (check.status, words in check.found) == (status, True), check


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lite": None}, ("rknn_toolkit_lite2", "fail", "not installed", "pip install 'rockpage[board]'")),
        (
            {"lite": None, "python": (3, 13)},
            ("rknn_toolkit_lite2", "fail", "Python 3.13, and there is none", "Python 3.12"),
        ),
        ({"lite": "2.3.2"}, ("runtime_versions", "warn", "rknn-toolkit-lite2 2.3.2", "rknn-toolkit-lite2==2.5.0")),
        ({"lite": None}, ("runtime_versions", "ok", "graphs 2.5.0, librknnrt.so 2.5.0", "")),
        ({"lite": "2.5.0+b1"}, ("runtime_versions", "ok", "graphs 2.5.0", "")),
        ({"open_files": (1024, 1048576)}, ("open_files", "warn", "1024 at once", "ulimit -n 4096")),
        ({"open_files": (1024, 2048)}, ("open_files", "warn", "1024 at once", "LimitNOFILE=4096")),
        ({"open_files": (1024, -1)}, ("open_files", "warn", "1024 at once", "ulimit -n 4096")),
        ({"open_files": (-1, -1)}, ("open_files", "ok", "no limit", "")),
        ({"page_bytes": 65536}, ("page_size", "info", "65536", "")),
        ({"architecture": "riscv64"}, ("cpu_features", "unknown", "riscv64", "")),
    ],
)
def test_processes_that_differ(tmp_path: Path, change: dict[str, object], expected: tuple[str, str, str, str]) -> None:
    name, status, words, fix = expected
    check = answer(name, tmp_path, process=replace(PROCESS, **change))  # type: ignore[arg-type] # fields of a table
    assert check.status == status
    assert words in check.found
    assert fix in check.fix
    assert bool(fix) == bool(check.fix)


@pytest.mark.parametrize(
    ("path", "attributes", "expected"),
    [
        (
            NPU_CLOCK,
            {"cur_freq": b"300000000\n"},
            ("npu_clock", "warn", "stays at 300 MHz of 1000 MHz, governor rknpu_ondemand"),
        ),
        (NPU_CLOCK, {"cur_freq": b"300000000\n", "governor": b"simple_ondemand\n"}, ("npu_clock", "ok", "300 MHz")),
        (
            NPU_CLOCK,
            {"max_freq": b"700000000\n", "cur_freq": b"700000000\n"},
            ("npu_clock", "warn", "above 700 MHz of 1000 MHz"),
        ),
        (NPU_CLOCK, {"cur_freq": b"?\n"}, ("npu_clock", "ok", "unknown clock")),
        (DDR_CLOCK, {}, ("ddr_clock", "ok", "528 MHz, governor dmc_ondemand")),
        (DDR_CLOCK, {"governor": b"userspace\n"}, ("ddr_clock", "warn", "stays at 528 MHz of 2112 MHz")),
        (DDR_CLOCK, {"governor": b"powersave\n"}, ("ddr_clock", "warn", "governor powersave")),
        (NPU_HEAT, {"temp": b"99000\n"}, ("thermal", "ok", "npu-thermal 99")),
        (NPU_HEAT, {"temp": b"100000\n"}, ("thermal", "warn", "npu-thermal 100 °C of 115")),
        (SOC_HEAT, {"temp": b"69900\n"}, ("thermal", "ok", "soc-thermal 70 °C")),
        (SOC_HEAT, {"temp": b"70000\n"}, ("thermal", "warn", "soc-thermal 70 °C of 75")),
    ],
)
def test_clocks_and_heat(
    tmp_path: Path, path: str, attributes: dict[str, bytes], expected: tuple[str, str, str]
) -> None:
    name, status, words = expected
    check = answer(name, tmp_path, with_device(HEALTHY, path, **attributes))
    assert (check.status, words in check.found) == (status, True), check


def test_graphs_that_the_runtime_will_refuse_are_a_failure(tmp_path: Path) -> None:
    asked = case(tmp_path, files={"/usr/lib/librknnrt.so": elf(b"librknnrt version: 2.3.2 (429)")})
    statuses = [doctor_vendor.runtime_versions(replace(asked, has_graphs=given)).status for given in (False, True)]
    assert statuses == ["warn", "fail"]


def test_a_held_clock_is_raised_where_its_governor_lies(tmp_path: Path) -> None:
    low = with_device(HEALTHY, NPU_CLOCK, cur_freq=b"300000000\n")
    assert answer("npu_clock", tmp_path, low).fix == (
        "echo performance > /sys/class/devfreq/fdab0000.npu/governor as root"
    )


def test_a_governor_is_not_to_be_written_where_that_hangs_the_board(tmp_path: Path) -> None:
    low = with_device(HEALTHY, NPU_CLOCK, cur_freq=b"200000000\n")
    assert "hang the board" in answer("npu_clock", tmp_path, low, replace(PROCESS, release="6.18.1-edge")).fix


def test_the_slow_cluster_of_the_cpu_is_seen(tmp_path: Path) -> None:
    folder = "/sys/devices/system/cpu/cpufreq/policy4"
    check = answer("cpu_clock", tmp_path, files={f"{folder}/scaling_governor": b"powersave\n"})
    assert check.status == "warn"
    assert check.found == "policy4 stays at 1200 MHz of 2400 MHz, governor powersave"
    assert check.fix == f"echo performance > {folder}/scaling_governor as root"


@pytest.mark.parametrize(
    ("without", "name", "status"),
    [
        ("dmc", "ddr_clock", "unknown"),
        ("devfreq/fdab", "npu_clock", "unknown"),
        ("thermal", "thermal", "unknown"),
        ("dma_heap", "dma_heaps", "info"),
    ],
)
def test_what_a_kernel_does_not_have_is_no_fault(tmp_path: Path, without: str, name: str, status: str) -> None:
    assert answer(name, tmp_path, HEALTHY.without(without)).status == status


def test_a_chip_without_graphs_says_what_runs_there(tmp_path: Path) -> None:
    check = answer("board", tmp_path, BEDS["rk3576"])
    assert (check.status, check.found) == ("warn", "Radxa ROCK 4D (RK3576, 2 NPU cores)")


def test_a_pc_says_that_it_is_no_board(tmp_path: Path) -> None:
    check = answer("board", tmp_path, BEDS["pc"], replace(PROCESS, architecture="x86_64"))
    assert check.status == "warn"
    assert check.found == "Linux on x86_64, no board with an NPU: attention runs on the CPU, or is emulated"


def test_a_container_may_hide_a_board(tmp_path: Path) -> None:
    check = answer("board", tmp_path, BEDS["pc"], files={"/.dockerenv": b""})
    assert "or a container that hides it" in check.found
    assert "/proc/device-tree" in check.fix


def test_an_npu_that_is_not_known_is_not_believed(tmp_path: Path) -> None:
    npu = FakeDevice("/devices/platform/20000000.npu", "platform", {"DRIVER": "RKNPU"})
    check = answer("board", tmp_path, Bed(devices=(npu,)))
    assert (check.status, check.found) == ("warn", "Linux on aarch64, with another NPU (20000000.npu)")

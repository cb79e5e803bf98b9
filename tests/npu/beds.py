"""Machines as their kernels describe them: an RK3588 in several conditions, its relatives, and others.

They say what was published of boards: the vendor's driver 0.9.8, drivers/accel/rocket of Linux 6.18, device trees, and
reports.
"""

from __future__ import annotations

from dataclasses import replace

from tests.npu.fake_machine import Bed, FakeDevice, FakeNode

__all__ = ["BEDS"]


def of(*compatible: str, name: str = "npu", driver: str | None = None) -> dict[str, str]:
    """Properties of a platform device that a device tree describes."""
    bound = {"DRIVER": driver} if driver else {}
    names = {f"OF_COMPATIBLE_{index}": text for index, text in enumerate(compatible)}
    return {**bound, "OF_NAME": name, **names, "OF_COMPATIBLE_N": str(len(compatible))}


def drm(path: str, name: str, minor: int) -> FakeDevice:
    node = FakeNode(f"/dev/dri/{name}", (226, minor))
    return FakeDevice(f"{path}/drm/{name}", "drm", {"DEVTYPE": "drm_minor"}, node=node)


def devfreq(path: str, governor: str, current: int, highest: int, offered: str = "") -> FakeDevice:
    files = {"governor": governor, "cur_freq": current, "max_freq": highest, "load": "0@1000000000Hz"}
    if offered:
        files["available_frequencies"] = offered
    name = path.rpartition("/")[2]
    return FakeDevice(f"{path}/devfreq/{name}", "devfreq", attributes={k: f"{v}\n".encode() for k, v in files.items()})


def zone(number: int, name: str, millidegrees: int, **trips: int) -> FakeDevice:
    files = {"type": name, "temp": millidegrees}
    for index, (kind, value) in enumerate(trips.items()):
        files |= {f"trip_point_{index}_type": kind, f"trip_point_{index}_temp": value}
    attributes = {k: f"{v}\n".encode() for k, v in files.items()}
    return FakeDevice(f"/devices/virtual/thermal/thermal_zone{number}", "thermal", attributes=attributes)


def heap(name: str, minor: int, *, usable: bool = True) -> FakeDevice:
    node = FakeNode(f"/dev/dma_heap/{name}", (251, minor), 0o600, usable)
    return FakeDevice(f"/devices/virtual/dma_heap/{name}", "dma_heap", node=node)


def tree(model: str, *compatible: str) -> dict[str, bytes]:
    return {
        "/proc/device-tree/model": f"{model}\0".encode(),
        "/proc/device-tree/compatible": "".join(f"{name}\0" for name in compatible).encode(),
    }


NPU = "/devices/platform/fdab0000.npu"

DECOYS = (
    FakeDevice("/devices/platform/rknpu_dev.9.auto", "platform", {"MODALIAS": "platform:rknpu_dev"}),
    FakeDevice(
        "/devices/platform/display-subsystem",
        "platform",
        of("rockchip,display-subsystem", name="display-subsystem", driver="rockchip-drm"),
    ),
    drm("/devices/platform/display-subsystem", "card0", 0),
    drm("/devices/platform/display-subsystem", "renderD128", 128),
    FakeDevice(
        "/devices/platform/fdab9000.iommu", "platform", of("rockchip,iommu-v2", name="iommu", driver="rk_iommu")
    ),
    FakeDevice("/devices/platform/fb000000.gpu", "platform", of("arm,mali-bifrost", name="gpu", driver="mali")),
    devfreq("/devices/platform/fb000000.gpu", "simple_ondemand", 300_000_000, 1_000_000_000),
)
"""What else a board has and a hasty search takes for its NPU."""

CPU = {
    f"/sys/devices/system/cpu/cpufreq/policy{core}/{name}": f"{text}\n".encode()
    for core, highest in ((0, 1_800_000), (4, 2_400_000))
    for name, text in (
        ("scaling_governor", "schedutil"),
        ("scaling_cur_freq", highest // 2),
        ("scaling_max_freq", highest),
        ("cpuinfo_max_freq", highest),
    )
}

VENDOR = Bed(
    devices=(
        FakeDevice(
            NPU,
            "platform",
            of("rockchip,rk3588-rknpu", driver="RKNPU"),
            {"iommu_group/type": b"DMA\n", "of_node/nvmem-cell-names": b"leakage\0"},
        ),
        drm(NPU, "card1", 1),
        drm(NPU, "renderD129", 129),
        devfreq(NPU, "rknpu_ondemand", 1_000_000_000, 1_000_000_000, "300000000 700000000 1000000000"),
        devfreq(
            "/devices/platform/dmc",
            "dmc_ondemand",
            528_000_000,
            2_112_000_000,
            "528000000 1068000000 1560000000 2112000000",
        ),
        zone(0, "soc-thermal", 44_000, passive=75_000, critical=115_000),
        zone(6, "npu-thermal", 43_500, critical=115_000),
        heap("cma", 0),
        heap("system", 1),
        heap("system-uncached", 2),
        *DECOYS,
    ),
    files={
        **tree("Radxa ROCK 5B", "radxa,rock-5b", "rockchip,rk3588"),
        **CPU,
        "/sys/module/rknpu/version": b"0.9.8\n",
    },
    links={
        "/dev/dri/by-path/platform-fdab0000.npu-card": "../card1",
        "/dev/dri/by-path/platform-fdab0000.npu-render": "../renderD129",
        "/dev/dri/by-path/platform-display-subsystem-render": "../renderD128",
    },
)
"""Rockchip's kernel, its driver in the DRM form."""

MISC = replace(
    VENDOR.without("fdab0000.npu/drm"),
    devices=(
        *VENDOR.without("fdab0000.npu/drm").devices,
        FakeDevice("/devices/virtual/misc/rknpu", "misc", node=FakeNode("/dev/rknpu", (10, 122))),
    ),
    links={},
)
"""The same, with the driver built for DMA heaps: a misc device."""

ROCKET = Bed(
    devices=(
        *(
            FakeDevice(
                f"/devices/platform/{address}.npu",
                "platform",
                of("rockchip,rk3588-rknn-core", driver="rocket"),
                {"iommu_group/type": b"DMA\n"},
            )
            for address in ("fdab0000", "fdac0000", "fdad0000")
        ),
        FakeDevice("/devices/platform/rknn", "platform", {"MODALIAS": "platform:rknn"}),
        FakeDevice("/devices/platform/rknn/accel/accel0", "accel", node=FakeNode("/dev/accel/accel0", (261, 0))),
        *DECOYS,
    ),
    files=tree("Radxa ROCK 5B", "radxa,rock-5b", "rockchip,rk3588"),
)
"""Mainline Linux from 6.18: a device for each core, one accel node below a device that no driver is bound to."""

RK3576 = Bed(
    devices=(
        FakeDevice(
            "/devices/platform/27700000.npu",
            "platform",
            of("rockchip,rk3576-rknpu", driver="RKNPU"),
            {"iommu_group/type": b"DMA\n"},
        ),
        drm("/devices/platform/27700000.npu", "card1", 1),
        drm("/devices/platform/27700000.npu", "renderD129", 129),
        devfreq("/devices/platform/27700000.npu", "rknpu_ondemand", 300_000_000, 950_000_000),
        FakeDevice("/devices/platform/rknpu_dev.9.auto", "platform"),
    ),
    files=tree("Radxa ROCK 4D", "radxa,rock-4d", "rockchip,rk3576"),
)

RK3568 = Bed(
    devices=(
        FakeDevice(
            "/devices/platform/fde40000.npu",
            "platform",
            of("rockchip,rk3568-rknpu", driver="RKNPU"),
            {"iommu_group/type": b"DMA\n"},
        ),
        drm("/devices/platform/fde40000.npu", "card1", 1),
        drm("/devices/platform/fde40000.npu", "renderD129", 129),
    ),
    files=tree("ODROID-M1", "hardkernel,odroid-m1", "rockchip,rk3568"),
)

HEADLESS = replace(
    VENDOR,
    devices=(
        *(d for d in VENDOR.devices if "drm" not in d.path and "display" not in d.path),
        drm(NPU, "card0", 0),
        drm(NPU, "renderD128", 128),
    ),
    links={"/dev/dri/by-path/platform-fdab0000.npu-render": "../renderD128"},
)
"""No display: the NPU has the numbers that are the display's elsewhere."""

CLOSED = replace(
    VENDOR,
    devices=tuple(
        replace(d, node=replace(d.node, usable=False)) if d.node and d.subsystem in ("drm", "dma_heap") else d
        for d in VENDOR.devices
    ),
)
"""A user who is in none of the groups."""

UNBOUND = replace(
    VENDOR.without("fdab0000.npu", "thermal_zone6"),
    devices=(
        *VENDOR.without("fdab0000.npu", "thermal_zone6").devices,
        FakeDevice(NPU, "platform", of("rockchip,rk3588-rknpu")),
    ),
)
"""The device tree has the NPU, and the kernel no driver for it."""

DISABLED = Bed(
    devices=DECOYS,
    files={
        **tree("Radxa ROCK 5B", "radxa,rock-5b", "rockchip,rk3588"),
        **{
            f"/proc/device-tree/npu@{address}/{name}": f"{text}\0".encode()
            for address in ("fdab0000", "fdac0000", "fdad0000")
            for name, text in (("status", "disabled"), ("compatible", "rockchip,rk3588-rknn-core"))
        },
    },
)
"""Mainline's device tree as some boards have it."""

CONTAINER = replace(
    VENDOR, files={name: text for name, text in VENDOR.files.items() if "device-tree" not in name}, links={}
)
"""A container without the device tree; its nodes are taken away by the tests that say so."""

FUSED = replace(
    VENDOR,
    devices=tuple(
        replace(d, attributes={**d.attributes, "of_node/nvmem-cell-names": b"leakage\0cores\0"}) if d.path == NPU else d
        for d in VENDOR.devices
    ),
    files={**VENDOR.files, **tree("Some RK3583 board", "some,board", "rockchip,rk3588s")},
)
"""An RK3583: the device tree of an RK3588S, with the fuse that says which cores are good."""

PC = Bed(
    devices=(
        FakeDevice("/devices/platform/serial8250", "platform", {"DRIVER": "serial8250"}),
        FakeDevice(
            "/devices/pci0000:00/0000:00:02.0/drm/renderD128", "drm", node=FakeNode("/dev/dri/renderD128", (226, 128))
        ),
        FakeDevice(
            "/devices/pci0000:00/0000:00:0b.0/accel/accel0", "accel", node=FakeNode("/dev/accel/accel0", (261, 0))
        ),
        zone(0, "x86_pkg_temp", 50_000),
    )
)
"""No board: a graphics card, and another maker's NPU."""

BEDS = {
    "vendor": VENDOR,
    "misc": MISC,
    "rocket": ROCKET,
    "rk3576": RK3576,
    "rk3568": RK3568,
    "headless": HEADLESS,
    "closed": CLOSED,
    "unbound": UNBOUND,
    "disabled": DISABLED,
    "container": CONTAINER,
    "fused": FUSED,
    "pc": PC,
    "nothing": Bed(),
}

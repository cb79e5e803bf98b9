"""Finds the NPU among the kernel's devices: by its driver and its node in the device tree, never by a number."""

from __future__ import annotations

import posixpath
import re

from .board import Npu
from .device_node import DeviceNode
from .kernel_devices import DeviceLister, KernelDevice
from .machine import Machine

__all__ = ["MISC_NODE", "NPU_COMPATIBLES", "driver_version", "find_npu", "has_fused_core"]

VENDOR_DRIVER = "RKNPU"
"""Name of the vendor's platform driver; its DRM driver says `rknpu`."""

ROCKET_DRIVER = "rocket"

VENDOR_CORES = {
    "rockchip,rk3588-rknpu": 3,
    "rockchip,rk3576-rknpu": 2,
    "rockchip,rk3568-rknpu": 1,
    "rockchip,rk3562-rknpu": 1,
    "rockchip,rv1106-rknpu": 1,
    "rockchip,rv1126b-rknpu": 1,
    "rockchip,rknpu": 1,
}
"""Cores that the vendor's driver 0.9.8 runs for each node of a device tree that it takes (its `rknpu_of_match`)."""

FUSED = "rockchip,rk3588-rknpu"
"""What may have two cores in place of three."""

ROCKET_CORE = "rockchip,rk3588-rknn-core"
"""Mainline's device tree has a node for each core (Linux 6.18)."""

ROCKET_PARENT = "rknn"
"""Platform device that stands for all cores, with the accel node below it (drivers/accel/rocket/rocket_drv.c)."""

NPU_COMPATIBLES = frozenset({*VENDOR_CORES, ROCKET_CORE})
"""What device trees call an NPU, whichever driver is for it."""

MISC_NODE = "/dev/rknpu"
"""The vendor driver's node in its form without DRM."""


def find_npu(machine: Machine, lister: DeviceLister) -> Npu | None:
    """The NPU, the vendor's driver's before mainline's before one that no driver has taken.

    Names are not asked: the vendor's driver also registers `rknpu_dev.N.auto`, which is no NPU.
    """
    platform = lister.devices("platform")
    for device in platform:
        if device.driver == VENDOR_DRIVER:
            return _vendor_npu(machine, lister, device)
    cores = [device for device in platform if device.driver == ROCKET_DRIVER]
    if cores:
        return _rocket_npu(machine, lister, cores)
    for device in platform:
        compatible = _compatible(device)
        if compatible:
            return Npu(device.name, device.path, compatible, None, None, None, 0, (), _iommu(machine, device))
    return None


def has_fused_core(machine: Machine, npu: Npu) -> bool:
    """Whether the vendor's driver leaves out the third core: it does where the device tree names the fuse to read.

    Source: `rknpu_get_invalid_core_mask` of driver 0.9.8, which never runs core 2 there, whatever the fuse says.
    """
    return (npu.driver, npu.compatible) == ("rknpu", FUSED) and "cores" in machine.strings(
        f"{npu.path}/of_node/nvmem-cell-names"
    )


def driver_version(machine: Machine) -> str | None:
    """Version of the vendor's driver, from the first file that tells it; the last one tells root alone."""
    for name in ("/sys/module/rknpu/version", "/proc/rknpu/version", "/sys/kernel/debug/rknpu/version"):
        found = re.search(r"\d+\.\d+\.\d+", machine.text(name) or "")
        if found:
            return found.group()
    return None


def _vendor_npu(machine: Machine, lister: DeviceLister, device: KernelDevice) -> Npu:
    drm = [d for d in lister.devices("drm") if d.below(device) and d.node]
    misc = [] if drm else [d for d in lister.devices("misc") if d.node == MISC_NODE]
    compatible = _compatible(device)
    return Npu(
        name=device.name,
        path=device.path,
        compatible=compatible,
        driver="rknpu",
        form="drm" if drm else "misc" if misc else None,
        version=driver_version(machine),
        cores=VENDOR_CORES.get(compatible, 1),
        nodes=_nodes(machine, drm or misc),
        iommu=_iommu(machine, device),
    )


def _rocket_npu(machine: Machine, lister: DeviceLister, cores: list[KernelDevice]) -> Npu:
    accel = [d for d in lister.devices("accel") if d.node and f"/{ROCKET_PARENT}/" in d.path]
    return Npu(
        name=cores[0].name,
        path=cores[0].path,
        compatible=_compatible(cores[0]),
        driver="rocket",
        form="accel" if accel else None,
        version=None,
        cores=len(cores),
        nodes=_nodes(machine, accel),
        iommu=_iommu(machine, cores[0]),
    )


def _compatible(device: KernelDevice) -> str:
    """Which of the NPUs that we know a device is; empty for anything else."""
    return next((name for name in device.compatible if name in NPU_COMPATIBLES), "")


def _nodes(machine: Machine, devices: list[KernelDevice]) -> tuple[DeviceNode, ...]:
    paths = [device.node for device in devices if device.node]
    paths.sort(key=lambda path: (not posixpath.basename(path).startswith("render"), path))
    return tuple(DeviceNode.at(machine, path) for path in paths)


def _iommu(machine: Machine, device: KernelDevice) -> bool:
    return machine.exists(f"{device.path}/iommu_group")

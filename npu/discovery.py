"""Finds the NPU and what belongs to it: nodes, heaps, clocks, temperatures. It writes nothing and wakes nothing."""

from __future__ import annotations

from dataclasses import replace

from .board import Board, Clock, Heap, ThermalZone
from .device_node import DeviceNode
from .kernel_devices import DeviceLister, KernelDevice, open_lister
from .machine import Machine, decimal
from .npu_search import MISC_NODE, NPU_COMPATIBLES, find_npu, has_fused_core
from .soc import RK3583, find_soc

__all__ = ["discover"]

DEVICE_TREE = "/proc/device-tree"

CONTAINER_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
"""Files that engines leave in their containers."""


def discover(machine: Machine | None = None) -> Board:
    """Look at a machine.

    Devices come from udev, or from sysfs where there is no udev. A device that goes away meanwhile is left out or
    found in part; it is never an error.

    Args:
        machine: this one by default.
    """
    machine = machine or Machine()
    lister = open_lister(machine)
    npu = find_npu(machine, lister)
    compatible = machine.strings(f"{DEVICE_TREE}/compatible")
    soc = find_soc(compatible, [npu.compatible] if npu else [])
    if npu and has_fused_core(machine, npu):
        soc, npu = RK3583, replace(npu, cores=2)
    clocks = {device.name: _devfreq(machine, device) for device in lister.devices("devfreq")}
    return Board(
        source=lister.source,
        model="".join(machine.strings(f"{DEVICE_TREE}/model")) or None,
        soc=soc,
        device_tree=bool(compatible),
        container=_container(machine),
        npu=npu,
        disabled=_disabled(machine),
        rknpu=DeviceNode.at(machine, MISC_NODE),
        heaps=_heaps(machine, lister),
        npu_clock=clocks.get(npu.name) if npu else None,
        ddr_clock=clocks.get("dmc"),
        cpu_clocks=_cpu_clocks(machine),
        thermal=tuple(zone for zone in (_zone(machine, d) for d in lister.devices("thermal")) if zone),
    )


def _container(machine: Machine) -> str | None:
    named = machine.text("/run/systemd/container")  # systemd-nspawn, LXC and others write it
    return named or next((kind for mark, kind in CONTAINER_MARKS.items() if machine.exists(mark)), None)


def _disabled(machine: Machine) -> tuple[str, ...]:
    nodes = (f"{DEVICE_TREE}/{name}" for name in machine.names(DEVICE_TREE) if name.startswith("npu@"))
    return tuple(
        node.removeprefix(f"{DEVICE_TREE}/")
        for node in nodes
        if machine.strings(f"{node}/status") == ("disabled",)
        and NPU_COMPATIBLES.intersection(machine.strings(f"{node}/compatible"))
    )


def _heaps(machine: Machine, lister: DeviceLister) -> tuple[Heap, ...]:
    """Of the kernel's list and of the folder: a container may lack the nodes, or the list."""
    listed = {device.node for device in lister.devices("dma_heap") if device.node}
    seen = {f"/dev/dma_heap/{name}" for name in machine.names("/dev/dma_heap")}
    return tuple(Heap(path.rpartition("/")[2], DeviceNode.at(machine, path)) for path in sorted(listed | seen))


def _devfreq(machine: Machine, device: KernelDevice) -> Clock:
    """A clock of devfreq's. Its file `load` is not read: the NPU's driver leaves it unfilled."""
    offered = (machine.text(f"{device.path}/available_frequencies") or "").split()
    limit = machine.number(f"{device.path}/max_freq")
    return Clock(
        name=device.name,
        path=f"/sys/class/devfreq/{device.name}",
        governor=machine.text(f"{device.path}/governor"),
        current=machine.number(f"{device.path}/cur_freq"),
        limit=limit,
        highest=max((hertz for hertz in map(decimal, offered) if hertz is not None), default=limit),
    )


def _cpu_clocks(machine: Machine) -> tuple[Clock, ...]:
    folder = "/sys/devices/system/cpu/cpufreq"
    return tuple(_cpufreq(machine, folder, name) for name in machine.names(folder) if name.startswith("policy"))


def _cpufreq(machine: Machine, folder: str, name: str) -> Clock:
    path = f"{folder}/{name}"
    return Clock(
        name=name,
        path=path,
        governor=machine.text(f"{path}/scaling_governor"),
        current=_hertz(machine, f"{path}/scaling_cur_freq"),
        limit=_hertz(machine, f"{path}/scaling_max_freq"),
        highest=_hertz(machine, f"{path}/cpuinfo_max_freq"),
    )


def _hertz(machine: Machine, name: str) -> int | None:
    """A frequency of cpufreq's, which counts in kHz; devfreq counts in Hz."""
    kilohertz = machine.number(name)
    return None if kilohertz is None else kilohertz * 1000


def _zone(machine: Machine, device: KernelDevice) -> ThermalZone | None:
    """None for a cooling device, and for a sensor that does not answer."""
    name, millidegrees = machine.text(f"{device.path}/type"), machine.number(f"{device.path}/temp")
    if not name or millidegrees is None:
        return None
    trips: dict[str, list[float]] = {}
    for file in machine.names(device.path):
        if file.startswith("trip_point_") and file.endswith("_type"):
            trip = machine.number(f"{device.path}/{file.removesuffix('_type')}_temp")
            if trip is not None:
                trips.setdefault(machine.text(f"{device.path}/{file}") or "", []).append(trip / 1000)
    return ThermalZone(
        name=name,
        celsius=millidegrees / 1000,
        passive=min(trips.get("passive", []), default=None),
        critical=min(trips.get("critical", []), default=None),
    )

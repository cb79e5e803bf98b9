"""What `npu.discovery` finds out about a machine, as values that do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .device_node import DeviceNode
from .rknn_toolkit import TARGET

__all__ = ["Board", "Clock", "Heap", "Npu", "NpuDriver", "NpuForm", "Soc", "ThermalZone"]

NpuDriver = Literal["rknpu", "rocket"]
"""`rknpu` is the vendor's, which the vendor's runtime needs; `rocket` is mainline Linux's, which it cannot use."""

NpuForm = Literal["drm", "misc", "accel"]
"""How a driver shows itself: `rknpu` as render and card nodes or as `/dev/rknpu`, `rocket` as an accel node."""


@dataclass(frozen=True)
class Soc:
    """A chip.

    Attributes:
        name: such as `RK3588S`.
        target: what the vendor's compiler calls its kind, such as `rk3588`.
    """

    name: str
    target: str


@dataclass(frozen=True)
class Npu:
    """An NPU that the kernel knows.

    Attributes:
        name: of its device, such as `fdab0000.npu`; of the first core where each is a device.
        path: its folder in sysfs.
        compatible: what its node in the device tree says it is.
        driver: that is bound to it; None if none is.
        form: of that driver; None if it shows no node at all.
        version: of the vendor's driver, such as `0.9.8`; None where the kernel tells root alone.
        cores: that the driver runs.
        nodes: to open, the render node first. A node that the kernel has and `/dev` lacks is `missing`.
        iommu: whether its memory goes through an IOMMU; without one it needs contiguous memory.
    """

    name: str
    path: str
    compatible: str
    driver: NpuDriver | None
    form: NpuForm | None
    version: str | None
    cores: int
    nodes: tuple[DeviceNode, ...]
    iommu: bool


@dataclass(frozen=True)
class Heap:
    """A DMA heap.

    Attributes:
        name: such as `cma` or `system`; kernels differ.
        node: its node; `missing` where the kernel has the heap and `/dev` does not, as in a container.
    """

    name: str
    node: DeviceNode


@dataclass(frozen=True)
class Clock:
    """A clock that is scaled.

    Attributes:
        name: such as `fdab0000.npu`, `dmc` or `policy4`.
        path: its folder in sysfs.
        governor: that scales it; None if unknown.
        current: in Hz; None if unknown.
        limit: highest that is allowed now, in Hz; None if unknown.
        highest: that the hardware has, in Hz; None if unknown.
    """

    name: str
    path: str
    governor: str | None
    current: int | None
    limit: int | None
    highest: int | None

    @property
    def governor_file(self) -> str:
        """Where the governor is set; cpufreq and devfreq differ."""
        return f"{self.path}/{'scaling_governor' if '/cpufreq/' in self.path else 'governor'}"


@dataclass(frozen=True)
class ThermalZone:
    """A place whose temperature is measured.

    Attributes:
        name: its type, such as `npu-thermal`; numbers of zones differ between kernels.
        celsius: temperature.
        passive: from where the kernel slows something down, in degrees Celsius; None if it does not.
        critical: where it shuts the machine down; None if it does not.
    """

    name: str
    celsius: float
    passive: float | None
    critical: float | None


@dataclass(frozen=True)
class Board:
    """A machine, as far as an NPU is concerned.

    Attributes:
        source: where devices were listed from.
        model: the device tree's words for the board; None without a device tree.
        soc: the chip; None if it is none of Rockchip's with an NPU.
        device_tree: whether `/proc/device-tree/compatible`, by which the vendor's runtime knows the chip, can be read.
        container: what kind of container this is, such as `docker`; None outside.
        npu: None if the kernel has no device for one.
        disabled: NPUs that the device tree has and switches off.
        rknpu: the path `/dev/rknpu`, whatever is there: the vendor's runtime tries it first.
        heaps: sorted by name.
        npu_clock: None if the kernel does not scale it.
        ddr_clock: of the memory, likewise.
        cpu_clocks: one for each group of cores that are scaled together.
        thermal: zones that answer.
    """

    source: Literal["udev", "sysfs"]
    model: str | None
    soc: Soc | None
    device_tree: bool
    container: str | None
    npu: Npu | None
    disabled: tuple[str, ...]
    rknpu: DeviceNode
    heaps: tuple[Heap, ...]
    npu_clock: Clock | None
    ddr_clock: Clock | None
    cpu_clocks: tuple[Clock, ...]
    thermal: tuple[ThermalZone, ...]

    @property
    def is_board(self) -> bool:
        """Whether there is anything here of a board with an NPU of Rockchip's."""
        return self.soc is not None or self.npu is not None

    @property
    def runs_graphs(self) -> bool:
        """Whether the chip is one that rockpage's graphs are compiled for."""
        return self.soc is not None and self.soc.target == TARGET

"""The way from a process to the NPU: driver, node, permissions, and what stands in between."""

from __future__ import annotations

import shlex

from .device_node import DeviceNode
from .doctor_check import Case, Check
from .npu_search import MISC_NODE

__all__ = ["container", "device_tree", "npu_driver", "npu_node", "rknpu_path"]

VENDOR_KERNEL = "boot the board's vendor kernel (Rockchip's 5.10 or 6.1, Armbian's branch 'vendor')"

WHEEL_RENDER_NODE = "/dev/dri/renderD129"
"""What rknn-toolkit-lite2 2.5.0 wants to see in a container of Docker's, whichever node is the NPU's."""


def npu_driver(case: Case) -> Check:
    """Is there an NPU, and does the vendor's driver run it?"""
    npu, disabled = case.board.npu, case.board.disabled
    why = "the vendor's runtime speaks to the vendor's driver, RKNPU, and to no other"
    if npu is not None and npu.driver == "rknpu":
        version = f" {npu.version}" if npu.version else ""
        found = f"RKNPU{version} runs {npu.name}, {npu.cores} cores, {npu.form or 'no'} node"
        return Check("npu_driver", "ok", found, why)
    fix = VENDOR_KERNEL
    if npu is not None and npu.driver == "rocket":
        found = f"mainline's driver rocket runs {npu.name}, {npu.cores} cores"
    elif npu is not None:
        found, fix = f"no driver has taken {npu.name} ({npu.compatible})", f"modprobe rknpu, or {fix}"
    elif disabled:
        found, fix = f"the device tree switches off {', '.join(disabled)}", f"enable it by an overlay, or {fix}"
    else:
        found = f"Linux {case.process.release} has no device for an NPU"
    return Check("npu_driver", "fail", found, why, fix)


def npu_node(case: Case) -> Check:
    """May this user open the NPU?"""
    name, npu = "npu_node", case.board.npu
    why = "the vendor's runtime opens the NPU's nodes, and says 'need to insmod rknpu dirver' where it may not"
    if npu is None or npu.driver != "rknpu":
        return Check(name, "info", "there is no NPU of the vendor's driver to open", why)
    if not npu.nodes:
        return Check(name, "fail", f"the kernel has {npu.name}, and no node for it", why, "look for RKNPU in dmesg")
    closed = [node for node in npu.nodes if not node.usable]
    if not closed:
        paths = ", ".join(node.stable_path for node in npu.nodes)
        return Check(name, "ok", f"{paths}: open to {case.process.user}", why)
    found = f"not open to {case.process.user}: {', '.join(map(str, closed))}"
    fix = _hand_in(case) if closed[0].kind == "missing" else _membership(case, closed)
    if npu.nodes[0].usable:  # the render node, which is all that the wheel tells containers to hand in
        return Check(name, "info", found, f"{why}; some report that it takes the card node too", fix)
    return Check(name, "fail", found, why, fix)


def rknpu_path(case: Case) -> Check:
    """Does something stand at `/dev/rknpu` that should not?"""
    name, rknpu, npu = "rknpu_path", case.board.rknpu, case.board.npu
    why = f"the vendor's runtime tries {rknpu.path} first, and what it asks there only the driver's misc form answers"
    fix = f"rm {rknpu.path}, and whatever makes it at start; the runtime then finds the NPU in /dev/dri"
    if rknpu.kind == "missing":
        return Check(name, "ok", f"{rknpu.path} is not there", why)
    if rknpu.kind != "device":
        return Check(name, "fail", f"{rknpu} is not the driver's", f"{why}: the hardware's version reads as -1", fix)
    if npu is None or npu.form != "misc":
        return Check(name, "fail", f"{rknpu} is left over: no driver has made it", why, fix)
    return Check(name, "ok", f"{rknpu} is the driver's", why)


def device_tree(case: Case) -> Check:
    """Can the vendor's runtime tell the chip?"""
    name, why = (
        "device_tree",
        "the vendor's runtime knows the chip by /proc/device-tree/compatible, and stops without it",
    )
    if case.board.device_tree:
        return Check(name, "ok", "/proc/device-tree/compatible can be read", why)
    return Check(
        name,
        "fail",
        "/proc/device-tree/compatible cannot be read",
        f"{why}; it leads to /sys/firmware, which Docker and others hide",
        "start the container with --security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)",
    )


def container(case: Case) -> Check:
    """Does a container hide what the vendor's runtime looks for?"""
    name, kind = "container", case.board.container
    why = f"in a Docker container the vendor's Python runtime refuses to start unless it sees {WHEEL_RENDER_NODE}"
    if kind is None:
        return Check(name, "ok", "no container", why)
    if kind != "docker" or case.machine.exists(WHEEL_RENDER_NODE):
        return Check(name, "info", f"in a container ({kind})", why)
    has_node = case.board.npu is not None and any(node.usable for node in case.board.npu.nodes)
    fix = f"touch {WHEEL_RENDER_NODE} in the container: it is looked at, not opened" if has_node else _hand_in(case)
    return Check(name, "fail", f"in a container (docker) without {WHEEL_RENDER_NODE}", why, fix)


def _hand_in(case: Case) -> str:
    """What to do about a node that the kernel has and `/dev` lacks."""
    if case.board.container:
        return "hand it in: docker run --device /dev/dri (/dev/rknpu where the driver has its misc form)"
    return "find out why udev does not make it: systemctl status systemd-udevd"


def _membership(case: Case, closed: list[DeviceNode]) -> str:
    """How to get into the groups that closed nodes belong to."""
    process = case.process
    groups = sorted({node.group for node in closed if node.mode & 0o060 == 0o060 and node.group != "root"})
    if not groups:
        which = 'KERNEL=="rknpu"' if closed[0].path == MISC_NODE else 'SUBSYSTEM=="drm", DRIVERS=="RKNPU"'
        return f'open it to a group by a udev rule: {which}, MODE="0660", GROUP="render"'
    if process.future_groups.issuperset(groups):
        return f"log in again: {process.user} is in {', '.join(groups)} from then on"
    if case.board.container:
        return " ".join(["docker run", *(f"--group-add {group}" for group in groups)])
    return f"usermod -aG {','.join(groups)} {shlex.quote(process.user)} as root, and log in again"

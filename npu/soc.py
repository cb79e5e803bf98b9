"""Rockchip's chips with an NPU, told apart by the device tree."""

from __future__ import annotations

from collections.abc import Iterable

from .board import Soc

__all__ = ["RK3583", "find_soc"]

RK3583 = Soc("RK3583", "rk3588")
"""An RK3588 or RK3588S with two of the NPU's three cores; boards carry it with either's device tree."""

_SOCS = {
    "rockchip,rk3588": Soc("RK3588", "rk3588"),
    "rockchip,rk3588s": Soc("RK3588S", "rk3588"),
    "rockchip,rk3583": RK3583,
    "rockchip,rk3582": Soc("RK3582", "rk3588"),
    "rockchip,rk3576": Soc("RK3576", "rk3576"),
    "rockchip,rk3568": Soc("RK3568", "rk3568"),
    "rockchip,rk3566": Soc("RK3566", "rk3566"),
    "rockchip,rk3562": Soc("RK3562", "rk3562"),
}
"""By what the root of a device tree is compatible with."""

_KINDS = {
    "rockchip,rk3588-rknpu": Soc("RK3588", "rk3588"),
    "rockchip,rk3588-rknn-core": Soc("RK3588", "rk3588"),
    "rockchip,rk3576-rknpu": Soc("RK3576", "rk3576"),
    "rockchip,rk3568-rknpu": Soc("RK356x", "rk3568"),
    "rockchip,rk3562-rknpu": Soc("RK3562", "rk3562"),
}
"""By the NPU, where the device tree is hidden: that tells the family."""


def find_soc(machine: Iterable[str], npu: Iterable[str]) -> Soc | None:
    """The chip.

    Args:
        machine: what the device tree's root is compatible with, the most exact first, as it stands there.
        npu: what the NPU is compatible with.
    """
    known = [_SOCS[name] for name in machine if name in _SOCS] + [_KINDS[name] for name in npu if name in _KINDS]
    return known[0] if known else None

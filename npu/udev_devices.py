"""Devices through udev's own library, which pyudev binds with ctypes."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

from .kernel_devices import KernelDevice

__all__ = ["UdevLister", "open_udev"]

LIBRARY = "libudev.so.1"


class UdevLister:
    """Lists devices with what udev knows of them.

    Args:
        context: pyudev's.
    """

    source: Literal["udev"] = "udev"

    def __init__(self, context: Any) -> None:  # noqa: ANN401 - pyudev has no types
        self._context = context

    def devices(self, subsystem: str) -> list[KernelDevice]:
        """See `npu.kernel_devices.DeviceLister`; pyudev passes over what vanishes while it lists."""
        found = self._context.list_devices(subsystem=subsystem)
        return sorted((KernelDevice(d.sys_path, dict(d.properties)) for d in found), key=lambda device: device.path)


def open_udev() -> UdevLister | None:
    """A connection to udev's library; None where that or pyudev is not installed, as in most containers."""
    try:
        # Asked first: pyudev would search for a library that is not there with a compiler, which writes a file.
        ctypes.CDLL(LIBRARY)
        import pyudev  # type: ignore[import-untyped] # noqa: PLC0415 - an extra; it has no types

        return UdevLister(pyudev.Context())
    except (ImportError, OSError):
        return None

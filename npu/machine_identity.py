"""What a machine computes with, as far as it shows in results."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

__all__ = ["machine_identity"]

_FEATURES = ("flags", "Features")
"""Keys of a core's instruction set extensions in /proc/cpuinfo, on x86-64 and on aarch64."""


def machine_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name the architecture and its instruction set extensions, such as `x86_64-1f0c9a7d`.

    Libraries choose their kernels by the extensions when they run, and sums in another order round otherwise: with
    int8 activations, ONNX Runtime 1.32 gives other K and V on a CPU with AVX-512 than on one with AVX2 alone.

    Args:
        cpuinfo: what the kernel says of the cores; it shows what all of them have.

    Returns:
        The architecture, and 8 hex digits for the extensions; without these where the kernel names none.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, extensions = line.partition(":")
        if key.strip() in _FEATURES:
            names = " ".join(sorted(extensions.split()))
            return f"{platform.machine()}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return platform.machine()

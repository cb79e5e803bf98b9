"""Builds the kernel that `vm.py` boots, from Debian's source package, and keeps it."""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from npu.weights_cache import default_cache_dir
from tests.board.host import JobError, run

__all__ = ["PACKAGES", "kernel_image"]

FRAGMENT = Path(__file__).with_name("vm.config")
SOURCE_PACKAGE = "linux-source-6.1"  # Debian 12's; Debian's own kernels have no DMA heaps

PACKAGES = {
    "/usr/bin/bc": "bc",
    "/usr/bin/bison": "bison",
    "/usr/bin/flex": "flex",
    "/usr/bin/gcc": "gcc",
    "/usr/bin/make": "make",
    "/usr/bin/xz": "xz-utils",
    "/usr/include/libelf.h": "libelf-dev",
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
}
"""For the VM and its kernel: what must be there, and the Debian package that brings it."""


def kernel_image() -> Path:
    """The kernel as an ELF file; built if there is none of this source version and configuration.

    Raises:
        JobError: the source cannot be had, or the build fails; the message has the end of its output.
    """
    version = source_version()
    key = hashlib.sha256(f"{version}\n{FRAGMENT.read_text()}".encode()).hexdigest()[:16]
    folder = default_cache_dir() / "vm" / key
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / "vmlinux"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds the kernel built
        if not image.exists():
            print(f"building Linux {version} for the VM, once: about two minutes on two idle cores", flush=True)
            work = folder / "build"
            shutil.rmtree(work, ignore_errors=True)  # of a build that was interrupted
            work.mkdir()
            try:
                os.replace(build(work, version), image)  # whole, or not there
            finally:
                shutil.rmtree(work)
    return image


def source_version() -> str:
    """The version of the source package that apt would install."""
    command = ["apt-cache", "show", "--no-all-versions", SOURCE_PACKAGE]
    if not shutil.which("apt-cache"):
        raise JobError(f"the kernel's source comes from Debian's {SOURCE_PACKAGE}, and there is no apt here")
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not shown and not os.geteuid():
        run(["apt-get", "-qq", "update"])
        shown = run(command)
    for line in shown.splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ")
    raise JobError(f"apt knows no {SOURCE_PACKAGE}: run apt-get update; the package is Debian 12's")


def build(work: Path, version: str) -> Path:
    """Build in an empty folder (it takes 1.8 GB), and return the kernel's path in it."""
    run(["apt-get", "-qq", "download", f"{SOURCE_PACKAGE}={version}"], work)
    (package,) = work.glob("*.deb")
    run(["dpkg-deb", "-x", str(package), "unpacked"], work)
    run(["tar", "-xJf", f"unpacked/usr/src/{SOURCE_PACKAGE}.tar.xz"], work)
    source = work / SOURCE_PACKAGE
    run(["make", "-s", f"KCONFIG_ALLCONFIG={FRAGMENT}", "allnoconfig"], source)
    dropped = dropped_lines(FRAGMENT.read_text(), (source / ".config").read_text())
    if dropped:
        raise JobError(f"Linux {version} does not take these lines of {FRAGMENT.name}: {', '.join(dropped)}")
    run(["make", "-s", f"-j{os.cpu_count()}", "vmlinux"], source)
    return source / "vmlinux"


def dropped_lines(fragment: str, config: str) -> list[str]:
    """Lines of a fragment that a configuration lacks: what they depend on is missing, and nothing else says so."""
    return sorted({line for line in fragment.splitlines() if "CONFIG_" in line} - set(config.splitlines()))

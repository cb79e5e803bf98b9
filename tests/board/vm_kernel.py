"""Builds the kernel that `vm.py` boots, from Debian's source package, and keeps it."""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from npu.weights_cache import default_cache_dir

__all__ = ["VmError", "kernel_image", "require_packages"]

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
"""What must be there, and the Debian package that brings it."""

BUILD_SECONDS = 1800


class VmError(Exception):
    """The VM's tests could not be run; whether they would pass is not known."""


def require_packages(packages: dict[str, str] = PACKAGES) -> None:
    """Install what is missing, as root; as anyone else, say what to install.

    Raises:
        VmError: something is missing and cannot be installed, or this is not an x86-64 machine.
    """
    if platform.machine() != "x86_64":
        raise VmError(f"the VM is an x86-64 machine that runs this one's Python: {platform.machine()} cannot serve it")
    missing = [package for path, package in packages.items() if not Path(path).exists()]
    if not missing:
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise VmError(f"install what is missing: sudo apt-get install --no-install-recommends {' '.join(missing)}")
    run(["apt-get", "-qq", "update"])
    run(["apt-get", "-qq", "install", "--no-install-recommends", *missing])


def kernel_image() -> Path:
    """The kernel as an ELF file; built if there is none of this source version and configuration.

    Raises:
        VmError: the source cannot be had, or the build fails; the message has the end of its output.
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
        raise VmError(f"the kernel's source comes from Debian's {SOURCE_PACKAGE}, and there is no apt here")
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not shown and not os.geteuid():
        run(["apt-get", "-qq", "update"])
        shown = run(command)
    for line in shown.splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ")
    raise VmError(f"apt knows no {SOURCE_PACKAGE}: run apt-get update; the package is Debian 12's")


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
        raise VmError(f"Linux {version} does not take these lines of {FRAGMENT.name}: {', '.join(dropped)}")
    run(["make", "-s", f"-j{os.cpu_count()}", "vmlinux"], source)
    return source / "vmlinux"


def dropped_lines(fragment: str, config: str) -> list[str]:
    """Lines of a fragment that a configuration lacks: what they depend on is missing, and nothing else says so."""
    return sorted({line for line in fragment.splitlines() if "CONFIG_" in line} - set(config.splitlines()))


def run(command: list[str], directory: Path | None = None) -> str:
    """Run a command without what `make` hands to its children, and return its output.

    Raises:
        VmError: it fails, or takes half an hour.
    """
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    environment |= {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VmError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise VmError(f"{' '.join(command)} ended with status {done.returncode}:\n{end}")
    return done.stdout

"""An arm64 userland without a kernel of its own: Debian's Python, wheels from PyPI, and a chip that is not there.

User-mode QEMU with `-L ROOT` looks for each absolute path below ROOT first. So the vendor's wheel finds our stub as
/usr/lib/librknnrt.so, and the files by which it knows a board: without a change to it, and without any rights.
"""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from npu.weights_cache import default_cache_dir
from tests.board.host import run

__all__ = ["CROSS_COMPILER", "KEYRING", "LITE_VERSION", "Arm64Root", "arm64_root"]

SUITE = "bookworm"  # the newest whose Python the vendor has a wheel for: 3.11

DEBS = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libssl3"),
    *("libuuid1", "libcrypt1", "libsqlite3-0"),
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libpython3.11-dev"),
)

LITE_VERSION = "2.5.0"

WHEELS = (
    f"rknn-toolkit-lite2=={LITE_VERSION}",
    *("numpy", "cffi"),
    *("onnxruntime", "onnx", "tokenizers", "jinja2", "gguf", "safetensors"),
    *("pytest", "hypothesis"),
)

PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")

CROSS_COMPILER = "aarch64-linux-gnu-gcc"

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

STUB = Path(__file__).with_name("stub_librknnrt.c")
STUB_FLAGS = ("-std=gnu11", "-O3", "-march=armv8.2-a+fp16", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")

CPU = """\
processor\t: {number}
BogoMIPS\t: 48.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 0

"""
"""A Cortex-A76. Without it there is the machine's own, in which ONNX Runtime 1.32 finds no Arm core, and crashes."""

CHIP = {
    "proc/cpuinfo": "".join(CPU.format(number=number) for number in range(os.cpu_count() or 1)),
    "proc/device-tree/compatible": "rockchip,rk3588-evb\0rockchip,rk3588\0",
    "dev/dri/renderD129": "",
}
"""What the vendor's wheel knows a board by."""


class Arm64Root:
    """Where it lies.

    Args:
        folder: of the cache.

    Attributes:
        root: for QEMU's `-L`.
        site: for PYTHONPATH.
        python: the interpreter, for QEMU to run.
        includes: for a compiler: Python's headers.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.site = folder / "site"
        self.python = self.root / "usr/bin/python3.11"
        self.includes = (self.root / "usr/include/python3.11", self.root / "usr/include")


def arm64_root() -> Arm64Root:
    """The root with the wheels and the stub in it; built if it is not there.

    Raises:
        JobError: packages cannot be had, or the stub cannot be compiled.
    """
    key = hashlib.sha256(repr((SUITE, DEBS, WHEELS, CHIP)).encode()).hexdigest()[:16]
    folder = default_cache_dir() / "arm64" / key
    folder.mkdir(parents=True, exist_ok=True)
    made = Arm64Root(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds all there
        if not (folder / "whole").exists():
            print("fetching an arm64 Python and its packages, once: 60 MB", flush=True)
            for part in (made.root, made.site):
                shutil.rmtree(part, ignore_errors=True)  # of a start that was interrupted
            unpack_debs(made.root)
            install_wheels(made.site)
            (folder / "whole").touch()
        for name, content in CHIP.items():
            path = made.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != content:  # a test takes the chip away, and may be interrupted
                path.write_text(content)
        build_stub(made.root / "usr/lib/librknnrt.so")
    return made


def unpack_debs(root: Path) -> None:
    """Download Debian's packages with a state of our own, and unpack them; nothing is installed or run."""
    with tempfile.TemporaryDirectory(prefix="rockpage-apt-") as name:
        state = Path(name)
        for part in ("lists/partial", "cache/archives/partial", "debs"):
            (state / part).mkdir(parents=True)
        (state / "status").touch()
        sources = state / "sources.list"
        sources.write_text(f"deb [arch=arm64 signed-by={KEYRING}] {mirror()} {SUITE} main\n")
        options = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Dir::State": state,
            "Dir::State::status": state / "status",
            "Dir::State::lists": state / "lists",
            "Dir::Cache": state / "cache",
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": "/dev/null",
        }
        apt = ["apt-get", "-qq", *(part for item in options.items() for part in ("-o", "{}={}".format(*item)))]
        run([*apt, "update"])
        run([*apt, "download", *DEBS], state / "debs")
        for deb in sorted((state / "debs").glob("*.deb")):
            run(["dpkg-deb", "-x", str(deb), str(root)])


def mirror() -> str:
    """Where this machine gets Debian from, or where everybody may."""
    sites = run(["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]).split()
    return next((site for site in sites if site.rstrip("/").endswith("/debian")), "http://deb.debian.org/debian")


def install_wheels(site: Path) -> None:
    """Let this Python's pip choose and unpack what another one will import."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--no-compile"]
    platforms = [part for platform in PLATFORMS for part in ("--platform", f"{platform}_aarch64")]
    python = ["--python-version", "311", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    run([*pip, "--only-binary=:all:", *platforms, *python, *WHEELS])


def build_stub(library: Path) -> None:
    """Compile the stub if it is not there; a process that has the old one loaded keeps it."""
    key = hashlib.sha256(repr((STUB.read_bytes(), STUB_FLAGS)).encode()).hexdigest()[:16]
    kept = library.with_name(f"rockpage-stub-{key}.so")
    if not kept.exists():
        unfinished = kept.with_suffix(".tmp")
        run([CROSS_COMPILER, *STUB_FLAGS, "-fPIC", "-shared", "-pthread", str(STUB), "-o", str(unfinished), "-lm"])
        os.replace(unfinished, kept)
    link = library.with_suffix(".new")
    link.unlink(missing_ok=True)
    os.link(kept, link)
    os.replace(link, library)

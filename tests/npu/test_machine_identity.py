"""Which machines count as alike."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from npu.machine_identity import machine_identity

X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse2 avx2 fma\nbugs\t\t: sysret_ss_attrs\n"
ARM = "processor\t: 0\nBogoMIPS\t: 48.00\nFeatures\t: fp asimd fphp asimdhp asimddp\nCPU part\t: 0xd05\n"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    return tmp_path / "cpuinfo"


def identity(path: Path, content: str) -> str:
    path.write_text(content)
    return machine_identity(path)


@pytest.mark.parametrize("content", [X86, ARM])
def test_an_extension_more_is_another_machine(cpuinfo: Path, content: str) -> None:
    plain = identity(cpuinfo, content)
    assert plain.startswith(f"{platform.machine()}-")
    more = content.replace("flags\t\t:", "flags\t\t: avx512f").replace("Features\t:", "Features\t: sve")
    assert identity(cpuinfo, more) != plain


def test_what_changes_no_result_is_left_out(cpuinfo: Path) -> None:
    plain = identity(cpuinfo, X86)
    assert identity(cpuinfo, X86.replace("fpu sse2", "sse2 fpu")) == plain  # the order, which kernels change
    assert identity(cpuinfo, X86.replace("Some CPU", "Another CPU")) == plain
    assert identity(cpuinfo, X86 + "\nprocessor\t: 1\nflags\t\t: fpu sse2 avx2 fma\n") == plain  # more cores


def test_a_kernel_that_names_none_leaves_the_architecture(cpuinfo: Path) -> None:
    assert machine_identity(cpuinfo) == identity(cpuinfo, "processor\t: 0\n") == platform.machine()


def test_this_machine_is_named_the_same_each_time() -> None:
    assert machine_identity() == machine_identity()

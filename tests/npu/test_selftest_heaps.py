"""The self-test's step for DMA heaps, over fake ones; `make test-vm` has real ones."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from hostcache import dma_buf
from npu.board import Heap
from npu.device_node import DeviceNode
from npu.selftest_heaps import heaps
from npu.selftest_report import Step
from tests.hostcache.fake_heaps import FakeHeaps, open_descriptors

MIB = 1 << 20


def found(*names: str, usable: bool = True) -> list[Heap]:
    return [Heap(name, DeviceNode(f"/dev/dma_heap/{name}", "device", usable=usable)) for name in names]


Fake: TypeAlias = Callable[[dict[str, int]], FakeHeaps]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return lambda budget: FakeHeaps(tmp_path / "dma_heap", budget, monkeypatch)


def test_each_open_heap_is_taken_synced_and_given_back(fake: Fake) -> None:
    kernel = fake({"cma": 2 * MIB, "system": 2 * MIB})
    before = open_descriptors()
    step = heaps(found("cma"), kernel.directory)
    assert step == Step("heaps", "proved", "cma gives 2 MiB, which hold what is written over a sync")
    # Two pieces: open to the CPU at the start, handed over, taken back.
    assert kernel.synced == [(kind, piece) for kind in ("begin", "end", "begin") for piece in (0, 1)]
    both = heaps(found("system", "cma"), kernel.directory)
    assert both.found.startswith("system gives 2 MiB, which hold what is written over a sync; cma gives nothing: ")
    assert open_descriptors() == before


def test_a_heap_that_has_nothing_left_is_named_and_another_proves(fake: Fake) -> None:
    """An Orange Pi's image leaves nothing of CMA, and rknnlite needs none."""
    kernel = fake({"cma": 0, "system": 2 * MIB})
    step = heaps(found("cma", "system"), kernel.directory)
    assert step.status == "proved"
    assert "cma gives nothing: cannot take 2 x 1.0 MiB for DMA (heap cma: Cannot allocate memory" in step.found
    assert heaps(found("cma"), kernel.directory).status == "not run"


def test_a_sync_that_the_kernel_refuses_fails(fake: Fake) -> None:
    kernel = fake({"cma": 2 * MIB})
    kernel.refusal = errno.EIO
    before = open_descriptors()
    step = heaps(found("cma"), kernel.directory)
    assert step.status == "failed"
    assert step.found.startswith("cma FAILED: DMA_BUF_IOCTL_SYNC of pieces")
    assert open_descriptors() == before


def test_memory_that_forgets_fails(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As caches that are thrown away before they were written back would let it."""
    kernel = fake({"system": 2 * MIB})

    def forget(descriptor: int) -> None:
        with open(f"/proc/self/fd/{descriptor}", "r+b") as file:
            file.write(bytes(64))

    monkeypatch.setattr(dma_buf, "end_cpu_access", forget)
    step = heaps(found("system"), kernel.directory)
    assert step == Step("heaps", "failed", "system FAILED: its memory holds something else than was written")


def test_what_is_not_tried_is_named(fake: Fake) -> None:
    kernel = fake({"cma": 2 * MIB, "system-uncached": 2 * MIB})
    step = heaps([*found("cma", usable=False), *found("system-uncached")], kernel.directory)
    assert (step.status, step.needed) == ("not run", False)
    assert step.found == "cma is closed to this user; system-uncached is left alone: the CPU does not cache it"
    missing = heaps([Heap("cma", DeviceNode("/dev/dma_heap/cma", "missing"))], kernel.directory)
    assert missing.found == "cma has no node (missing)"
    assert kernel.handed_out == []
    assert heaps([], kernel.directory).found.startswith("the kernel has no DMA heaps")

"""Numbers and structs against the kernel's own headers, by the C compiler; calls against descriptors of no use.

What the calls do with real devices is for `make test-vm`: machines that build software have none.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hostcache import dma_buf

HEADERS = """
#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <linux/udmabuf.h>
#define SHOW(value) printf("%llu\\n", (unsigned long long)(value))
int main(void) {
    SHOW(DMA_HEAP_IOCTL_ALLOC);
    SHOW(sizeof(struct dma_heap_allocation_data));
    SHOW(offsetof(struct dma_heap_allocation_data, fd));
    SHOW(DMA_BUF_IOCTL_SYNC);
    SHOW(sizeof(struct dma_buf_sync));
    SHOW(DMA_BUF_SYNC_RW);
    SHOW(DMA_BUF_SYNC_START);
    SHOW(DMA_BUF_SYNC_END);
    SHOW(UDMABUF_CREATE_LIST);
    SHOW(sizeof(struct udmabuf_create_list));
    SHOW(sizeof(struct udmabuf_create_item));
    SHOW(offsetof(struct udmabuf_create_item, offset));
    SHOW(UDMABUF_FLAGS_CLOEXEC);
    SHOW(MAP_FIXED);
}
"""


def test_numbers_and_structs_are_the_headers_own(tmp_path: Path) -> None:
    (tmp_path / "show.c").write_text(HEADERS)
    subprocess.run(["cc", "-o", tmp_path / "show", tmp_path / "show.c"], check=True, timeout=60)
    shown = subprocess.run([tmp_path / "show"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [int(line) for line in shown.split()] == [
        dma_buf.DMA_HEAP_IOCTL_ALLOC,
        dma_buf.HEAP_ALLOCATION.size,
        8,  # behind the length: what `allocate` unpacks second
        dma_buf.DMA_BUF_IOCTL_SYNC,
        dma_buf.BUF_SYNC.size,
        dma_buf.DMA_BUF_SYNC_RW,
        dma_buf.DMA_BUF_SYNC_START,
        dma_buf.DMA_BUF_SYNC_END,
        dma_buf.UDMABUF_CREATE_LIST,
        dma_buf.LIST_HEAD.size,
        dma_buf.LIST_ITEM.size,
        8,  # behind memfd and padding
        dma_buf.UDMABUF_FLAGS_CLOEXEC,
        dma_buf.MAP_FIXED,
    ]


def test_calls_on_something_else_say_so() -> None:
    with open(os.devnull, "rb") as null:
        for call in (
            lambda: dma_buf.allocate(null.fileno(), 4096),
            lambda: dma_buf.begin_cpu_access(null.fileno()),
            lambda: dma_buf.end_cpu_access(null.fileno()),
            lambda: dma_buf.create_list(null.fileno(), null.fileno(), [(0, 4096)] * 1000),  # more than ioctl copies
        ):
            with pytest.raises(OSError, match="Inappropriate ioctl"):
                call()


def test_a_mapping_over_another_replaces_its_bytes_alone() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = 1
    fd = os.memfd_create("over")
    os.write(fd, b"\x02" * page)
    dma_buf.map_over(whole.__array_interface__["data"][0] + page, page, fd)
    assert [int(whole[nth * page]) for nth in range(3)] == [1, 2, 1]
    whole[page] = 3
    assert os.pread(fd, 2, 0) == b"\x03\x02"
    os.close(fd)
    assert whole[page] == 3  # the mapping holds the memory
    del whole
    memory.close()


def test_what_cannot_be_mapped_is_an_error() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        dma_buf.map_over(address, mmap.PAGESIZE, 1 << 20)
    memory.close()


@pytest.mark.parametrize("interruption", [InterruptedError, BlockingIOError])
def test_a_sync_that_a_signal_interrupts_is_asked_for_again(
    interruption: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def ioctl(_fd: int, _request: int, flags: bytes) -> None:
        asked.append(flags)
        if len(asked) < 3:
            raise interruption

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    dma_buf.begin_cpu_access(0)
    assert asked == [(3).to_bytes(8, "little")] * 3  # read | write | start
    dma_buf.end_cpu_access(0)
    assert asked[3:] == [(7).to_bytes(8, "little")]  # read | write | end


def test_what_the_kernel_is_handed_and_hands_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, as the structs above say."""
    asked: list[bytes] = []

    def ioctl(_fd: int, _request: int, request: bytearray) -> int:
        asked.append(bytes(request))
        request[8:12] = (57).to_bytes(4, "little")  # fd of dma_heap_allocation_data
        return 58

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert dma_buf.allocate(3, 1 << 33) == 57
    assert dma_buf.create_list(3, 9, [(1 << 33, 4096), (0, 8192)]) == 58
    heap, view = asked
    assert heap == (1 << 33).to_bytes(8, "little") + bytes(4) + (os.O_RDWR | os.O_CLOEXEC).to_bytes(
        4, "little"
    ) + bytes(8)
    words = [int.from_bytes(view[at : at + 4], "little") for at in range(0, len(view), 4)]
    assert words == [1, 2, *[9, 0, 0, 2, 4096, 0], *[9, 0, 0, 0, 8192, 0]]  # close on exec, two items; then each

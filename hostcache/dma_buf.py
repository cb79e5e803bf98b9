"""The kernel's calls around dma-bufs: memory that has a file descriptor and that devices can be handed.

One function a call, each raising OSError as the kernel says. Numbers and structs are those of linux/dma-heap.h,
linux/dma-buf.h, linux/udmabuf.h and mman.h, the same on x86-64 and aarch64.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

__all__ = ["allocate", "begin_cpu_access", "create_list", "end_cpu_access", "map_over"]

DMA_HEAP_IOCTL_ALLOC = 0xC0184800
HEAP_ALLOCATION = struct.Struct("=QIIQ")  # struct dma_heap_allocation_data: len, fd, fd_flags, heap_flags

DMA_BUF_IOCTL_SYNC = 0x40086200
BUF_SYNC = struct.Struct("=Q")  # struct dma_buf_sync: flags
DMA_BUF_SYNC_RW = 3
DMA_BUF_SYNC_START = 0
DMA_BUF_SYNC_END = 4

UDMABUF_CREATE_LIST = 0x40087543
LIST_HEAD = struct.Struct("=II")  # struct udmabuf_create_list: flags, count
LIST_ITEM = struct.Struct("=IIQQ")  # struct udmabuf_create_item: memfd, padding, offset, size
UDMABUF_FLAGS_CLOEXEC = 1

MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),  # address, length
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),  # protection, flags, descriptor
    ctypes.c_long,  # offset
)


def allocate(heap: int, nbytes: int) -> int:
    """Take a zeroed dma-buf from a heap.

    Args:
        heap: descriptor of the open heap.
        nbytes: rounded up to whole pages by the kernel.

    Returns:
        Its descriptor, closed on exec; closing the last reference gives the memory back.
    """
    request = bytearray(HEAP_ALLOCATION.pack(nbytes, 0, os.O_RDWR | os.O_CLOEXEC, 0))
    fcntl.ioctl(heap, DMA_HEAP_IOCTL_ALLOC, request)
    descriptor: int = HEAP_ALLOCATION.unpack(request)[1]
    return descriptor


def begin_cpu_access(dma_buf: int) -> None:
    """Let the CPU see what devices wrote: what its caches hold of the whole buffer is thrown away, not written back."""
    _sync(dma_buf, DMA_BUF_SYNC_START | DMA_BUF_SYNC_RW)


def end_cpu_access(dma_buf: int) -> None:
    """Let devices see what the CPU wrote to the buffer."""
    _sync(dma_buf, DMA_BUF_SYNC_END | DMA_BUF_SYNC_RW)


def create_list(udmabuf: int, memfd: int, runs: Sequence[tuple[int, int]]) -> int:
    """Make one dma-buf of pages of a memfd, in the order given; the pages are shared, not copied.

    Args:
        udmabuf: descriptor of the open /dev/udmabuf.
        memfd: sealed against shrinking.
        runs: byte offset in the memfd and bytes of each run, whole pages.

    Returns:
        Its descriptor, closed on exec.
    """
    request = bytearray(LIST_HEAD.pack(UDMABUF_FLAGS_CLOEXEC, len(runs)))  # of anything else fcntl takes 1024 bytes
    for offset, nbytes in runs:
        request += LIST_ITEM.pack(memfd, 0, offset, nbytes)
    descriptor: int = fcntl.ioctl(udmabuf, UDMABUF_CREATE_LIST, request)
    return descriptor


def map_over(address: int, nbytes: int, descriptor: int) -> None:
    """Map the first bytes of a descriptor over memory that is mapped already; who unmaps that, unmaps this."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")


def _sync(dma_buf: int, flags: int) -> None:
    while True:
        try:
            fcntl.ioctl(dma_buf, DMA_BUF_IOCTL_SYNC, BUF_SYNC.pack(flags))
        except (InterruptedError, BlockingIOError):  # a signal came while it waited for a device: the kernel asks again
            continue
        return

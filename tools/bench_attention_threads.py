"""Two threads of attention beside one, and beside what two threads of this machine can do at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from staging._limits import ffi, lib

from .bench_attention_sweep import Shape, Sweep
from .bench_rows import Row, Work, take_turns, timed

__all__ = ["MUST", "threads_rows"]

MUST, STRETCH = 1.5, 1.8
"""Times as fast as one thread, what two must be on a free core, and what they ought to be."""

LAYERS = 8
"""Of the cache: two of them fit into a small machine's memory."""

OWN = 64 << 10
"""Bytes that a thread reads again and again: they stay in its core's own caches, so that it waits for no other."""

READ = 256 << 20
"""Bytes that are read in all, which takes milliseconds: waking a thread takes some 40 us."""


def threads_rows(shape: Shape, isa: str, times: int) -> list[Row]:
    """Two threads beside one, of the kernel and of plain reading, and beside two that read as many bytes, all in turn.

    Two hardware threads of one core, or a core that others use, cannot be twice as fast whatever runs on them. Plain
    reading shows what they can be; where that is less than is asked, the kernel's row is shown and not judged.
    """
    shape = replace(shape, geometry=replace(shape.geometry, layers=LAYERS))
    with Sweep(shape, isa, 2) as two, Sweep(shape, isa) as one, ThreadPoolExecutor(1) as second:
        works: list[Work] = [two.attend, one.attend, partial(two.read, second), reading(READ, second), reading(READ)]
        both, alone, limit, both_read, alone_read = take_turns(works, times, warm_up=1)
    machine = alone_read.minimum / both_read.minimum
    free = machine >= MUST
    return [
        Row(
            f"{shape.name}, {isa}, 2 threads",
            "1 thread",
            both,
            alone,
            MUST,
            STRETCH,
            "higher",
            goal=f"2 threads, {isa}",
            excuse=None if free else f"no free core: 2 threads that only read gain {machine:.2f}x",
        ),
        Row(f"{shape.name}, {isa}, 2 threads", "2 threads' read limit", both, limit, better="higher"),
        Row(
            f"plain reading beside {shape.name}, {isa}, 2 threads",
            "1 thread",
            both_read,
            alone_read,
            better="higher",
        ),
    ]


def reading(nbytes: int, second: ThreadPoolExecutor | None = None) -> Work:
    """Work that reads about so many bytes out of a core's own caches, by this thread, or by a second one as well."""
    readers = 1 if second is None else 2
    pieces = [ffi.from_buffer("uint8_t[]", np.ones(OWN, np.uint8)) for _ in range(readers)]
    again = max(1, nbytes // OWN // readers)

    def read() -> None:
        helped = None if second is None else second.submit(lib.rp_limit_reread, pieces[1], OWN, again)
        lib.rp_limit_reread(pieces[0], OWN, again)
        if helped is not None:
            helped.result()

    return timed(read)

"""librknnrt.so raises the priority of the process that loads it; here that is undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_niceness"]


@contextmanager
def kept_niceness() -> Iterator[None]:
    """Undo what librknnrt.so does to the process's priority when it is loaded: -19, above all else on the machine.

    Linux keeps a niceness for each thread, and whether the library names the calling one or the process, which is the
    main one, is not documented.
    """
    threads = {0, os.getpid()}
    before = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    try:
        yield
    finally:
        for thread in threads:
            if os.getpriority(os.PRIO_PROCESS, thread) < before[thread]:
                os.setpriority(os.PRIO_PROCESS, thread, before[thread])

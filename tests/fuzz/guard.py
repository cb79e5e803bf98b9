"""What is promised of any input: refusals are our own errors, in bounded time and memory, and nothing stays behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostcache.errors import BadModelFile, RockpageError

__all__ = ["MIB", "Broken", "Spent", "bounded", "refusals", "stray_errors"]

MIB = 1 << 20


class Broken(AssertionError):
    """A promise was broken."""


@contextmanager
def refusals() -> Iterator[None]:
    """Let refusals end the block; every other exception is passed on.

    Raises:
        Broken: a refusal says nothing, or came of memory that ran out: whoever takes so much does not know the bound.
    """
    try:
        yield
    except RockpageError as refusal:
        if not str(refusal).strip():
            raise Broken(f"{type(refusal).__name__} says nothing") from refusal
        # What Python's parser calls a lack of memory is a lack of depth.
        if isinstance(refusal.__cause__, MemoryError) and not isinstance(refusal, BadModelFile):
            raise Broken(f"{type(refusal).__name__} hides a MemoryError") from refusal


@dataclass
class Spent:
    """The most that any block has used so far: processor time in seconds, growth of resident memory in bytes."""

    seconds: float = 0.0
    nbytes: int = 0


@contextmanager
def bounded(seconds: float, nbytes: int, most: Spent) -> Iterator[None]:
    """Hold a block to processor time and to growth of resident memory.

    Args:
        seconds: of all threads.
        nbytes: between what was resident before and the most that ever was during the block.
        most: kept up to date.

    Raises:
        Broken: it took more.
    """
    before = _reset_peak()
    started = time.process_time()
    yield
    took, grown = time.process_time() - started, _peak() - before
    most.seconds, most.nbytes = max(most.seconds, took), max(most.nbytes, grown)
    if took > seconds:
        raise Broken(f"took {took:.2f} s of processor time, {seconds} s at most")
    if grown > nbytes:
        raise Broken(f"grew by {grown / MIB:.0f} MiB, {nbytes / MIB:.0f} MiB at most")


def _reset_peak() -> int:
    """Let the peak begin anew at what is resident now (proc_pid_clear_refs(5)); returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Bytes that were resident at most since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024


@contextmanager
def stray_errors() -> Iterator[None]:
    """Hear errors that Python can raise nowhere: in destructors and callbacks, warnings of files left open among them.

    Raises:
        Broken: there was one.
    """
    heard: list[str] = []
    usual = sys.unraisablehook
    sys.unraisablehook = lambda stray: heard.append(f"{stray.exc_value!r} in {stray.object!r:.200}")
    try:
        yield
    finally:
        sys.unraisablehook = usual
    if heard:
        raise Broken(f"raised where nobody could catch it: {heard}")

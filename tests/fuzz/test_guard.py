"""The harness bites: each promise that is broken is noticed."""

from __future__ import annotations

import time

import pytest

from hostcache.errors import UsageError
from tests.fuzz.guard import MIB, Broken, Spent, bounded, refusals, stray_errors


def test_refusals_end_a_block_and_nothing_else_does() -> None:
    with refusals():
        raise UsageError("no")
    with pytest.raises(KeyError), refusals():
        raise KeyError("k")
    with pytest.raises(Broken, match="UsageError says nothing"), refusals():
        raise UsageError(" ")
    with pytest.raises(Broken, match="UsageError hides a MemoryError"), refusals():
        raise UsageError("no") from MemoryError()


def test_time_is_measured_and_bounded() -> None:
    def busy(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    most = Spent()
    with (
        pytest.raises(Broken, match=r"took 0\.\d\d s of processor time, 0\.05 s at most"),
        bounded(0.05, 1 << 40, most),
    ):
        busy(0.1)
    assert most.seconds > 0.09


def test_memory_is_measured_at_its_peak() -> None:
    most = Spent()
    with pytest.raises(Broken, match=r"grew by 6\d MiB, 32 MiB at most"), bounded(1e9, 32 * MIB, most):
        bytearray(b"x" * (32 * MIB))  # and given back at once
    assert 60 * MIB < most.nbytes < 70 * MIB
    with bounded(1e9, 32 * MIB, Spent()):
        bytearray(16 * MIB)


def test_errors_that_nobody_can_catch_are_heard() -> None:
    class Falls:
        def __del__(self) -> None:
            raise ValueError("in a destructor")

    with pytest.raises(Broken, match="in a destructor"), stray_errors():
        Falls()
    with pytest.raises(Broken, match="ResourceWarning"), stray_errors():
        open(__file__)  # noqa: SIM115 - left open

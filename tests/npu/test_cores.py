"""Which core gets the next job."""

from __future__ import annotations

from hostcache.errors import DeviceError
from npu.cores import QUARANTINE_AFTER, Cores

FAULT = DeviceError("it broke")


def test_the_least_busy_core_is_next_and_the_lowest_of_several() -> None:
    cores = Cores(3)
    picked = []
    for _ in range(4):
        core = cores.pick()
        assert core is not None
        picked.append(core)
        cores.started(core)
    assert picked == [0, 1, 2, 0]
    cores.worked(2)
    assert cores.pick() == 2
    assert cores.pick(avoid=2) == 1


def test_failures_in_a_row_end_in_quarantine_and_a_success_between_them_does_not() -> None:
    cores = Cores(2)
    for _ in range(QUARANTINE_AFTER - 1):
        cores.started(0)
        cores.failed(0, FAULT, ended=True)
    cores.started(0)
    cores.worked(0)
    for failures in range(1, QUARANTINE_AFTER + 1):
        assert cores.quarantined == []
        cores.refused(0, FAULT)
        assert cores.failures == QUARANTINE_AFTER - 1 + failures
    assert cores.quarantined == [0]
    assert [cores.pick(), cores.pick(avoid=1)] == [1, None]


def test_a_core_that_holds_a_job_for_ever_is_out_at_once() -> None:
    cores = Cores(2)
    cores.started(1)
    cores.failed(1, FAULT, ended=False)
    assert cores.quarantined == [1]


def test_a_job_that_nobody_wants_any_more_frees_its_core() -> None:
    cores = Cores(2)
    cores.started(0)
    cores.abandoned(0)
    assert cores.pick() == 0
    assert (cores.launches, cores.failures) == (0, 0)

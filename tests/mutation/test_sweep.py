"""The ordinary suite notices every seeded fault."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutation.fault import Fault
from tests.mutation.faults import FAULTS
from tests.mutation.sweep import ROOT, BrokenFault, planted, survivors


def test_every_fault_still_has_its_place() -> None:
    assert len(FAULTS) >= 200
    for fault in FAULTS:
        source = planted(fault)
        assert source != (ROOT / fault.path).read_text(encoding="utf-8"), fault.what
        if fault.path.endswith(".py"):
            compile(source, fault.path, "exec")
        assert [test for test in fault.tests if not (ROOT / "tests" / test).is_file()] == []
    assert [what for what, count in Counter(fault.what for fault in FAULTS).items() if count > 1] == []


def test_a_fault_that_lost_its_place_is_named() -> None:
    with pytest.raises(BrokenFault, match=r"'gone': hostcache/blocks\.py holds its code 0 times, not once: 'no such"):
        planted(Fault("gone", "hostcache/blocks.py", "no such code", "", ()))


@pytest.mark.long
def test_a_harmless_change_survives_and_a_fault_does_not() -> None:
    """The sweep can fail: it tells a change that no test should notice from one that one must."""
    tests = ("staging/test_buckets.py",)
    old = '"""Context lengths that attention graphs are compiled for."""'
    harmless = Fault("a docstring", "staging/buckets.py", old, '"""Lengths."""', tests)
    fault = next(fault for fault in FAULTS if fault.path == "staging/buckets.py")
    assert survivors([harmless, fault], workers=1) == [harmless]


@pytest.mark.long
def test_a_fault_that_does_not_import_proves_nothing() -> None:
    broken = Fault("no Python", "staging/buckets.py", "class Buckets:", "class Buckets", ("staging/test_buckets.py",))
    with pytest.raises(BrokenFault, match="'no Python': its tests could not run"):
        survivors([broken], workers=1)


@pytest.mark.long
def test_the_suite_notices_every_fault() -> None:
    assert [f"{fault.path}: {fault.what}" for fault in survivors(FAULTS, workers=2)] == []

"""The self-test's step for staged copies, over the emulated NPU: what it proves, and what it notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry
from hostcache.cache import PagedKVCache
from hostcache.errors import DeviceError
from npu.cpu import CpuAttention
from npu.emulated import EmulatedAttention
from npu.emulated_device import Faults
from npu.selftest_report import Step
from npu.selftest_residency import residency

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16)
HEADS = 6


class OffByAHundredth(EmulatedAttention):
    def attend(self, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        super().attend(layer, q, out)
        out[0, 0, 0] += 0.01


def step_over(monkeypatch: pytest.MonkeyPatch, kind: type[EmulatedAttention], **options: Any) -> Step:
    """The step, over a runtime of this kind."""

    def open_runtime(
        _: str, cache: PagedKVCache, heads: int, *, resident_bytes: int, **__: object
    ) -> EmulatedAttention:
        host = CpuAttention(cache, heads)
        return kind(cache, heads, host=host, **{"resident_bytes": resident_bytes, **options})

    monkeypatch.setattr("npu.selftest_residency.open_runtime", open_runtime)
    return residency("rknnrt", GEOMETRY, HEADS, Path("graphs"))


def test_copies_grow_and_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_over(monkeypatch, EmulatedAttention)
    assert step.status == "proved"
    # Eight steps, each a launch for both sequences: the first gathers them whole.
    assert (step.figures["grown"], step.figures["whole"], step.figures["failures"]) == (7, 1, 0)
    assert step.found.startswith("7 launches of rknnrt from copies that grew by a token, off by ")


def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_over(monkeypatch, OffByAHundredth)
    assert step.status == "failed"
    assert ", 0.002 is allowed" in step.found


def test_a_launch_that_failed_is_no_proof_though_the_answer_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_over(monkeypatch, EmulatedAttention, faults=Faults(stale=(3,)))
    assert (step.status, step.figures["failures"]) == ("failed", 1)


def test_copies_that_never_grow_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_over(monkeypatch, EmulatedAttention, resident_bytes=4096)  # too little for a copy
    assert (step.status, step.figures["grown"], step.figures["failures"]) == ("failed", 0, 0)


def test_a_runtime_that_does_not_open_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DeviceError("librknnrt.so 3.0.0 is newer than what rockpage knows")

    monkeypatch.setattr("npu.selftest_residency.open_runtime", refuse)
    step = residency("rknnrt", GEOMETRY, HEADS, Path("graphs"))
    assert (step.status, step.needed) == ("not run", False)
    assert step.found == "the runtime rknnrt does not open: librknnrt.so 3.0.0 is newer than what rockpage knows"

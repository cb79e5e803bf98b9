"""Steps of the self-test that launch attention: every shape, all cores at once, old results, the process's priority."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError

from .canary import Canary
from .cost_model import PUBLISHED
from .emulated_device import EmulatedDevice, Faults
from .launch import Launch
from .selftest_bench import Bench, LaunchShape
from .selftest_oracle import LARGEST_ERROR, exact_attention
from .selftest_report import Step

__all__ = ["at_once", "faults", "launches", "lowest_niceness", "old_results", "priority"]

_TIMED = 5
"""Runs on the first core, of which the median counts."""

_HEADING = "launch              off by      took ms  on RK3588s, by published figures"

_ROUNDS = 10
"""In which all cores run at once."""


_TRIES = 8
"""An old operand passes by chance, with a single head one time in 8 (`npu.canary`): one of so many must be noticed."""


@dataclass(frozen=True)
class _Tried:
    """What became of one shape.

    Attributes:
        shape: which.
        error: largest difference from the exact result, on any core; None if none brought one.
        milliseconds: median from gathering to the result, on the first core.
        estimate: the same, by published figures.
        failures: what went wrong, on which core.
    """

    shape: LaunchShape
    error: float | None
    milliseconds: float | None
    estimate: float
    failures: tuple[str, ...]

    def __str__(self) -> str:
        """One row of a table."""
        if self.failures:
            return f"{self.shape!s:18} FAILED  {'; '.join(self.failures)}"
        return f"{self.shape!s:18} {self.error:8.1e}  {self.milliseconds:10.3f}  {self.estimate:10.3f}"


def launches(bench: Bench) -> Step:
    """Does each launch that graphs were compiled for bring the right result, on each core?"""
    tried = [_try(bench, shape) for shape in bench.shapes]
    failed = [one for one in tried if one.failures]
    error = max((one.error for one in tried if one.error is not None), default=None)
    number = f"{len(tried)} launch shapes on {bench.device.cores} cores"
    off = "no result" if error is None else f"off by {error:.1e} at most, {LARGEST_ERROR:g} is allowed"
    found = f"{len(failed)} of {number} failed; the others: {off}" if failed else f"{number}: {off}"
    figures = {
        "largest_error": error,
        "allowed_error": LARGEST_ERROR,
        "estimates": PUBLISHED.source,
        "launches": [{**asdict(one), "failures": len(one.failures)} for one in tried],
    }
    return Step("launches", "failed" if failed else "proved", found, figures, details=(_HEADING, *map(str, tried)))


def at_once(bench: Bench) -> Step:
    """Do all cores work at the same time, each on its own?"""
    name, cores = "cores at once", bench.device.cores
    if cores < 2:
        return Step(name, "not run", "there is one core", needed=False)
    shape = max(bench.shapes, key=lambda shape: (shape.tile, shape.tokens))
    batch = bench.batch(shape)
    launch = bench.launch(bench.cut(batch))
    queries = [bench.query(batch) for _ in range(cores)]
    exact = [exact_attention(bench.cache, batch, q) for q in queries]
    failures = []
    alone, together = [], []
    for turn in range(_ROUNDS):
        order = [(core + turn) % cores for core in range(cores)]  # so that a core answers another query each time
        outs, seconds = bench.run(launch, {core: queries[index] for core, index in enumerate(order)})
        together.append(seconds)
        judged = [_judge(out, exact[index]) for index, out in zip(order, outs, strict=True)]
        (out,), seconds = bench.run(launch, {0: queries[0]})
        alone.append(seconds)
        failures += [words for words in (*judged, _judge(out, exact[0])) if isinstance(words, str)]
    if failures:
        number = (cores + 1) * _ROUNDS
        return Step(name, "failed", f"{len(failures)} of {number} launches of {shape}; the first: {failures[0]}")
    times = statistics.median(together) / statistics.median(alone)
    return Step(
        name,
        "proved",
        f"{cores} launches of {shape} at once take {times:.2f} times as long as one, and none has another's result",
        {"cores": cores, "times_as_long": times, "alone_ms": statistics.median(alone) * 1e3},
    )


def old_results(bench: Bench) -> Step:
    """Is a result known to be another launch's, or to come of an operand that is?"""
    name = "old results"
    error = 0.0
    for kind in dict.fromkeys(shape.kind for shape in bench.shapes):
        shape = next(shape for shape in bench.shapes if shape.kind == kind)
        batch = bench.batch(shape)
        launch, q = bench.launch(bench.cut(batch)), bench.query(batch)
        try:
            started = bench.start(launch, q, 0)
            with bench.result(started) as out:
                error = max(error, float(started.canary.errors(out).max()))
                known = _is_refused(Canary(launch.plan.layout), out)
            if not known:
                return Step(name, "failed", f"a result passed for that of another launch of {shape}")
            for operand in ("query", "keys", "values", *(["mask"] if launch.plan.layout.mask_rows else [])):
                if not any(_old_is_refused(bench, launch, q, operand) for _ in range(_TRIES)):
                    return Step(name, "failed", f"a result of another launch's {operand} passed, of {shape}")
        except DeviceError as failed:
            return Step(name, "failed", str(failed))
    found = f"a launch's answer to its question is off by {error:.1e}, and no other launch's result or operand gives it"
    return Step(name, "proved", found, {"answer_error": error})


def faults(bench: Bench) -> Step:
    """Is a run that does nothing, and says that it did, noticed?"""
    name, device = "faults", bench.device
    if not isinstance(device, EmulatedDevice):
        why = (
            "nothing can make the vendor's library fail on demand; make test-arm64 lets a stub of it fail in each call"
        )
        return Step(name, "not run", why, needed=False)
    batch = bench.batch(bench.shapes[0])
    launch = bench.launch(bench.cut(batch))
    usual, device.faults = device.faults, Faults(stale=range(1 << 62))
    (out,), _ = bench.run(launch, {0: bench.query(batch)})
    device.faults = usual
    if not isinstance(out, DeviceError):
        return Step(name, "failed", "a run that wrote nothing went unnoticed")
    return Step(name, "proved", f"a run that wrote nothing was noticed: {out}")


def priority(before: int) -> Step:
    """Has the vendor's library put this process above all others? It does so when it is loaded, to -19.

    Args:
        before: `lowest_niceness()` before the NPU was opened.
    """
    now = lowest_niceness()
    if now < before:
        return Step(
            "priority",
            "failed",
            f"a thread has niceness {now}, it was {before} before the NPU was used: it comes before all else",
            {"before": before, "now": now},
        )
    return Step("priority", "proved", f"niceness is {now}, as it was before", {"before": before, "now": now})


def lowest_niceness() -> int:
    """Of this process's threads: Linux keeps one for each."""
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            found.append(os.getpriority(os.PRIO_PROCESS, thread))
        except ProcessLookupError:  # noqa: PERF203 - it ended meanwhile
            continue
    return min(found)


def _try(bench: Bench, shape: LaunchShape) -> _Tried:
    """Run one shape on each core, several times on the first."""
    batch = bench.batch(shape)
    q = bench.query(batch)
    exact = exact_attention(bench.cache, batch, q)
    cut = bench.cut(batch)
    launch = bench.launch(cut)
    errors: list[float] = []
    seconds: list[float] = []
    failures: list[str] = []
    for core in range(bench.device.cores):
        for _ in range(1 if core else _TIMED):
            (out,), taken = bench.run(launch, {core: q})
            judged = _judge(out, exact)
            if isinstance(judged, str):
                failures.append(f"core {core}: {judged}")
                break  # a core that is dead may take seconds to say so
            errors.append(judged)
            if core == 0:
                seconds.append(taken)
    return _Tried(
        shape,
        max(errors, default=None),
        statistics.median(seconds) * 1e3 if seconds else None,
        PUBLISHED.on_device(cut.work) * 1e3,
        tuple(failures),
    )


def _judge(out: NDArray[np.float32] | DeviceError, exact: NDArray[np.float64]) -> float | str:
    """What a result is off by at most; in words, where that is too much or there is none."""
    if isinstance(out, DeviceError):
        return str(out)
    differences = np.abs(out - exact)
    wrong = ~(differences <= LARGEST_ERROR)  # so that NaN is wrong
    if not wrong.any():
        return float(differences.max())
    row, head, channel = np.unravel_index(np.argmax(np.nan_to_num(differences, nan=np.inf)), out.shape)
    return (
        f"{np.count_nonzero(wrong)} of {out.size} numbers are wrong; the worst, of row {row}, head {head}, channel "
        f"{channel}, is {out[row, head, channel]:.5g} in place of {exact[row, head, channel]:.5g}"
    )


def _is_refused(canary: Canary, out: NDArray[np.float16]) -> bool:
    try:
        canary.check(out)
    except DeviceError:
        return True
    return False


def _old_is_refused(bench: Bench, launch: Launch, q: NDArray[np.float32], operand: str) -> bool:
    """Run a launch with an operand of another one.

    Raises:
        DeviceError: it failed otherwise.
    """
    try:
        with bench.result(bench.start(launch, q, 0, old=operand)):
            return False
    except DeviceError as error:
        if "stale" not in error.values:
            raise
        return True

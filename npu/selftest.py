"""Proves on a board what no other machine can: that its NPU, driver and library do what rockpage takes them to do.

Each step stands by itself: what fails, or cannot be tried, is said, and the next one runs. Nothing is changed but the
NPU's own state, and a repacked model may be kept in the user's cache, as by any run. Where there is no board, the same
steps run on the emulated NPU.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hostcache.errors import DeviceError, RockpageError, UsageError
from hostcache.geometry import KVGeometry

from .attention_manifest import AttentionManifest
from .board import Npu
from .board_device import BoardDevice
from .doctor import Diagnosis, diagnose
from .doctor_vendor import find_library
from .machine import Machine
from .model import ModelConfig
from .rknn_manifest import read_manifest
from .selftest_bench import Bench
from .selftest_heaps import heaps
from .selftest_launches import lowest_niceness, priority
from .selftest_report import Report, Step, StepStatus
from .selftest_residency import residency
from .selftest_tokens import same_tokens
from .selftest_ways import EMULATED, ON_A_BOARD, Heads, Way, open_bench
from .source import open_model

__all__ = ["Subject", "selftest"]


@dataclass(frozen=True)
class Subject:
    """What is tested.

    Attributes:
        model: where the model is; called once it is needed, since it may have to be fetched.
        board: whether the board's own NPU is; else the emulated one.
        graphs: what `rockpage export attention` wrote, for the board; None: there are none yet.
        threads: of the CPU.
    """

    model: Callable[[], Path]
    board: bool
    graphs: Path | None = None
    threads: int = 1


def selftest(
    subject: Subject, *, report: Callable[[Step], None] = lambda _: None, machine: Machine | None = None
) -> Report:
    """Run all steps; some minutes on a board.

    Args:
        subject: what is tested.
        report: told each step when it has ended.
        machine: this one by default.

    Raises:
        UsageError: graphs are given where there is nothing to load them.
        DeviceError: the board's NPU is asked for, and there is none that the vendor's driver runs.
        ModelError: the model cannot be read, or the folder of graphs is damaged.
    """
    if subject.graphs is not None and not subject.board:
        raise UsageError("graphs are for a board's NPU: add --board, or leave --graphs out", graphs=str(subject.graphs))
    machine = machine or Machine()
    manifest = None if subject.graphs is None else read_manifest(AttentionManifest, subject.graphs)
    diagnosis = diagnose(None, manifest.toolkit if manifest else None, machine)
    npu = _require_npu(diagnosis) if subject.board else None
    heads = _heads(subject, manifest)
    steps = []
    for step in _steps(subject, machine, diagnosis, npu, heads):
        steps.append(step.without_names())
        report(steps[-1])
    chip = {
        "model": diagnosis.board.model,
        "soc": diagnosis.board.soc.name if diagnosis.board.soc else None,
        "cores": diagnosis.board.npu.cores if diagnosis.board.npu else None,
    }
    return Report(not subject.board, chip, _versions(machine, diagnosis, manifest), tuple(steps))


def _require_npu(diagnosis: Diagnosis) -> Npu:
    """The board's NPU.

    Raises:
        DeviceError: this is no board, or the vendor's driver does not run its NPU.
    """
    npu = diagnosis.board.npu
    if diagnosis.board.runs_graphs and npu is not None and npu.driver == "rknpu":
        return npu
    checks = {check.name: check for check in diagnosis.checks}
    check = checks.get("npu_driver", checks["board"])
    raise DeviceError(
        f"there is no NPU to test ({check.found}): rockpage doctor says more; without --board the same runs on the "
        "emulated NPU",
        found=check.found,
    )


def _heads(subject: Subject, manifest: AttentionManifest | None) -> Heads | None:
    """The graphs', or for the emulated NPU the model's; None for a board without graphs."""
    if manifest is not None:
        return Heads(KVGeometry(1, manifest.kv_heads, manifest.head_dim), manifest.kv_heads * manifest.group)
    if subject.board:
        return None
    with open_model(subject.model()) as source:
        config = ModelConfig.from_gguf(source)
    return Heads(config.geometry, config.heads)


def _steps(
    subject: Subject, machine: Machine, diagnosis: Diagnosis, npu: Npu | None, heads: Heads | None
) -> Iterator[Step]:
    runtime, in_place = ("emulated", "emulated") if npu is None else ("rknnlite", "rknnrt")
    yield _doctor(diagnosis, npu)
    yield _guarded("heaps", lambda: heaps(diagnosis.board.heaps, machine.path("/dev/dma_heap")))
    for way in EMULATED if npu is None else ON_A_BOARD:
        if heads is None:
            why = (
                "there are no graphs: rockpage export attention MODEL --out DIR on an x86-64 machine, --graphs DIR here"
            )
            yield from _untried(way, "not run", why)
        else:
            yield from _over_a_bench(way, partial(open_bench, way, npu, subject.graphs, heads))
    if heads is None:
        yield Step("residency", "not run", "there are no graphs, see above", needed=False)
        yield Step("tokens", "not run", "there are no graphs, see above")
        return
    yield _guarded("residency", lambda: residency(in_place, heads.geometry, heads.query, subject.graphs))
    yield _guarded("tokens", lambda: same_tokens(subject.model(), runtime, subject.graphs, subject.threads))


def _over_a_bench(way: Way, open_it: Callable[[], Bench]) -> Iterator[Step]:
    """The steps of one way to the NPU; a device belongs to one at a time, so the bench is closed behind them."""
    niceness = lowest_niceness()
    began = time.perf_counter()
    try:
        bench = open_it()
    except (RockpageError, OSError) as error:
        yield from _untried(way, "failed" if way.needed else "not run", str(error))
        return
    try:
        yield _graphs(f"graphs{way.suffix}", bench, time.perf_counter() - began)
        for name, step in way.steps.items():
            yield replace(_guarded(name, partial(step, bench)), name=f"{name}{way.suffix}")
        yield replace(priority(niceness), name=f"priority{way.suffix}")
    finally:
        bench.close()


def _untried(way: Way, status: StepStatus, why: str) -> Iterator[Step]:
    """The steps of a way that there is not."""
    yield Step(f"graphs{way.suffix}", status, why, needed=way.needed)
    for name in (*way.steps, "priority"):
        yield Step(f"{name}{way.suffix}", "not run", f"see graphs{way.suffix}", needed=way.needed)


def _doctor(diagnosis: Diagnosis, npu: Npu | None) -> Step:
    """What the doctor says; on a machine without an NPU, for the record only."""
    wrong = [check for check in diagnosis.checks if check.status in ("fail", "warn")]
    details = tuple(f"{check.status} {check.name}: {check.found}" for check in wrong)
    found = diagnosis.verdict + (f": {', '.join(check.name for check in wrong)}" if wrong else "")
    failed = npu is not None and diagnosis.verdict == "unusable"
    return Step("doctor", "failed" if failed else "proved", found, details=details)


def _graphs(name: str, bench: Bench, seconds: float) -> Step:
    device = bench.device
    if not isinstance(device, BoardDevice):
        return Step(name, "not run", "the emulated NPU takes any shape, and needs none", needed=False)
    figures = {"seconds": seconds, "numerics": device.numerics, "driver": device.driver}
    found = f"loaded by {device.name} for each of {device.cores} cores, in {seconds:.1f} s"
    return Step(name, "proved", found, figures)


def _guarded(name: str, step: Callable[[], Step]) -> Step:
    """A step; what it does not expect is its answer, too."""
    try:
        return step()
    except (RockpageError, OSError) as error:
        return Step(name, "failed", str(error))


def _versions(machine: Machine, diagnosis: Diagnosis, manifest: AttentionManifest | None) -> dict[str, str | None]:
    npu, library = diagnosis.board.npu, find_library(machine)
    packages = ("rockpage", "rknn-toolkit-lite2", "numpy", "onnxruntime")
    return {
        "python": platform.python_version(),
        "kernel": os.uname().release,
        "architecture": os.uname().machine,
        "driver": npu.version if npu else None,
        "librknnrt": library.version if library else None,
        "graphs": manifest.toolkit if manifest else None,
        **{package: _package_version(package) for package in packages},
    }


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Where attention ran, and why, in words."""

from __future__ import annotations

from .attention import AttentionRuntime
from .placement import ByCost
from .staged import StagedAttention

__all__ = ["explain_placement"]


def explain_placement(runtime: AttentionRuntime) -> list[str]:
    """Lines for people, about all steps since the runtime was opened.

    The launches of a step are counted once, though they run for every layer.
    """
    if not isinstance(runtime, StagedAttention):
        return [f"runtime {runtime.name}: all attention ran on the CPU, straight through the block table"]
    cores, residency = runtime.cores, runtime.residency
    lines = [f"runtime {runtime.name}: where the launches of all steps ran, and why"]
    lines += runtime.log.lines() or ["     0: nothing was attended"]
    if isinstance(runtime.placement, ByCost):
        lines.append(f"costs: {runtime.placement.model.source}")
    lines.append(
        f"jobs, one a layer: {cores.launches} done, {cores.failures} failed, {cores.on_host} left to the CPU for that"
    )
    if cores.quarantined:
        numbers = ", ".join(map(str, cores.quarantined))
        lines.append(f"cores that get no more jobs: {numbers} of 0 to {cores.count - 1}, see the log")
    if residency is not None:
        counts = residency.counts
        lines.append(f"staged copies: {counts.grown} grew by what was new, {counts.whole} were gathered whole")
    return lines

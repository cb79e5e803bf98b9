"""What a model takes of a process's memory, known from its header, and whether that is there."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

from hostcache.errors import RegionError, UsageError
from hostcache.geometry import KVGeometry
from hostcache.memory_budget import scarcest_budget
from hostcache.scheduler_config import SchedulerConfig

from .checks import check_geometry
from .memory_plan import LIBRARIES_BYTES, MemoryPlan, resident_weights, runtime_bytes, step_bytes
from .model import ModelConfig
from .source import ModelSource
from .staged import arena_bytes
from .weights import Activations, plan_weights

__all__ = ["plan_geometry", "plan_model", "require_memory"]


def plan_geometry(
    geometry: KVGeometry,
    heads: int,
    *,
    weights_bytes: int,
    runtime_bytes: int,
    runtime: str,
    pool_asked: int,
    ram_bytes: int,
    reserve_bytes: int,
    resident_bytes: int = 0,
    context: int | None = None,
    context_limit: int | None = None,
) -> MemoryPlan:
    """Plan for a model of which only dimensions are known, with the staging memory of an attention runtime.

    Args:
        geometry: shape of the model's KV cache.
        heads: query heads of the model.
        weights_bytes: weights as they lie in memory after load.
        runtime_bytes: interpreter, libraries, graphs, tokenizer, and what a full step computes in.
        runtime: `"cpu"` stages nothing; `"emulated"` has an arena and the emulated NPU's copy of it, others an arena.
        pool_asked: bytes asked for the pool.
        ram_bytes: memory there is.
        reserve_bytes: of it, left to the kernel and other programs.
        resident_bytes: in which decoding sequences stay staged, beside the buffers of launches.
        context: tokens one session must be able to hold; None asks for nothing.
        context_limit: positions the model was trained for; None if unknown.

    Raises:
        UsageError: no runtime computes such heads, or it stages nothing and has no use for `resident_bytes`.
        DimensionTooLarge: they are beyond what the NPU's registers hold.
    """
    check_geometry(geometry, heads)
    if resident_bytes and runtime == "cpu":
        raise UsageError(
            f"the cpu runtime stages nothing: no sequence can stay so in {resident_bytes} bytes, leave them out",
            resident_bytes=resident_bytes,
        )
    staging = 0 if runtime == "cpu" else arena_bytes(geometry, heads) + resident_bytes
    return MemoryPlan(
        geometry=geometry,
        ram_bytes=ram_bytes,
        reserve_bytes=reserve_bytes,
        weights_bytes=weights_bytes,
        runtime_bytes=runtime_bytes,
        staging_bytes=staging,
        device_bytes=staging if runtime == "emulated" else 0,
        pool_asked=pool_asked,
        context=context,
        context_limit=context_limit,
    )


def plan_model(
    source: ModelSource,
    activations: Activations,
    *,
    runtime: str,
    pool_asked: int,
    ram_bytes: int,
    reserve_bytes: int,
    max_rows: int = SchedulerConfig.max_rows,
    resident_bytes: int = 0,
    context: int | None = None,
) -> MemoryPlan:
    """Plan for an open model; no weight is read.

    Args:
        source: the model.
        activations: as it is to be loaded.
        runtime: as in `plan_geometry`, and so all others.
        pool_asked: bytes asked for the pool.
        ram_bytes: memory there is.
        reserve_bytes: of it, left to the kernel and other programs.
        max_rows: most tokens of one step.
        resident_bytes: as in `plan_geometry`.
        context: tokens one session must be able to hold; None asks for nothing.

    Raises:
        ModelError: the model is damaged or of a kind rockpage does not run.
        UsageError: `activations` is not known, or as in `plan_geometry`.
        MissingExtra: a tensor's type needs the `gguf` package, which is not installed.
    """
    config = ModelConfig.from_gguf(source)
    return plan_geometry(
        config.geometry,
        config.heads,
        weights_bytes=resident_weights(plan_weights(source, config, activations), activations),
        runtime_bytes=runtime_bytes(config.layers, config.vocab) + step_bytes(config.hidden, config.ffn, max_rows),
        runtime=runtime,
        pool_asked=pool_asked,
        ram_bytes=ram_bytes,
        reserve_bytes=reserve_bytes,
        resident_bytes=resident_bytes,
        context=context,
        context_limit=config.context_length,
    )


def require_memory(
    source: ModelSource,
    activations: Activations,
    *,
    runtime: str,
    pool_bytes: int,
    max_rows: int,
    weights_bytes: int | None = None,
    resident_bytes: int = 0,
) -> None:
    """Refuse a load for which memory is not there, before any is taken: later the kernel would end the process.

    Args:
        source: the open model.
        activations: as it is to be loaded.
        runtime: that is to be opened, by its own name; see `npu.runtimes.first_choice`.
        pool_bytes: asked for the pool.
        max_rows: most tokens of one step.
        weights_bytes: of weights that a board's NPU is to hold, in the same memory; None: those of the CPU.
        resident_bytes: in which decoding sequences are to stay staged; the CPU's runtime, which stages none, says so
            itself.

    Raises:
        RegionError: this machine, or a cgroup that the process is in, has less left than the plan calls for.
        ModelError: as `plan_model`; so are `UsageError` and `MissingExtra`.
    """
    budget = scarcest_budget()
    if budget is None:  # the pool's pages are touched at start, and will tell
        return
    plan = plan_model(
        source,
        activations,
        runtime=runtime,
        pool_asked=pool_bytes,
        ram_bytes=budget.available,
        reserve_bytes=0,
        max_rows=max_rows,
        resident_bytes=0 if runtime == "cpu" else resident_bytes,
    )
    loaded = min(_resident_bytes(), LIBRARIES_BYTES)  # of what the plan counts, already there
    plan = replace(plan, ram_bytes=budget.available + loaded)
    if weights_bytes is not None:
        plan = replace(plan, weights_bytes=weights_bytes)
    if plan.needed_bytes > plan.ram_bytes:
        raise RegionError(
            f"{source.path} does not fit into the memory of {budget.owner}: {plan.obstacles()[0]}; "
            "use a smaller model or pool, or free memory first",
            needed=plan.needed_bytes,
            available=plan.ram_bytes,
            pool_limit=plan.pool_limit_bytes,
        )


def _resident_bytes() -> int:
    """Resident memory of this process, of which the kernel keeps count in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

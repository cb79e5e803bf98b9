"""What a model takes of a process's memory, known from its header, and whether that is there."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

from hostcache.errors import RegionError
from hostcache.geometry import KVGeometry
from hostcache.memory_budget import MemoryBudget, scarcest_budget
from hostcache.pressure import PressureLimits
from hostcache.scheduler_config import SchedulerConfig

from .checks import check_geometry
from .memory_plan import LIBRARIES_BYTES, MemoryPlan, resident_weights, runtime_bytes, step_bytes
from .model import ModelConfig
from .sizes import format_size
from .source import ModelSource
from .staged import arena_bytes
from .weights import Activations, plan_weights

__all__ = ["USUAL_POOL_BYTES", "PoolChoice", "choose_pool", "plan_geometry", "plan_model", "require_memory"]

USUAL_POOL_BYTES = 192 << 20
"""512 blocks of the reference geometry (24 layers, 2 KV heads of 128)."""

LEAST_TOKENS = 256
"""A pool for less serves nobody: nothing smaller is chosen unasked."""


@dataclass(frozen=True)
class PoolChoice:
    """How large a pool is, and why.

    Attributes:
        nbytes: memory for KV.
        reason: for people.
        reduced: whether it is smaller than usual because memory is left for no more.
    """

    nbytes: int
    reason: str
    reduced: bool = False


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
        context: tokens one session must be able to hold; None asks for nothing.
        context_limit: positions the model was trained for; None if unknown.

    Raises:
        UsageError: no runtime computes such heads.
        DimensionTooLarge: they are beyond what the NPU's registers hold.
    """
    check_geometry(geometry, heads)
    staging = 0 if runtime == "cpu" else arena_bytes(geometry, heads)
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
        context: tokens one session must be able to hold; None asks for nothing.

    Raises:
        ModelError: the model is damaged or of a kind rockpage does not run.
        UsageError: `activations` is not known, or no runtime computes such heads.
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
        context=context,
        context_limit=config.context_length,
    )


def require_memory(
    source: ModelSource, activations: Activations, *, runtime: str, pool_bytes: int, max_rows: int
) -> None:
    """Refuse a load for which memory is not there, before any is taken: later the kernel would end the process.

    Args:
        source: the open model.
        activations: as it is to be loaded.
        runtime: that is to be opened; `"auto"` opens the CPU's.
        pool_bytes: asked for the pool.
        max_rows: most tokens of one step.

    Raises:
        RegionError: this machine, or a cgroup that the process is in, has less left than the plan calls for.
        ModelError: as `plan_model`; so are `UsageError` and `MissingExtra`.
    """
    budget = scarcest_budget()
    if budget is None:  # the pool's pages are touched at start, and will tell
        return
    plan = _plan_within(budget, source, activations, runtime=runtime, pool_asked=pool_bytes, max_rows=max_rows)
    if plan.needed_bytes > plan.ram_bytes:
        raise _refusal(source, budget, plan)


def choose_pool(
    source: ModelSource,
    activations: Activations,
    *,
    runtime: str,
    asked: int | None,
    max_rows: int,
    swap_bytes: int = 0,
) -> PoolChoice:
    """Settle how large the pool is: as asked; or, if nobody asked, as usual where memory is left for it, else smaller.

    Of what is left, so much stays free as has to be free for memory not to be short: a pool that took it would have to
    give it back at once.

    Args:
        source: the open model.
        activations: as it is to be loaded.
        runtime: as in `require_memory`.
        asked: bytes; None leaves it to what there is.
        max_rows: most tokens of one step.
        swap_bytes: memory that is taken beside the pool, for the KV of preempted requests.

    Raises:
        RegionError: what is asked for does not fit, or not even a pool for 256 tokens.
        ModelError: as `require_memory`; so are `UsageError` and `MissingExtra`.
    """
    if asked is not None:
        require_memory(source, activations, runtime=runtime, pool_bytes=asked + swap_bytes, max_rows=max_rows)
        return PoolChoice(asked, "as asked for")
    budget = scarcest_budget()
    if budget is None:
        return PoolChoice(USUAL_POOL_BYTES, "as usual: the kernel does not say what memory is left")
    reserve = PressureLimits.of(budget.limit).high_bytes
    plan = _plan_within(budget, source, activations, runtime=runtime, pool_asked=USUAL_POOL_BYTES, max_rows=max_rows)
    plan = replace(plan, reserve_bytes=reserve + swap_bytes)
    least = plan.geometry.blocks_for(LEAST_TOKENS) * plan.geometry.block_bytes
    if plan.pool_limit_bytes < least:
        raise _refusal(source, budget, replace(plan, pool_asked=least))
    others = format_size(plan.process_bytes - plan.pool_bytes + swap_bytes)
    left = f"{budget.owner} has {format_size(plan.ram_bytes)} for the process, whose other parts take {others}"
    if plan.pool_limit_bytes >= USUAL_POOL_BYTES:
        return PoolChoice(USUAL_POOL_BYTES, f"as usual: {left}")
    reason = f"not {format_size(USUAL_POOL_BYTES)}: {left}, and {format_size(reserve)} stay free"
    return PoolChoice(plan.pool_limit_bytes, reason, reduced=True)


def _plan_within(
    budget: MemoryBudget,
    source: ModelSource,
    activations: Activations,
    *,
    runtime: str,
    pool_asked: int,
    max_rows: int,
) -> MemoryPlan:
    """Plan for what a budget has left, and for what of the plan has been taken from it already."""
    plan = plan_model(
        source,
        activations,
        runtime="cpu" if runtime == "auto" else runtime,
        pool_asked=pool_asked,
        ram_bytes=budget.available,
        reserve_bytes=0,
        max_rows=max_rows,
    )
    loaded = min(_resident_bytes(), LIBRARIES_BYTES)  # of what the plan counts, already there
    return replace(plan, ram_bytes=budget.available + loaded)


def _refusal(source: ModelSource, budget: MemoryBudget, plan: MemoryPlan) -> RegionError:
    return RegionError(
        f"{source.path} does not fit into the memory of {budget.owner}: {plan.obstacles()[0]}; "
        "use a smaller model or pool, or free memory first",
        needed=plan.needed_bytes,
        available=plan.ram_bytes,
        pool_limit=plan.pool_limit_bytes,
    )


def _resident_bytes() -> int:
    """Resident memory of this process, of which the kernel keeps count in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

"""What a model takes of a process's memory, known from its header, and whether that is there."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

from hostcache.codec import FP16, Codec
from hostcache.errors import RegionError, UsageError
from hostcache.geometry import KVGeometry
from hostcache.memory_budget import MemoryBudget, scarcest_budget
from hostcache.pressure import PressureLimits
from hostcache.scheduler_config import SchedulerConfig

from .checks import check_geometry
from .decoder_choice import tiles_of
from .memory_plan import (
    LIBRARIES_BYTES,
    MemoryPlan,
    resident_weights,
    runtime_bytes,
    step_bytes,
    tiled_runtime_bytes,
    tiled_step_bytes,
)
from .model import ModelConfig
from .sizes import format_size
from .source import ModelSource
from .staged import arena_bytes
from .weights import Activations, plan_weights

__all__ = [
    "USUAL_POOL_BYTES",
    "MemoryDemand",
    "PoolChoice",
    "choose_pool",
    "plan_geometry",
    "plan_model",
    "require_memory",
]

USUAL_POOL_BYTES = 192 << 20
"""512 blocks of the reference geometry (24 layers, 2 KV heads of 128)."""

LEAST_TOKENS = 256
"""A pool for less serves nobody: nothing smaller is chosen unasked."""


@dataclass(frozen=True)
class MemoryDemand:
    """What decides how much memory a load takes beside the pool.

    Attributes:
        activations: as the weights are to be loaded.
        runtime: that is to be opened, by its own name; see `npu.runtimes.first_choice`.
        max_rows: most tokens of one step.
        weights_bytes: of weights that a board's NPU is to hold, in the same memory; None: those of the CPU.
        resident_bytes: in which decoding sequences are to stay staged; the CPU's runtime, which stages none, says so
            itself.
        swap_bytes: for the KV of preempted requests; 0 if a file holds it.
        codec: the leanest in which KV is to be stored.
    """

    activations: Activations
    runtime: str
    max_rows: int
    weights_bytes: int | None = None
    resident_bytes: int = 0
    swap_bytes: int = 0
    codec: Codec = FP16


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
    weights, others = _dense_bytes(source, config, activations, max_rows)
    return plan_geometry(
        config.geometry,
        config.heads,
        weights_bytes=weights,
        runtime_bytes=others,
        runtime=runtime,
        pool_asked=pool_asked,
        ram_bytes=ram_bytes,
        reserve_bytes=reserve_bytes,
        resident_bytes=resident_bytes,
        context=context,
        context_limit=config.context_length,
    )


def _dense_bytes(source: ModelSource, config: ModelConfig, activations: Activations, max_rows: int) -> tuple[int, int]:
    """Bytes of the weights, and of the process beside them and the pool."""
    tiles = tiles_of(source, config, activations)
    if tiles is None:
        weights = resident_weights(plan_weights(source, config, activations), activations)
        return weights, runtime_bytes(config.layers, config.vocab) + step_bytes(config.hidden, config.ffn, max_rows)
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    in_a_step = tiled_step_bytes(config.hidden, q_width, kv_width, config.ffn, max_rows)
    return tiles.nbytes, tiled_runtime_bytes(config.vocab) + in_a_step


def require_memory(source: ModelSource, demand: MemoryDemand, pool_bytes: int) -> None:
    """Refuse a load for which memory is not there, before any is taken: later the kernel would end the process.

    Args:
        source: the open model.
        demand: what its load takes beside the pool.
        pool_bytes: asked for the pool.

    Raises:
        RegionError: this machine, or a cgroup that the process is in, has less left than the plan calls for.
        ModelError: as `plan_model`; so are `UsageError` and `MissingExtra`.
    """
    budget = scarcest_budget()
    if budget is None:  # the pool's pages are touched at start, and will tell
        return
    plan = _plan_within(budget, source, demand, pool_bytes)
    if plan.needed_bytes > plan.ram_bytes:
        raise _refusal(source, budget, demand, plan)


def choose_pool(source: ModelSource, demand: MemoryDemand, asked: int | None) -> PoolChoice:
    """Settle how large the pool is: as asked; or, if nobody asked, as usual where memory is left for it, else smaller.

    Of what is left, so much stays free as has to be free for memory not to be short: a pool that took it would have to
    give it back at once.

    Args:
        source: the open model.
        demand: what its load takes beside the pool.
        asked: bytes; None leaves it to what there is.

    Raises:
        RegionError: what is asked for does not fit, or not even a pool for 256 tokens.
        ModelError: as `require_memory`; so are `UsageError` and `MissingExtra`.
    """
    if asked is not None:
        require_memory(source, demand, asked)
        return PoolChoice(asked, "as asked for")
    budget = scarcest_budget()
    if budget is None:
        return PoolChoice(USUAL_POOL_BYTES, "as usual: the kernel does not say what memory is left")
    plan = _plan_within(budget, source, demand, USUAL_POOL_BYTES)
    others = format_size(plan.needed_bytes - plan.pool_bytes)
    left = f"{budget.owner} has {format_size(plan.ram_bytes)} for the process, whose other parts take {others}"
    to_stay_free = PressureLimits.of(budget.limit).high_bytes
    plan = replace(plan, reserve_bytes=plan.reserve_bytes + to_stay_free)
    least = plan.geometry.blocks_for(LEAST_TOKENS) * plan.geometry.block_bytes
    if plan.pool_limit_bytes < least:
        raise _refusal(source, budget, demand, replace(plan, pool_asked=least))
    if plan.pool_limit_bytes >= USUAL_POOL_BYTES:
        return PoolChoice(USUAL_POOL_BYTES, f"as usual: {left}")
    reason = f"not {format_size(USUAL_POOL_BYTES)}: {left}, and {format_size(to_stay_free)} stay free"
    return PoolChoice(plan.pool_limit_bytes, reason, reduced=True)


def _plan_within(budget: MemoryBudget, source: ModelSource, demand: MemoryDemand, pool_asked: int) -> MemoryPlan:
    """Plan for what a budget has left, and for what of the plan has been taken from it already."""
    loaded = min(_resident_bytes(), LIBRARIES_BYTES)  # of what the plan counts, already there
    plan = plan_model(
        source,
        demand.activations,
        runtime=demand.runtime,
        pool_asked=pool_asked,
        ram_bytes=budget.available + loaded,
        reserve_bytes=demand.swap_bytes,
        max_rows=demand.max_rows,
        resident_bytes=0 if demand.runtime == "cpu" else demand.resident_bytes,
    )
    plan = replace(plan, codec=demand.codec)
    return plan if demand.weights_bytes is None else replace(plan, weights_bytes=demand.weights_bytes)


def _refusal(source: ModelSource, budget: MemoryBudget, demand: MemoryDemand, plan: MemoryPlan) -> RegionError:
    smaller = "model, pool or swap space" if demand.swap_bytes else "model or pool"
    return RegionError(
        f"{source.path} does not fit into the memory of {budget.owner}: {plan.obstacles()[0]}; "
        f"use a smaller {smaller}, or free memory first",
        needed=plan.needed_bytes,
        available=plan.ram_bytes,
        pool_limit=plan.pool_limit_bytes,
    )


def _resident_bytes() -> int:
    """Resident memory of this process, of which the kernel keeps count in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

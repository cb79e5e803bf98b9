"""What replayed traffic meets: a machine, a pool and a scheduler's limits; and two older ways to run it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostcache import KVGeometry, SchedulerConfig
from hostcache.codec import FP16, Codec
from hostcache.errors import UsageError

from .replay_cost import MachineCost

__all__ = ["Setup", "contiguous", "unchunked"]


@dataclass(frozen=True)
class Setup:
    """What the traffic meets.

    Attributes:
        geometry: of the KV.
        blocks: of the codec, in the pool; whole extents of them.
        config: the scheduler's limits.
        cost: of a step.
        reserved_blocks: None: a session has the blocks its tokens need. Else each session has so many, side by side,
            from start to end, and shares none: what contiguous caches do.
        swap_bytes: where preempted requests may leave their KV; 0: it is computed again.
        codec: how all sessions store their KV.
    """

    geometry: KVGeometry
    blocks: int
    config: SchedulerConfig
    cost: MachineCost
    reserved_blocks: int | None = None
    swap_bytes: int = 0
    codec: Codec = FP16

    @property
    def extents(self) -> int:
        """What the pool is cut into."""
        return self.blocks // self.codec.blocks_per_extent


def contiguous(setup: Setup) -> Setup:
    """The same memory cut into one piece per session, each as long as the context.

    Raises:
        UsageError: the memory does not hold one.
    """
    context = setup.config.context_length
    reserved = setup.geometry.blocks_for(context)
    if reserved > setup.blocks:
        raise UsageError(
            f"a contiguous session of {context} tokens takes {reserved} blocks, the pool has {setup.blocks}: "
            "give --context less, or --pool more",
            context=context,
            blocks=setup.blocks,
        )
    sequences = min(setup.config.max_sequences, setup.blocks // reserved)
    return replace(setup, config=replace(setup.config, max_sequences=sequences), reserved_blocks=reserved)


def unchunked(setup: Setup) -> Setup:
    """The same pool, but each prompt is computed in one step, however long those that decode then wait."""
    config, context = setup.config, setup.config.context_length
    whole = replace(config, prefill_chunk=context, max_rows=context + config.max_sequences, step_seconds=None)
    return replace(setup, config=whole)

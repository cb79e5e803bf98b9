"""The shadow with several codecs: requests of each share the pool's memory, and none may see another's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.codec import CODECS, FP16, INT4, Codec
from hostcache.geometry import KVGeometry
from hostcache.prefix import Namespace
from hostcache.prefix_caches import PrefixCaches
from hostcache.request import Request
from hostcache.step import StepPlan
from tests.hostcache.shadow import HEAD_DIM, Fault, ShadowEngine
from tests.hostcache.windowed_shadow import WindowedShadow

__all__ = ["CodecShadow", "WindowedCodecShadow"]

OVERWRITTEN = 0.904
"""What a block of several units leaves in all but its first: no digest holds it."""


class CellCache(PagedKVCache):
    """Real books and bytes, but a slot holds its digest unquantised, in the first unit of its block."""

    cells: NDArray[np.float16]

    def copy_block(self, source: int, destination: int, tokens: int, codec: Codec = FP16) -> None:
        self.cells[destination, :, :tokens] = self.cells[source, :, :tokens]
        self.spoil_rest(destination, codec)

    def spoil_rest(self, block: int, codec: Codec) -> None:
        """The block's other units are overwritten, too."""
        self.cells[block + 1 : block + self.pool_of(codec).span] = OVERWRITTEN


@dataclass
class CodecShadow(ShadowEngine):
    """Traffic in which each request draws its codec."""

    def make_cache(self) -> PagedKVCache:
        # Three layers of int4 are bytes enough for the cells of a block.
        geometry = KVGeometry(layers=3, kv_heads=1, head_dim=HEAD_DIM, block_tokens=self.block_tokens)
        smallest = CellCache.create(geometry, 1 << 20, INT4)
        cache = CellCache.create(geometry, self.blocks * INT4.blocks_per_extent * smallest.unit_bytes, INT4)
        smallest.close()
        return cache

    def make_prefix(self) -> PrefixCaches:
        return PrefixCaches(self.cache.pools, clock=lambda: self.now)

    def make_memory(self) -> NDArray[np.float16]:
        shape = (2, self.block_tokens, HEAD_DIM)
        units = self.cache.buffer.reshape(self.cache.units, self.cache.unit_bytes)
        cells = units[:, : 2 * int(np.prod(shape))].view(np.float16).reshape(self.cache.units, *shape)
        assert isinstance(self.cache, CellCache)
        assert np.shares_memory(cells, units)
        self.cache.cells = cells
        return cells

    def home(self, request: Request) -> Namespace:
        return replace(request.namespace, numerics=f"model in {request.codec.name}")

    def further_terms(self) -> dict[str, Any]:
        return {**super().further_terms(), "codec": self.random.choice(list(CODECS.values()))}

    def turn(self, source: int, destination: int, by: int, codec: Codec = FP16) -> None:
        self.turn_block(source, destination, by, codec)

    def put(self, plan: StepPlan, values: NDArray[np.float32]) -> None:
        told = [FP16.code] * len(plan.requests) if plan.codecs is None else plan.codecs.tolist()
        if told != [request.codec.code for request in plan.requests]:
            raise Fault(f"the plan says codecs {told} of requests {[request.codec.name for request in plan.requests]}")
        codecs = list(CODECS.values())
        self.seen["codecs together"] += len(set(told)) > 1
        rows = np.repeat(told, np.diff(plan.query_starts)).tolist()
        for slot, row, code in zip(plan.slots.tolist(), values, rows, strict=True):
            block, offset = divmod(slot, self.block_tokens)
            self.memory[block, :, offset] = row.reshape(2, HEAD_DIM)
            self.cache.spoil_rest(block, codecs[code])  # type: ignore[attr-defined] # a CellCache
            self.seen[f"written {codecs[code].name}"] += 1

    def step(self) -> None:
        """Extents change hands with what was cached in them, besides."""
        held = {pool: pool.held for pool in self.cache.pools.values()}
        cached = {pool: pool.cached for pool in self.cache.pools.values()}
        preempted = {request.codec for request in self.scheduler.running}
        super().step()
        self.seen["taken from another codec"] += any(
            pool.held < held[pool] and pool.cached < cached[pool] for pool in held
        ) and any(pool.held > held[pool] for pool in held)
        self.seen["codecs run together"] += len(preempted) > 1

    def check(self) -> None:
        """Guarantees of all codecs can be kept together: what was promised fits beside what is used."""
        super().check()
        guaranteed = self.scheduler._state.running.guaranteed
        pools = self.cache.pools.values()
        if guaranteed.total and not self.shed and not self.fences:
            if sum(pool.extents_for(guaranteed.of(pool)) for pool in pools) > self.cache.extents.common:
                raise Fault(f"guarantees {[guaranteed.of(pool) for pool in pools]} do not fit")
            self.seen["guaranteed beside other codecs"] += len({r.codec for r in self.scheduler.running}) > 1


@dataclass
class WindowedCodecShadow(CodecShadow, WindowedShadow):
    """The same with windows, some of which slide."""

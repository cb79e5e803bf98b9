"""Seeded faults: one plausible mistake each, planted into the real code by replacing one method.

The list is data: `FAULTS` maps a description to a function that plants the fault with pytest's monkeypatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.admission import Admission, NotNow
from hostcache.blocks import BlockPool
from hostcache.cache import PagedKVCache
from hostcache.decode_batch import DecodeBatch, DecodeRows
from hostcache.errors import RockpageError
from hostcache.lifecycle import Lifecycle
from hostcache.prefix import Namespace, PrefixCache, PrefixHit, PrefixNode
from hostcache.prefix_node import TOKEN_BYTES
from hostcache.request import FinishReason, Request
from hostcache.scheduler import Scheduler
from hostcache.step import StepPlan
from hostcache.table import BlockTable

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}


def replacing(owner: type, name: str, make: Callable[[Any], Any]) -> Plant:
    """A plant that replaces a method by `make(original)`."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def of_method(owner: type, name: str, description: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[description] = replacing(owner, name, make)
        return make

    return register


@of_method(BlockTable, "fork", "a fork takes no references")
def _(original: Any) -> Any:
    def fork(self: BlockTable) -> BlockTable:
        child = BlockTable(self._pool, self._copy)
        child.adopt(self.blocks, self.length)
        return child

    return fork


@of_method(BlockTable, "shared_tail", "a shared tail is written in place")
def _(original: Any) -> Any:
    return None


@of_method(PagedKVCache, "copy_block", "copy-on-write copies a token too few")
def _(original: Any) -> Any:
    return lambda self, source, destination, tokens: original(self, source, destination, tokens - 1)


@of_method(PagedKVCache, "copy_block", "copy-on-write copies the other way round")
def _(original: Any) -> Any:
    return lambda self, source, destination, tokens: original(self, destination, source, tokens)


@of_method(BlockPool, "release_all", "the first release frees a shared block")
def _(original: Any) -> Any:
    def release_all(self: BlockPool, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.refs[block] = min(self.refs[block], 1)
        original(self, blocks)

    return release_all


@of_method(Lifecycle, "_publish", "a block is published before it is full")
def _(original: Any) -> Any:
    def publish(self: Lifecycle, request: Request) -> None:
        computed, size = request.computed, self._block_tokens
        request.computed = min(-(-computed // size) * size, request.length // size * size)
        original(self, request)
        request.computed = computed

    return publish


@of_method(PrefixCache, "match", "a node's key leaves out its parent")
def _(original: Any) -> Any:
    def match(self: PrefixCache, namespace: Namespace, tokens: NDArray[np.int32]) -> PrefixHit:
        hit: PrefixHit = original(self, namespace, tokens)
        size = self._pool.block_tokens
        start = len(hit.blocks) * size
        text = tokens[start : start + size].tobytes()
        for block, node in self._by_block.items():
            if hit.partial < 0 and start + size < len(tokens) and node.tokens == text:
                self._pool.acquire(block)
                return PrefixHit([*hit.blocks, block], hit.node)
        return hit

    return match


@of_method(PrefixCache, "match", "a hit may cover the whole prompt")
def _(original: Any) -> Any:
    return lambda self, namespace, tokens: original(self, namespace, np.append(tokens, np.int32(9)))


@of_method(PrefixCache, "_match_partial", "a partial match counts a token too many")
def _(original: Any) -> Any:
    def match_partial(self: PrefixCache, node: PrefixNode, text: bytes) -> tuple[PrefixNode | None, int]:
        found, tokens = original(self, node, text)
        return found, min(tokens + 1, len(text) // TOKEN_BYTES) if found else 0

    return match_partial


@of_method(PrefixCache, "_evict", "an evicted node still claims its block")
def _(original: Any) -> Any:
    def evict(self: PrefixCache, oldest: int) -> int:
        node = self._by_block[oldest]
        original(self, oldest)
        node.block = oldest
        return oldest

    return evict


@of_method(PrefixCache, "_prune", "a node is removed while a sequence stands on it")
def _(original: Any) -> Any:
    def prune(self: PrefixCache, node: PrefixNode) -> None:
        holders, node.holders = node.holders, 0
        original(self, node)
        node.holders = holders

    return prune


@of_method(BlockPool, "raise_fence", "fences are ignored")
def _(original: Any) -> Any:
    def raise_fence(self: BlockPool, block: int) -> None:
        self._fences[block] += 0

    return raise_fence


@of_method(BlockPool, "lower_fence", "a fence is never lowered")
def _(original: Any) -> Any:
    return lambda self, block: None


@of_method(Namespace, "key", "the tenant's salt is not part of the key")
def _(original: Any) -> Any:
    return lambda self: (self.numerics + self.adapter + self.prompt_version).encode()


@of_method(Admission, "admit", "a preempted request goes on where it was instead of being recomputed")
def _(original: Any) -> Any:
    def admit(self: Admission, request: Request) -> NotNow | None:
        obstacle: NotNow | None = original(self, request)
        if obstacle is None and request.preemptions and request.remaining > 1:
            request.table.append(request.remaining - 1)
            request.computed = request.table.length
        return obstacle

    return admit


@of_method(Admission, "admit", "an admitted request counts a hit it did not get")
def _(original: Any) -> Any:
    def admit(self: Admission, request: Request) -> NotNow | None:
        obstacle: NotNow | None = original(self, request)
        if obstacle is None and request.remaining > 1:
            request.table.append(1)
            request.computed += 1
        return obstacle

    return admit


@of_method(Lifecycle, "take_back", "a rolled back step keeps its slots")
def _(original: Any) -> Any:
    def take_back(self: Lifecycle, requests: Sequence[Request]) -> None:
        for request in requests:
            request.in_flight = False
            if request.doomed is not None:
                self._finish(request, request.doomed)

    return take_back


@of_method(BlockTable, "truncate", "truncation forgets to give blocks back")
def _(original: Any) -> Any:
    def truncate(self: BlockTable, length: int) -> None:
        del self.blocks[-(-length // self._pool.block_tokens) :]
        self.length = length

    return truncate


@of_method(Lifecycle, "end", "an abort frees blocks that the step in flight still writes")
def _(original: Any) -> Any:
    def end(self: Lifecycle, request: Request, reason: FinishReason, error: RockpageError | None = None) -> None:
        if not request.finished:
            self._finish(request, reason)

    return end


@of_method(DecodeBatch, "rows", "a decode slot is off by one")
def _(original: Any) -> Any:
    def rows(self: DecodeBatch, requests: list[Request]) -> DecodeRows:
        found: DecodeRows = original(self, requests)
        found.slots[:] = np.maximum(found.slots - 1, 0)
        return found

    return rows


@of_method(DecodeBatch, "table_changed", "the arrays of a sequence that decodes miss its new block")
def _(original: Any) -> Any:
    return lambda self, request: None


@of_method(DecodeBatch, "remove", "the arrays of those behind one that ends stay where they were")
def _(original: Any) -> Any:
    def remove(self: DecodeBatch, request: Request) -> None:
        del self.requests[self._place(request)]

    return remove


@of_method(BlockTable, "_replace_tail", "copy-on-write forgets the array of ids")
def _(original: Any) -> Any:
    def replace_tail(self: BlockTable, fresh: int) -> None:
        stale = int(self._ids[len(self.blocks) - 1])
        original(self, fresh)
        self._ids[len(self.blocks) - 1] = stale

    return replace_tail


@of_method(Scheduler, "fork", "a fork does not hold its node")
def _(original: Any) -> Any:
    def fork(self: Scheduler, parent: Request) -> Request:
        child: Request = original(self, parent)
        assert child.node is not None
        child.node.holders -= 1
        return child

    return fork


@of_method(PrefixHit, "__init__", "a hit loses its last block but keeps its node")
def _(original: Any) -> Any:
    def init(self: PrefixHit, blocks: list[int], *rest: Any) -> None:
        original(self, blocks[:-1], *rest)

    return init


@of_method(Scheduler, "schedule", "the newest request is computed in place of the admitted one")
def _(original: Any) -> Any:
    def schedule(self: Scheduler) -> StepPlan:
        plan: StepPlan = original(self)
        if len(plan.chunks) > 1:
            plan.tables[-1] = plan.tables[0]  # a plan's arrays are its own, and may be spoilt
        return plan

    return schedule

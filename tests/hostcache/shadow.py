"""A shadow of the pool: every physical slot remembers the exact tokens it was computed for.

No model runs. The K and V written for a token encode a digest of all that they depend on, into the real region through
the real write path. Before a step "attends", every slot it would read is compared with the digest of the tokens it
should have been computed for. So stale, foreign, misplaced or lost KV is seen whatever caused it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostcache.blocks import BlockPool
from hostcache.cache import PagedKVCache
from hostcache.codec import CODECS, FP16, Codec
from hostcache.errors import RequestFailed, RequestRefused
from hostcache.fence import Fence
from hostcache.geometry import KVGeometry
from hostcache.prefix import Namespace, PrefixCache
from hostcache.prefix_caches import PrefixCaches
from hostcache.region import Region
from hostcache.request import FinishReason, Request, RequestState
from hostcache.scheduler import Scheduler, SchedulerConfig
from hostcache.step import Chunk, StepPlan
from hostcache.swap import SwapSpace
from tests.hostcache.slot_identity import DIGEST_VALUES, HEAD_DIM, KEY_POSITION, Fault, View, digest_rows, values_of

__all__ = ["DIGEST_VALUES", "HEAD_DIM", "NAMESPACES", "OWNER", "Fault", "ShadowEngine", "digest_rows", "values_of"]

OWNER = "shadow"  # of all pins
NAMESPACES = (Namespace("model"), Namespace("model", salt="tenant"), Namespace("model", prompt_version="2"))


@dataclass
class HeldFence:
    """A fence with a copy of what its blocks held: nothing may change until it is released."""

    fence: Fence
    blocks: list[int]
    content: NDArray[np.uint8]
    steps: int


@dataclass
class ShadowEngine:
    """Drives a scheduler with random traffic and checks every slot before it is read."""

    seed: int
    block_tokens: int = 4
    blocks: int = 16
    prefix_cache: Callable[[BlockPool], PrefixCache] = PrefixCache
    now: float = field(default=0.0, init=False)
    random: random.Random = field(init=False)
    digests: dict[int, list[bytes]] = field(default_factory=dict, init=False)
    views: dict[int, View] = field(default_factory=dict, init=False)
    fences: list[HeldFence] = field(default_factory=list, init=False)
    live: list[Request] = field(default_factory=list, init=False)
    seen: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.cache = self.make_cache()
        self.prefix = self.make_prefix()
        swap_blocks = self.random.choice((0, 0, 2, 40))
        block_bytes = self.cache.unit_bytes * self.cache.extents.units
        self.swap = self.swap_space(swap_blocks * block_bytes) if swap_blocks else None
        config = SchedulerConfig(
            max_rows=self.random.choice((8, 16, 40)),
            max_sequences=self.random.choice((1, 3, 8)),
            prefill_chunk=self.random.choice((1, 3, 4, 7, 64)),
            step_seconds=self.random.choice((None, 0.01)),
            ageing_seconds=self.random.choice((0.1, 30.0)),
            max_waiting=6,
            max_skips=self.random.choice((0, 1, 4)),
            max_preemptions=self.random.choice((0, 1, 2, 8)),
            max_dedup_steps=self.random.choice((0, 3, 128)),
            **self.further_limits(),
        )
        self.scheduler = Scheduler(
            self.cache, self.prefix, config, clock=lambda: self.now, swap=self.swap, turn=self.turn
        )
        self.shed: set[int] = set()  # requests that gave way to somebody outside
        self.memory = self.make_memory()

    def make_cache(self) -> PagedKVCache:
        geometry = KVGeometry(layers=1, kv_heads=1, head_dim=HEAD_DIM, block_tokens=self.block_tokens)
        return PagedKVCache(geometry, Region.anonymous(self.blocks * geometry.block_bytes))

    def make_prefix(self) -> PrefixCache | PrefixCaches:
        return self.prefix_cache(self.cache.pool)

    def make_memory(self) -> NDArray[np.float16]:
        """What slots hold, by block id: `[ids, k|v, block_tokens, HEAD_DIM]`."""
        return self.cache.buffer.view(np.float16).reshape(self.blocks, 2, self.block_tokens, HEAD_DIM)

    def home(self, request: Request) -> Namespace:
        """What the request's KV depends on besides its tokens."""
        return request.namespace

    def further_limits(self) -> dict[str, Any]:
        """Of the scheduler: those that are not the same in all traffic."""
        return {"context_length": self.blocks * self.block_tokens + 8}

    def further_terms(self) -> dict[str, Any]:
        """Of a request, likewise; arguments of `submit`."""
        return {"max_tokens": self.random.randint(1, 30)}

    def view(self, request: Request) -> View:
        """What the request's tokens see."""
        return self.views.get(request.id) or View(None, 0, 0, slides=False, block_tokens=self.block_tokens)

    def turn(self, source: int, destination: int, by: int) -> None:
        """Turn a block's keys: what was told to stay where it is must not be written to."""
        self.turn_block(source, destination, by, FP16)

    def turn_block(self, source: int, destination: int, by: int, codec: Codec) -> None:
        if source == destination or not self.cache.pool_of(codec).writable(destination):
            raise Fault(f"block {source} is turned into block {destination}, which is not the table's own")
        self.cache.copy_block(source, destination, self.block_tokens, codec)
        self.memory[destination, 0, :, KEY_POSITION] += by
        self.seen["turned"] += 1

    def swap_space(self, nbytes: int) -> SwapSpace:
        """Where preempted requests leave their blocks."""
        return SwapSpace(nbytes, self.cache, clock=lambda: self.now)

    def run(self, steps: int) -> None:
        """`steps` rounds of random events, a step, and every check; then everything ends and nothing is left."""
        for _ in range(steps):
            self.random_event()
            self.step()
            self.check()
        for request in self.live:
            self.scheduler.end(request, FinishReason.ABORTED)
        for held in self.fences:
            held.fence.release()
        self.fences.clear()
        self.prefix.unpin(OWNER)
        self.check()
        for pool in self.cache.pools.values():
            if pool.used or pool.fenced or (self.swap and self.swap.used):
                raise Fault(f"{pool.used} blocks used, {pool.fenced} fenced, or swapped, after every request has ended")
        self.prefix.invalidate()
        for pool in self.cache.pools.values():
            if pool.free != pool.total or self.prefix.of(pool.codec).nodes:
                raise Fault(f"{pool.free} of {pool.total} blocks free after everything was forgotten")

    def random_event(self) -> None:
        draw = self.random.random()
        self.now += self.random.choice((0.0, 0.01, 0.2))
        if draw < 0.45:
            self.submit()
        elif draw < 0.52 and self.live:
            self.abort("between steps")
        elif draw < 0.60:
            self.fork()
        elif draw < 0.61:
            self.invalidate()
        elif draw < 0.66:
            self.hold_fence()
        elif draw < 0.67:
            self.shed_lowest()
        elif draw < 0.69:
            self.pause_or_resume()

    def submit(self) -> None:
        """A prompt over two tokens and few lengths: beginnings coincide all the time."""
        length = self.random.randint(1, self.random.choice((4, 9, 30, self.blocks * self.block_tokens + 4)))
        tokens = np.array([self.random.choice((0, 0, 0, 1)) for _ in range(length)], dtype=np.int32)
        waiting, terms = len(self.scheduler.waiting), self.further_terms()
        try:
            request = self.scheduler.submit(
                tokens,
                self.random.choice(NAMESPACES),
                priority=self.random.choice((0, 0, 0, 1, 2)),
                client=self.random.choice("abc"),
                deadline=self.now + 2 if self.random.random() < 0.1 else None,
                max_queue_seconds=1.0 if self.random.random() < 0.1 else None,
                **terms,
            )
        except RequestRefused:
            self.seen["refused, queue full" if waiting >= 6 else "refused"] += 1
            return
        self.begin(request, terms)
        for _ in range(self.random.choice((0, 0, 0, 0, 0, 1, 3))):
            try:
                self.begin(self.scheduler.branch(request), terms)
            except RequestRefused:
                self.seen["refused, a branch"] += 1

    def begin(self, request: Request, terms: dict[str, Any]) -> None:
        self.digests[request.id] = []
        self.views[request.id] = self.view_of(terms)
        self.live.append(request)

    def view_of(self, terms: dict[str, Any]) -> View:
        """What a request sees that was submitted on such terms."""
        config, window = self.scheduler.config, terms.get("window")
        tokens, sinks = (window.tokens, window.sinks) if window else (config.model_window or None, 0)
        return View(tokens, sinks, config.context_length, terms.get("slide", False), self.block_tokens)

    def invalidate(self) -> None:
        self.seen["invalidated"] += self.prefix.invalidate(namespace=self.random.choice(NAMESPACES)) > 0

    def shed_lowest(self) -> None:
        """Somebody outside needs memory."""
        request = self.scheduler.shed_lowest()
        if request is not None:
            self.shed.add(request.id)
            self.seen["shed"] += 1

    def pause_or_resume(self) -> None:
        if self.scheduler.pause_reason:
            self.scheduler.resume_admission()
        else:
            self.scheduler.pause_admission("memory is short")
            self.seen["paused"] += 1

    def abort(self, when: str) -> None:
        request = self.random.choice(self.live)
        self.seen[f"aborted {'swapped' if request.swapped else request.state.value} {when}"] += 1
        self.seen["aborted before it was branched off"] += request.leader is not None
        self.seen["aborted before its branches"] += bool(request.branches)
        self.scheduler.end(request, FinishReason.ABORTED)

    def fork(self) -> None:
        if self.scheduler.running:
            parent = self.random.choice(self.scheduler.running)
            try:
                child = self.scheduler.fork(parent)
            except RequestRefused:
                self.seen["refused, a fork"] += 1
                return
            self.digests[child.id] = list(self.digests[parent.id])
            self.views[child.id] = self.view(parent)
            self.live.append(child)
            self.seen[f"forked, {child.state.value}"] += 1

    def hold_fence(self) -> None:
        """Pretend that an asynchronous copy reads some sequence's blocks for a few steps."""
        readable = [request for request in self.scheduler.running if request.computed]
        if readable and len(self.fences) < 2:
            request = self.random.choice(readable)
            full = request.table.blocks[: request.table.held // self.block_tokens]
            if full:
                fence = request.pool.fence(full)
                self.fences.append(HeldFence(fence, list(full), self.memory[full].copy().view(np.uint8), 3))

    def step(self) -> None:
        plan = self.scheduler.schedule(self.drafts())
        if not plan.rows:
            return
        self.check_reads(plan)
        self.write(plan)
        if self.random.random() < 0.05 and self.live:
            self.abort("in flight")
        if self.random.random() < 0.03:
            self.scheduler.rollback(plan)
            self.seen["rolled back"] += 1
            return
        tokens = self.sampled(plan)
        stops = [self.random.random() < 0.02 for _ in tokens]
        seconds = 0.004 + 0.0005 * plan.rows + 1e-6 * plan.attended
        self.scheduler.commit(plan, tokens, stops, seconds=seconds)
        self.now += seconds

    def check_reads(self, plan: StepPlan) -> None:
        """Everything that attention would read besides this step's own rows."""
        for index, chunk in enumerate(plan.chunks):
            request = chunk.request
            self.check_slots(plan, index, chunk)
            if chunk.start + chunk.count - chunk.drafted > request.length or chunk.count < 1:
                raise Fault(f"request {request.id} computes {chunk.start}+{chunk.count} of {request.length} tokens")
            if chunk.samples != (chunk.start + chunk.count - chunk.drafted == request.length):
                raise Fault(f"request {request.id} samples before its last token")
            self.seen["hit"] += bool(request.hit_tokens)

    def check_slots(self, plan: StepPlan, index: int, chunk: Chunk) -> None:
        """The rows' positions, what they are told to see, and what lies there."""
        request, view = chunk.request, self.view(chunk.request)
        view.check_rows(plan, index, chunk.start, chunk.start + chunk.count)
        told = (0, 0) if plan.windows is None or plan.sinks is None else (plan.windows[index], plan.sinks[index])
        # The model knows its own window.
        if told != ((0, 0) if self.scheduler.config.model_window or view.window is None else (view.window, view.sinks)):
            raise Fault(f"request {request.id} sees {told}, not {view}")
        digests = digest_rows(self.home(request), request.tokens, self.digests[request.id], view)
        view.check_slots(self.memory, plan.tables[index], chunk.start, digests)

    def write(self, plan: StepPlan) -> None:
        """Write this step's K and V where the plan says, and check that nobody else reads there."""
        digests = [digest for chunk in plan.chunks for digest in self.digests_of(chunk)]
        values = values_of(digests, plan.positions)
        expected = np.concatenate(
            [chunk.request.buffer[chunk.start : chunk.start + chunk.count] for chunk in plan.chunks]
        )
        if not np.array_equal(plan.tokens, expected) or len(set(plan.slots.tolist())) != plan.rows:
            raise Fault("the plan's rows are not the chunks' tokens, or two rows share a slot")
        codecs = np.zeros(plan.rows, np.uint8) if plan.row_codecs is None else plan.row_codecs
        for block, code in set(zip((plan.slots // self.block_tokens).tolist(), codecs.tolist(), strict=True)):
            if not self.cache.pool_of(list(CODECS.values())[code]).writable(block):
                raise Fault(f"block {block} is written while it is shared or kept")
        self.put(plan, values)

    def put(self, plan: StepPlan, values: NDArray[np.float32]) -> None:
        """Write `values`, `[rows, 2 * HEAD_DIM]`, into the plan's slots."""
        keys, second = values[:, None, :HEAD_DIM], values[:, None, HEAD_DIM:]
        self.cache.write(0, plan.slots, np.ascontiguousarray(keys), np.ascontiguousarray(second))

    def digests_of(self, chunk: Chunk) -> list[bytes]:
        """Of a chunk's tokens, what was proposed included: that is forgotten again."""
        request, stop = chunk.request, chunk.start + chunk.count
        known = list(self.digests[request.id][: request.length])
        view = self.view(request)
        return digest_rows(self.home(request), request.buffer[:stop], known, view)[chunk.start : stop]

    def sampled(self, plan: StepPlan) -> list[int]:
        """The next token of each row that gives one."""
        ahead: Counter[int] = Counter()
        tokens = []
        for request in plan.sampling:
            tokens.append(self.next_token(request, ahead[request.id]))
            ahead[request.id] += 1
        return tokens

    def drafts(self) -> dict[Request, NDArray[np.int32]]:
        """Guesses at what follows, of which many are right; for some requests that do not decode, too."""
        if self.random.random() < 0.5:
            return {}
        lengths = {request: self.random.randint(0, 6) for request in self.live if self.random.random() < 0.7}
        return {
            request: np.array([self.random.random() < 0.1 for _ in range(length)], np.int32)
            for request, length in lengths.items()
        }

    def next_token(self, request: Request, ahead: int = 0) -> int:
        """A function of the whole prefix, read back from the last slot: wrong KV gives wrong text."""
        block, offset = divmod(request.table.slot(request.length - 1 + ahead), self.block_tokens)
        return int(self.memory[block, 0, offset, 0]) % 8 == 0

    def check(self) -> None:
        """Conservation, the tree, the references, the limit, and the fences."""
        most = self.scheduler.config.max_sequences
        if len(self.scheduler.running) > most:
            raise Fault(f"{len(self.scheduler.running)} sequences run, {most} may")
        self.cache.extents.check()
        self.prefix.check()
        for pool in self.cache.pools.values():
            self.check_pool(pool)
        nodes = Counter(id(request.node) for request in self.scheduler.running)
        for request in self.scheduler.running:
            assert request.node is not None
            if request.node.holders != nodes[id(request.node)]:
                raise Fault(f"node {request.node.number} has {request.node.holders} holders")
        for held in self.fences:
            held.steps -= 1
            if not np.array_equal(self.memory[held.blocks].view(np.uint8), held.content):
                raise Fault("a fenced block changed while it was being read")
            if held.steps == 0:
                held.fence.release()
        self.fences = [held for held in self.fences if held.steps]
        if self.swap is not None:
            self.swap.check()
            left = sum(r.swapped.ticket.blocks * r.pool.span for r in self.live if r.swapped)
            if self.swap.used != left:
                raise Fault(f"{self.swap.used} units are swapped out, for requests that left {left}")
        self.check_promises()
        for request in self.live:
            self.check_end(request)
        self.live = [request for request in self.live if not request.finished]

    def check_pool(self, pool: BlockPool) -> None:
        """Every block in one state, and as many references as there are tables and pins."""
        counts = pool.free, pool.cached, pool.fenced, pool.withheld, pool.used, pool.elsewhere
        if sum(counts) != pool.total:
            raise Fault(f"the pool's counts do not add up: {counts} of {pool.total}")
        tables = [request.table.blocks for request in self.scheduler.running if request.pool is pool]
        holders = Counter(block for blocks in tables for block in blocks)
        holders.update(self.prefix.of(pool.codec).pinned_blocks())
        if dict(holders) != {block: refs for block, refs in enumerate(pool.refs) if refs}:
            raise Fault(f"references {pool.refs} do not match the tables {dict(holders)}")

    def check_promises(self) -> None:
        """Each running request is promised what it needs; and nobody loses its blocks more often than may be."""
        running, config = self.scheduler._state.running, self.scheduler.config
        promised = {request.id: request.promised for request in self.scheduler.running}
        for request in self.scheduler.running:
            length = request.length
            guaranteed = request.preemptions >= config.max_preemptions
            if guaranteed:
                need = self.blocks_to_come(request, request.most_computed)
            else:
                need = self.blocks_to_come(request, length) if length - request.computed > 1 else 0
            if self.view(request).window is not None and promised[request.id] > need:
                self.seen["promised what was shared with the prefix cache"] += 1
            elif not need <= promised[request.id] <= need + 1:  # by now it may need no copy of its tail any more
                raise Fault(f"request {request.id} needs {need} blocks and was promised {promised[request.id]}")
            self.seen["guaranteed"] += guaranteed and config.max_preemptions > 0
        if running.promised.total != sum(promised.values()):
            raise Fault(f"promises {promised} do not add up to {running.promised.total}")
        for request in self.live:
            if request.preemptions > config.max_preemptions and request.id not in self.shed:
                raise Fault(f"request {request.id} lost its blocks {request.preemptions} times")

    def blocks_to_come(self, request: Request, tokens: int) -> int:
        """Blocks that a running request's table may need until it has so many tokens; a window gives some back."""
        table, view, config = request.table, self.view(request), self.scheduler.config
        need = min(table.blocks_needed(tokens - table.length), request.pool.total - len(table.blocks))
        if view.window is None:
            return need
        chunk = min(config.prefill_chunk, config.max_rows)
        front, size = view.front // self.block_tokens, self.block_tokens
        most = front + -(-(view.window + chunk) // size) + 1 + view.slides - len(table.blocks)
        if request.preemptions >= config.max_preemptions:
            # Others may hold what it has published, or will, before the gap begins: that does not come back.
            most += sum(request.pool.is_kept(block) for block in table.blocks[front:])
            if not table.gap.tokens:
                published = view.window + (view.front + size - 1 + chunk if config.model_window else 0)
                most += max(0, published // size - max(front, request.published))
        return max(0, min(need, most))

    def check_end(self, request: Request) -> None:
        if not request.finished:
            waits = request.state in {RequestState.WAITING, RequestState.PREEMPTED}
            if waits and (request.table.blocks or request.node is not None):
                raise Fault(f"request {request.id} waits and holds blocks")
            return
        self.seen[f"finished {request.finish_reason.value if request.finish_reason else None}"] += 1
        if request.table.blocks or request.node is not None:
            raise Fault(f"request {request.id} has ended and still holds blocks")
        if (request.finish_reason is FinishReason.FAILED) != isinstance(request.error, RequestFailed):
            raise Fault(f"request {request.id} ended {request.finish_reason} with error {request.error!r}")
        del self.digests[request.id]
        self.views.pop(request.id, None)

"""Resident copies against a full gather, byte for byte as the device sees them, whatever happens to the tables."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from numpy.typing import NDArray

from hostcache import BlockTable, KVGeometry, PagedKVCache, Region
from hostcache.errors import DeviceError
from staging import GatherPlan, Residency, ResidentCopy, StagingBuffer
from tests.staging.flat import flat, marked, plan_of, tiles

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, block_tokens=4)
BLOCKS = 14
OFFSET = 4096  # the copies lie behind something else
MEMORY = 10 * 4096  # enough for some copies, not for all
SMALL, LARGE = 16, 44  # tokens of the buckets
OWN_TOKENS = 1


@dataclass
class ShadowMemory:
    """A device that has its own bytes, and now and then refuses to take some over."""

    memory: NDArray[np.uint8]

    def __post_init__(self) -> None:
        self.seen = np.full(OFFSET + len(self.memory), 0xFF, np.uint8)
        self.refuse_after = -1  # that many syncs; below 0: never

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        if self.refuse_after == 0:
            raise DeviceError("refused on purpose")
        self.refuse_after -= 1
        assert offset >= OFFSET
        self.seen[offset : offset + nbytes] = self.memory[offset - OFFSET : offset - OFFSET + nbytes]

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        raise NotImplementedError


@dataclass
class Decode:
    """One launch of a step."""

    tables: list[list[int]]
    lengths: list[int]
    plan: GatherPlan
    copy: ResidentCopy | None


class CopiesAgainstGather(RuleBasedStateMachine):
    """Every token's K and V are random numbers of their own, so whatever is stale, foreign or misplaced is seen."""

    tiled = False

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)
        self.cache = PagedKVCache(GEOMETRY, Region.anonymous(BLOCKS * GEOMETRY.block_bytes))
        memory = np.full(MEMORY, 0xEE, np.uint8)
        self.device = ShadowMemory(memory)
        self.residency = Residency(self.cache, memory, OFFSET, self.device, OWN_TOKENS)
        self.tables: list[BlockTable] = []
        self.patch = mock.patch("staging.resident_buffer._WORTH_A_SYNC", 0)  # buffers are small: each range counts
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()

    def write(self, layer: int, tables: list[BlockTable], new: int) -> None:
        """K and V of the last `new` tokens of each table, in one call, as a step does."""
        slots = np.concatenate([table.slots(table.length - new, table.length) for table in tables])
        shape = (2, len(slots), GEOMETRY.kv_heads, GEOMETRY.head_dim)
        keys, values = self.random.standard_normal(shape, np.float32)
        self.cache.write(layer, slots, keys, values)

    def may_grow(self, tables: list[BlockTable], count: int) -> bool:
        if any(table.length + count > LARGE - OWN_TOKENS for table in tables):
            return False
        return sum(table.blocks_needed(count) for table in tables) <= self.cache.pool.available

    # --- what happens to tables ---------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tables) < 4)
    @rule(count=st.integers(1, 20))
    def new(self, count: int) -> None:
        self.tables.append(self.cache.table())
        self.prefill_last(count)

    @precondition(lambda self: len(self.tables) < 4)
    @rule(count=st.integers(1, 20))
    def restore(self, count: int) -> None:
        """A sequence comes back from a file or from swap: whole blocks are overwritten."""
        if self.may_grow([table := self.cache.table()], count):
            table.append(count)
            self.tables.append(table)
            for index, block in enumerate(table.blocks):
                content = self.random.integers(0, 128, GEOMETRY.block_bytes, np.uint8)
                tokens = min(GEOMETRY.block_tokens, count - index * GEOMETRY.block_tokens)
                self.cache.overwrite(block, content, tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 9))
    def prefill(self, data: st.DataObject, count: int) -> None:
        """A chunk of a prompt, which is attended elsewhere."""
        self.tables.append(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))
        self.prefill_last(count)

    def prefill_last(self, count: int) -> None:
        if self.may_grow(self.tables[-1:], count):
            self.tables[-1].append(count)
            for layer in range(GEOMETRY.layers):
                self.write(layer, self.tables[-1:], count)

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.tables.append(data.draw(st.sampled_from(self.tables)).fork())

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 9))
    def truncate(self, data: st.DataObject, count: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        table.truncate(max(0, table.length - count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """All blocks go back; the table may grow again, over any blocks."""
        data.draw(st.sampled_from(self.tables)).release()

    @precondition(lambda self: any(table.blocks for table in self.tables))
    @rule(data=st.data())
    def keep_or_forget(self, data: st.DataObject) -> None:
        """As the prefix cache does. A forgotten tail may be written on, over what its first owner wrote."""
        block = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table.blocks})))
        pool = self.cache.pool
        (pool.forget if pool.is_kept(block) else pool.keep)(block)

    @precondition(lambda self: len(self.tables) < 4)
    @rule(data=st.data(), tokens=st.integers(1, GEOMETRY.block_tokens))
    def hit(self, data: st.DataObject, tokens: int) -> None:
        """A table begins with a block that is kept, or with a part of it."""
        pool, size = self.cache.pool, GEOMETRY.block_tokens
        full = {block for table in self.tables for block in table.blocks[: table.length // size]}
        if found := sorted(filter(pool.is_kept, full)):
            block = data.draw(st.sampled_from(found))
            pool.acquire(block)
            self.tables.append(self.cache.table())
            self.tables[-1].adopt([block], tokens)

    # --- steps --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def decode(self, data: st.DataObject, steps: int) -> None:
        some = st.lists(st.sampled_from(self.tables), min_size=1, unique_by=id)
        chosen = data.draw(st.just(list(self.tables)) | some)  # most often all go on
        cut = data.draw(st.integers(0, len(chosen)))
        for _ in range(steps):
            self.step(data, chosen, cut)

    def step(self, data: st.DataObject, chosen: list[BlockTable], cut: int) -> None:
        """Sequences decode a token, in one launch or two; a step that fails is rolled back."""
        if not self.may_grow(chosen, 1):
            return
        for table in chosen:
            table.append(1)
        self.residency.begin_step()
        launches = [self.plan(group) for group in (chosen[:cut], chosen[cut:]) if group]
        self.device.refuse_after = data.draw(st.integers(-30, 8))
        try:
            for layer in range(GEOMETRY.layers):
                self.write(layer, chosen, 1)
                by_host = data.draw(st.integers(0, 9))  # mostly none
                self.attend([launch for index, launch in enumerate(launches) if index != by_host], layer)
        except DeviceError:
            for table in chosen:
                table.truncate(table.length - 1)
        self.device.refuse_after = -1

    def plan(self, group: list[BlockTable]) -> Decode:
        """Batches are padded to 1, 2 or 4 by the first token of the first sequence."""
        padding = (0, 0, 0, 1)[len(group) - 1]
        tables = [list(table.blocks) for table in [*group, *group[:1] * padding]]
        lengths = [*(table.length for table in group), *[1] * padding]
        tokens = SMALL if max(lengths) <= SMALL - OWN_TOKENS else LARGE
        plan = plan_of(self.cache, tables, lengths, tokens, tiled=self.tiled)
        numbers = np.array(lengths, np.int32)
        return Decode(tables, lengths, plan, self.residency.lend(plan, numbers, numbers - 1))

    def attend(self, launches: list[Decode], layer: int) -> None:
        """All launches are in flight together, and each must find what a full gather gives."""
        with ExitStack() as stack:
            flying = [(launch, self.start(launch, layer, stack)) for launch in launches]
            for launch, started in flying:
                if started is not None:
                    self.check(launch, layer, *started)

    def start(self, decode: Decode, layer: int, stack: ExitStack) -> tuple[StagingBuffer, NDArray[np.int64]] | None:
        """Fill, write what a caller writes, sync; the buffer comes back with the stack."""
        buffer = None if decode.copy is None else decode.copy.acquire(layer)
        if buffer is None:
            return None
        stack.callback(buffer.release)
        buffer.fill(self.cache, decode.plan, layer)
        own = self.random.integers(0, 2048, 3)
        for operand, number in zip((buffer.keys, buffer.values), own, strict=False):
            decode.plan.layout.by_token(operand)[:, -OWN_TOKENS:] = number
        buffer.query[...] = own[2]
        buffer.sync_to_device()
        return buffer, own

    def check(self, decode: Decode, layer: int, buffer: StagingBuffer, own: NDArray[np.int64]) -> None:
        """The device's bytes are those of a gather that knows nothing of copies."""
        layout = decode.plan.layout
        start = buffer.memory.__array_interface__["data"][0] - self.device.memory.__array_interface__["data"][0]
        seen = self.device.seen[OFFSET + start :][: layout.nbytes]
        keys, values = flat(self.cache, decode.tables, decode.lengths, layout.tokens, layer)
        keys = marked(keys, decode.lengths)
        for offset, operand, number in ((layout.keys_offset, keys, own[0]), (layout.values_offset, values, own[1])):
            operand.view(np.float16)[:, -OWN_TOKENS:] = number
            expected = np.ascontiguousarray(tiles(operand) if self.tiled else operand).view(np.uint8).ravel()
            np.testing.assert_array_equal(seen[offset : offset + len(expected)], expected)
        query = seen[layout.query_offset :].view(np.float16)[: buffer.query.size]
        np.testing.assert_array_equal(query, np.float16(own[2]))


class TiledCopiesAgainstGather(CopiesAgainstGather):
    tiled = True


TestCopiesAgainstGather = CopiesAgainstGather.TestCase
TestCopiesAgainstGather.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTiledCopiesAgainstGather = TiledCopiesAgainstGather.TestCase
TestTiledCopiesAgainstGather.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

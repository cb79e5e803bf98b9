"""Which copies stay, what is copied into them, and what of it the device is told."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hostcache import BlockTable, KVGeometry, PagedKVCache, Region
from hostcache.errors import DeviceError, RegionError, WrongState
from staging import BufferState, GatherPlan, Residency, ResidentCopy, StagingBuffer, StagingLayout
from tests.staging.flat import PAGE, MemoryLog, flat, plan_of

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=128)
TOKENS = 256  # of the bucket: K of a head is 256 * 136 * 2 = 69,632 bytes, V 65,536
OWN_TOKENS = 1


class World:
    """One cache, its residency, and a device that remembers what it was told."""

    def __init__(self, pages: int = 400, blocks: int = 64) -> None:
        self.cache = PagedKVCache.create(GEOMETRY, blocks * GEOMETRY.block_bytes)
        self.device = MemoryLog()
        self.residency = Residency(self.cache, np.zeros(pages * PAGE, np.uint8), 0, self.device, OWN_TOKENS)
        self.random = np.random.default_rng(1)

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Append tokens and write them in every layer."""
        table.append(tokens)
        for layer in range(GEOMETRY.layers):
            rows = self.random.standard_normal((2, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim), np.float32)
            self.cache.write(layer, table.slots(table.length - tokens, table.length), *rows)

    def table(self, tokens: int) -> BlockTable:
        table = self.cache.table()
        self.grow(table, tokens)
        return table

    def plan(self, *tables: BlockTable, tokens: int = TOKENS) -> GatherPlan:
        return plan_of(self.cache, [table.blocks for table in tables], [table.length for table in tables], tokens)

    def lend(self, *tables: BlockTable, tokens: int = TOKENS) -> tuple[GatherPlan, ResidentCopy | None]:
        plan = self.plan(*tables, tokens=tokens)
        lengths = np.array([table.length for table in tables], np.int32)
        return plan, self.residency.lend(plan, lengths, lengths - 1)

    def step(self, *tables: BlockTable, layers: tuple[int, ...] = (0, 1), tokens: int = TOKENS) -> None:
        """One launch, in some layers; every buffer must then hold what a gather gives."""
        self.residency.begin_step()
        plan, copy = self.lend(*tables, tokens=tokens)
        assert copy is not None
        for layer in layers:
            buffer = copy.acquire(layer)
            assert buffer is not None
            try:
                buffer.fill(self.cache, plan, layer)
                buffer.sync_to_device()
                self.check(buffer, layer, *tables)
            finally:
                buffer.release()

    def check(self, buffer: StagingBuffer, layer: int, *tables: BlockTable) -> None:
        expected = flat(self.cache, [t.blocks for t in tables], [t.length for t in tables], buffer.layout.tokens, layer)
        for operand, wanted in zip((buffer.keys, buffer.values), expected, strict=True):
            bits = operand[..., : GEOMETRY.head_dim].view(np.uint16)
            np.testing.assert_array_equal(bits[:, :-OWN_TOKENS], wanted[:, :-OWN_TOKENS])

    @property
    def counts(self) -> tuple[int, int]:
        return self.residency.counts.grown, self.residency.counts.whole


def test_a_sequence_that_grows_is_gathered_once_and_then_grows() -> None:
    world = World()
    table = world.table(40)
    world.step(table)
    assert world.counts == (0, 2)  # two layers
    for _ in range(30):  # over two block boundaries
        world.grow(table, 1)
        world.step(table)
    assert world.counts == (60, 2)


def test_one_token_more_tells_the_device_of_one_row_a_head_the_callers_own_and_the_rest() -> None:
    """K has 272 bytes a token (128 channels and 8 marks), V 256. Token 40 is new, token 255 the caller's."""
    world = World()
    table = world.table(40)
    world.step(table)
    world.grow(table, 1)
    world.device.synced.clear()
    world.step(table, layers=(0,))
    values = 2 * 256 * 272
    query = values + 2 * 256 * 256
    keys_rows = [(head * 256 + token) * 272 for head in (0, 1) for token in (40, 255)]
    values_rows = [values + (head * 256 + token) * 256 for head in (0, 1) for token in (40, 255)]
    # A head's last row and the next one's new row are 41 tokens apart, too far to be told at once; the last row of V
    # borders on the query, behind which all is told.
    layout = StagingLayout(1, 2, 256, 4, 128, 0)
    assert layout.query_offset == query
    expected = [("to", start, 272) for start in keys_rows] + [("to", start, 256) for start in values_rows[:-1]]
    expected.append(("to", values_rows[-1], layout.nbytes - values_rows[-1]))
    assert world.device.synced == expected


def test_tiles_are_told_strip_by_strip_or_as_one_where_they_lie_close() -> None:
    """A strip of 8 channels is 16 bytes a token: 4 KB from one to the next in 256 tokens, 64 KB in 4096."""
    for tokens, ranges in ((256, 1), (4096, 2 * (17 + 16) + 1)):
        cache = PagedKVCache.create(GEOMETRY, 8 * GEOMETRY.block_bytes)
        device = MemoryLog()
        residency = Residency(cache, np.zeros(2 << 24, np.uint8), 0, device, OWN_TOKENS)
        table = cache.table()
        table.append(20)
        for _ in range(2):
            residency.begin_step()
            plan = plan_of(cache, [table.blocks], [table.length], tokens, tiled=True)
            copy = residency.lend(plan, *np.array([[table.length], [table.length - 1]], np.int32))
            assert copy is not None
            buffer = copy.acquire(0)
            assert buffer is not None
            device.synced.clear()
            buffer.fill(cache, plan, 0)
            buffer.sync_to_device()
            buffer.release()
            table.append(1)
        # The last strip of the last head reaches the query; each strip's new token and the caller's are far apart,
        # but the caller's and the next strip's new token are not.
        assert len(device.synced) == ranges
        assert device.synced[-1][1] + device.synced[-1][2] == plan.layout.nbytes


def test_blocks_that_got_other_bytes_with_a_new_owner_are_staged_anew() -> None:
    """A restored sequence is put into the very blocks that another left, past the cache's own writing."""
    world = World(blocks=4)
    first = world.table(40)
    world.step(first)
    first.release()
    second = world.cache.table()
    second.append(40)
    assert second.blocks == [0, 1, 2]
    world.cache.buffer[:] = np.random.default_rng(2).integers(0, 120, world.cache.buffer.nbytes, np.uint8)
    world.step(second)
    assert world.counts == (2, 2)  # the same buffers, and as good as nothing kept


def test_a_tail_that_was_taken_back_and_written_on_by_a_chunk_is_staged_anew() -> None:
    world = World()
    table = world.table(40)
    world.step(table)
    table.truncate(35)
    world.grow(table, 4)  # a chunk, which is attended elsewhere
    world.grow(table, 1)
    world.step(table)
    assert world.counts == (2, 2)


def test_a_forgotten_tail_is_staged_anew_where_its_new_owner_writes_on() -> None:
    """The prefix cache lets a partial hit's block go, which then is written without a copy, at the old generation."""
    world = World()
    first = world.table(16)
    world.step(first)
    pool, [block] = world.cache.pool, first.blocks
    pool.keep(block)
    first.release()
    pool.acquire(block)
    second = world.cache.table()
    second.adopt([block], 5)
    pool.forget(block)
    world.grow(second, 8)
    world.grow(second, 1)
    assert second.blocks == [block]
    assert pool.generation[block] == 1
    world.step(second)


def test_a_layer_that_missed_a_step_is_gathered_whole_the_others_grow() -> None:
    world = World()
    table = world.table(40)
    for layers in ((0, 1), (0,), (0, 1)):
        world.step(table, layers=layers)
        world.grow(table, 1)
    assert world.counts == (0 + 1 + 1, 2 + 0 + 1)


def test_a_launch_that_is_tried_again_finds_its_bytes() -> None:
    world = World()
    table = world.table(40)
    world.step(table)
    world.grow(table, 1)
    world.residency.begin_step()
    plan, copy = world.lend(table)
    assert copy is not None
    for _ in range(2):
        buffer = copy.acquire(0)
        assert buffer is not None
        buffer.fill(world.cache, plan, 0)
        buffer.sync_to_device()
        world.check(buffer, 0, table)
        buffer.release()
    assert world.counts == (2, 2)


def test_what_the_device_refused_is_not_taken_for_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(offset: int, nbytes: int) -> None:
        raise DeviceError("refused on purpose")

    world = World()
    table = world.table(40)
    world.step(table)
    world.grow(table, 1)
    with monkeypatch.context() as patch:
        patch.setattr(world.device, "sync_to_device", refuse)
        with pytest.raises(DeviceError, match="on purpose"):
            world.step(table)
    world.grow(table, 1)
    world.step(table)
    assert world.counts == (1, 4)  # the refused one had grown


def test_two_launches_of_one_layout_have_copies_of_their_own() -> None:
    world = World()
    first, second = world.table(40), world.table(50)
    for _ in range(2):
        world.residency.begin_step()
        lent = [world.lend(table) for table in (first, second)]
        for (plan, copy), table in zip(lent, (first, second), strict=True):
            assert copy is not None
            buffer = copy.acquire(0)
            assert buffer is not None
            buffer.fill(world.cache, plan, 0)
            buffer.sync_to_device()
            world.check(buffer, 0, table)
            buffer.release()
            world.grow(table, 1)
    assert world.counts == (2, 2)


COPY_PAGES = 2 * -(-StagingLayout(1, 2, TOKENS, 4, 128, 0).nbytes // PAGE)


def test_the_copy_used_longest_ago_makes_room_but_none_of_this_step() -> None:
    world = World(pages=2 * COPY_PAGES)
    tables = [world.table(count) for count in (40, 50, 60)]
    world.residency.begin_step()
    assert [world.lend(table)[1] is not None for table in tables] == [True, True, False]
    # A longer bucket takes the place of both, which are not needed any more.
    layout = StagingLayout(1, 2, 2 * TOKENS - 16, 4, 128, 0)
    assert world.residency.fits(layout)
    world.residency.begin_step()
    assert world.lend(tables[0], tokens=layout.tokens)[1] is not None
    assert world.lend(tables[1])[1] is None
    assert not world.residency.fits(StagingLayout(1, 2, 2 * TOKENS + 16, 4, 128, 0))
    assert world.lend(tables[1], tokens=2 * TOKENS + 16)[1] is None


def test_copies_do_not_overlap_whatever_came_and_went() -> None:
    world = World(pages=40)
    tables = [world.table(count) for count in (5, 6, 7)]
    for step in range(40):
        world.residency.begin_step()
        for index, table in enumerate(tables[: 1 + step % 3]):
            world.lend(table, tokens=(8, 16, 24, 32)[(step + index) % 4])
        spans = sorted((copy.start, copy.start + copy.nbytes) for copy in world.residency._copies.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= 40 * PAGE


def test_a_buffer_that_a_job_still_has_is_left_alone() -> None:
    world = World(pages=COPY_PAGES)
    table = world.table(40)
    plan, copy = world.lend(table)
    assert copy is not None
    buffer = copy.acquire(0)
    assert buffer is not None
    buffer.fill(world.cache, plan, 0)
    buffer.sync_to_device()
    buffer.launch()
    assert copy.acquire(0) is None
    assert not copy.idle
    world.residency.begin_step()
    assert world.lend(table)[1] is None
    assert world.lend(table, tokens=TOKENS - 4)[1] is None  # it is not given up, either
    buffer.release()
    assert world.lend(table)[1] is copy


@pytest.mark.parametrize("synced", [True, False])
def test_a_buffer_keeps_to_its_life_and_fills_any_plan(*, synced: bool) -> None:
    world = World()
    table = world.table(40)
    world.step(table)
    world.residency.begin_step()
    plan, copy = world.lend(table)
    assert copy is not None
    buffer = copy.acquire(0)
    assert buffer is not None
    assert buffer.state is BufferState.FILLING
    with pytest.raises(WrongState, match="holds nothing"):
        buffer.sync_to_device()
    other = world.table(20)
    foreign = world.plan(other)
    buffer.fill(world.cache, foreign, 0)
    world.check(buffer, 0, other)
    if synced:
        buffer.sync_to_device()
        with pytest.raises(WrongState, match="needs it filling"):
            buffer.sync_to_device()
    buffer.release()
    assert copy.acquire(0) is buffer
    buffer.fill(world.cache, plan, 0)
    world.check(buffer, 0, table)
    assert world.counts == (0, 3)


def test_a_closed_residency_holds_no_memory() -> None:
    world = World()
    region = Region.anonymous(400 * PAGE)
    world.residency = Residency(world.cache, region.buffer, 0, world.device, OWN_TOKENS)
    _, copy = world.lend(world.table(40))
    assert copy is not None
    with pytest.raises(RegionError, match="drop every view"):
        region.close()
    world.residency.close()
    region.close()
    assert world.lend(world.table(40))[1] is None


def test_no_buffer_is_cut_by_a_border_of_dma_bufs_and_no_two_copies_share_one() -> None:
    """Of 14 pages a dma-buf; a launch of 8 tokens takes 4 pages a layer, so that 3 layers fit one, and 7 take 3."""
    layers, piece = 7, 14 * PAGE
    cache = PagedKVCache.create(KVGeometry(layers=layers, kv_heads=2, head_dim=128), 1 << 22)
    residency = Residency(cache, np.zeros(7 * piece, np.uint8), piece, MemoryLog(), OWN_TOKENS, piece_bytes=piece)
    layout = StagingLayout(1, 2, 8, 4, 128, 0)
    assert -(-layout.nbytes // PAGE) == 4
    tables = [cache.table() for _ in range(3)]
    copies = []
    for table in tables:
        table.append(5)
        plan = plan_of(cache, [table.blocks], [5], 8)
        copies.append(residency.lend(plan, *np.array([[5], [4]], np.int32)))
    assert copies[2] is None  # two have taken six of the seven
    pieces: list[set[int]] = []
    for copy in copies[:2]:
        assert copy is not None
        spans = [(buffer._offset, buffer._offset + len(buffer.memory)) for buffer in copy._buffers]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert [(end - start, start // piece, (end - 1) // piece) for start, end in spans] == [
            (4 * PAGE, first, first) for first in (start // piece for start, _ in spans)
        ]
        pieces.append({start // piece for start, _ in spans})
    assert pieces == [{1, 2, 3}, {4, 5, 6}]
    assert residency.fits(StagingLayout(1, 2, 48, 4, 128, 0))  # 14 pages: a dma-buf for each layer
    assert not residency.fits(StagingLayout(1, 2, 52, 4, 128, 0))  # 15

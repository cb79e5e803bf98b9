"""How a step is cut into launches, and what each of them writes beside K and V."""

from __future__ import annotations

import numpy as np
import pytest

from hostcache import KVGeometry
from npu.launch import Launch, LaunchPlanner
from staging import Buckets, StagingBuffer
from tests.npu.paged import batch_of
from tests.staging.flat import arena_of, noisy_cache

GEOMETRY = KVGeometry(layers=1, kv_heads=2, head_dim=16)
CACHE = noisy_cache(GEOMETRY, blocks=64)
GROUP = 3
PLANNER = LaunchPlanner(GEOMETRY, CACHE.blocks, GROUP * GEOMETRY.kv_heads, Buckets((64, 128, 256)))


def launches(lengths: list[int], rows: list[int]) -> list[Launch]:
    tables = [list(range(GEOMETRY.blocks_for(length))) for length in lengths]
    return PLANNER.plan(batch_of(tables, lengths, rows), np.arange(len(lengths), dtype=np.int64))


def filled(launch: Launch) -> StagingBuffer:
    buffer = arena_of(1, pages=-(-PLANNER.buffer_bytes // 4096)).acquire()
    buffer.fill(CACHE, launch.plan, 0)
    return buffer


def test_tiles_go_alone_and_single_rows_share_a_launch_per_bucket() -> None:
    # 130 rows: tiles of 64, 64 and 2, that end at tokens 134, 198 and 200. 65 rows: a tile to 69, and a single row.
    cut = launches([200, 64, 70, 10], [130, 1, 65, 1])
    shapes = [(launch.plan.layout.tokens, *launch.rows.shape, launch.lengths.tolist()) for launch in cut]
    assert shapes == [
        (256, 1, 64, [134]),
        (256, 1, 64, [198]),
        (256, 1, 2, [200]),
        (128, 1, 64, [69]),
        (64, 2, 1, [64, 10]),
        (128, 1, 1, [70]),
    ]
    assert cut[4].rows.tolist() == [[130], [196]]
    every = np.concatenate([launch.rows.ravel() for launch in cut])
    assert sorted(every.tolist()) == list(range(197))  # each row once


def test_a_prompt_starts_in_small_buckets() -> None:
    cut = launches([256], [256])
    assert [launch.plan.layout.tokens for launch in cut] == [64, 128, 256, 256]


def test_single_rows_are_split_when_a_buffer_is_full() -> None:
    # A tile at 256 tokens: K, V 2 * 2*256*16*2 = 32768; 192 rows: query, out 2 * 2*192*16*2 = 24576, mask 256*192*2.
    assert PLANNER.buffer_bytes == 32768 + 24576 + 98304
    # A row at 256 tokens: 4 padded rows, query and out 2 * 2*4*16*2 = 512, mask 512: 33792 bytes, 4.6 to a buffer.
    cut = launches([200] * 9, [1] * 9)
    assert [launch.plan.layout.batch for launch in cut] == [4, 4, 1]


@pytest.mark.parametrize(("length", "rows"), [(20, 1), (64, 64), (70, 5), (256, 63)])
def test_every_row_sees_up_to_its_own_token_and_padding_as_much_as_the_last(length: int, rows: int) -> None:
    [launch] = launches([length], [rows])
    buffer = filled(launch)
    launch.write_mask(buffer)
    mask = buffer.mask[0]
    padded = -(-rows * GROUP // 4) * 4
    assert mask.shape[1] == (1 if rows == 1 else padded)
    for row in range(mask.shape[1]):
        last = length - rows + min(row // GROUP, rows - 1)
        assert mask[:, row].tolist() == [0.0] * (last + 1) + [-1e4] * (len(mask) - last - 1)


def test_queries_are_scaled_and_lie_by_kv_head_then_token_then_group() -> None:
    [launch] = launches([70], [5])
    buffer = filled(launch)
    q = np.arange(5 * 6 * 16, dtype=np.float32).reshape(5, 6, 16)
    launch.write_query(buffer, q)
    for kv_head in range(2):
        for token in range(5):
            for member in range(GROUP):
                expected = (q[token, kv_head * GROUP + member] / 4).astype(np.float16)  # 4 is the root of 16
                assert buffer.query[kv_head, token * GROUP + member].tolist() == expected.tolist()
    assert buffer.query.shape[1] == 16
    assert not buffer.query[:, 15:].view(np.uint16).any()  # padding


def test_a_query_beyond_fp16_is_infinite() -> None:
    [launch] = launches([70], [1])
    buffer = filled(launch)
    launch.write_query(buffer, np.full((1, 6, 16), 4 * 65520, np.float32))  # 65520 is the first that rounds up
    assert np.isinf(buffer.query[:, :GROUP]).all()


def test_results_go_back_to_where_their_queries_came_from() -> None:
    cut = launches([70, 30], [5, 1])
    rng = np.random.default_rng(0)
    q = (rng.integers(-100, 100, (6, 6, 16)) * 4).astype(np.float32)
    out = np.full_like(q, np.nan)
    for launch in cut:
        buffer = filled(launch)
        launch.write_query(buffer, q)
        buffer.out[...] = buffer.query
        launch.read_out(buffer, out)
    np.testing.assert_array_equal(out, q / 4)

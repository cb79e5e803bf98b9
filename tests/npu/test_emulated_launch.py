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
    cuts = PLANNER.cut(batch_of(tables, lengths, rows), np.arange(len(lengths), dtype=np.int64))
    return [PLANNER.launch(cut) for cut in cuts]


def filled(launch: Launch) -> StagingBuffer:
    buffer = arena_of(1, pages=-(-PLANNER.buffer_bytes // 4096)).acquire()
    buffer.fill(CACHE, launch.plan, 0)
    return buffer


def test_tiles_go_alone_and_single_rows_share_a_launch_per_bucket() -> None:
    # 130 rows: tiles of 64, 64 and 2, that end at tokens 134, 198 and 200. 65 rows: a tile to 69, and a single row.
    # A bucket of 64 holds 63 tokens and the canary.
    cut = launches([200, 63, 70, 10], [130, 1, 65, 1])
    shapes = [(launch.plan.layout.tokens, *launch.rows.shape, launch.lengths.tolist()) for launch in cut]
    assert shapes == [
        (256, 1, 64, [134]),
        (256, 1, 64, [198]),
        (256, 1, 2, [200]),
        (128, 1, 64, [69]),
        (64, 2, 1, [63, 10]),
        (128, 1, 1, [70]),
    ]
    assert cut[4].rows.tolist() == [[130], [196]]
    every = np.concatenate([launch.rows.ravel() for launch in cut])
    assert sorted(every.tolist()) == list(range(197))  # each row once


def test_a_prompt_starts_in_small_buckets() -> None:
    cut = launches([255], [255])  # tiles end at 64, 128, 192 and 255
    assert [launch.plan.layout.tokens for launch in cut] == [128, 256, 256, 256]


def test_single_rows_are_split_when_a_buffer_is_full_and_padded_to_a_graphs_batch() -> None:
    # A tile at 256 tokens: K, V 2 * 2*256*16*2 = 32768; 64 * 3 + 1 = 193 rows, padded to 196: query, out
    # 2 * 2*196*16*2 = 25088, mask 256*196*2 = 100352.
    assert PLANNER.buffer_bytes == 32768 + 25088 + 100352
    # A row at 256 tokens: K 2*256*24*2 = 24576, V 16384; 3 + 1 = 4 rows, query 2*4*24*2 = 384, out 256: 41600 bytes,
    # 3.8 to a buffer, so that 2 is the largest batch with a graph of its own.
    cut = launches([200] * 5, [1] * 5)
    assert [(len(launch.rows), launch.plan.layout.batch) for launch in cut] == [(2, 2), (2, 2), (1, 1)]
    # At 64 tokens a row takes 10880 bytes: 14.5 to a buffer.
    cut = launches([50] * 11, [1] * 11)
    assert [(len(launch.rows), launch.plan.layout.batch) for launch in cut] == [(8, 8), (3, 4)]
    assert cut[1].lengths.tolist() == [50, 50, 50, 1]  # what pads the batch holds one token


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (2, 52), (16, 52), (17, 196), (64, 196)])
def test_rows_are_those_of_a_graph(rows: int, padded: int) -> None:
    # 1 * 3, 16 * 3 and 64 * 3 rows, one for the canary, and up to a multiple of 4.
    [launch] = launches([100], [rows])
    assert launch.plan.layout.rows == padded


@pytest.mark.parametrize(("length", "rows"), [(64, 64), (70, 5), (255, 63)])
def test_every_row_sees_up_to_its_own_token_and_padding_as_much_as_the_last(length: int, rows: int) -> None:
    [launch] = launches([length], [rows])
    buffer = filled(launch)
    launch.write(buffer, np.zeros((rows, 6, 16), np.float32))
    mask = buffer.mask[0]
    for row in range(len(mask) - 1):
        last = length - rows + min(row // GROUP, rows - 1)
        assert mask[row].tolist() == [0.0] * (last + 1) + [-1e4] * (mask.shape[1] - last - 1)
    assert mask[-1].tolist() == [-1e4] * (mask.shape[1] - 1) + [0.0]  # the canary's row


def test_a_single_rows_mask_is_in_the_keys() -> None:
    [launch] = launches([20, 33], [1, 1])
    buffer = filled(launch)
    launch.write(buffer, np.zeros((2, 6, 16), np.float32))
    marks = buffer.keys[:, :, 16:]
    for head, length in enumerate([20, 20, 33, 33]):
        assert marks[head, :, 0].tolist() == [0.0] * length + [-1e4] * (64 - length)
    assert marks[:, :, 1].tolist() == [[0.0] * 63 + [64.0]] * 4  # the canary's score
    assert not marks[:, :, 2:].any()
    assert buffer.query[:, :3, 16:].tolist() == [[[1.0, *[0.0] * 7]] * 3] * 4
    assert buffer.query[:, 3].tolist() == [[*[0.0] * 17, 1.0, *[0.0] * 6]] * 4


@pytest.mark.parametrize("rows", [1, 5])
def test_the_last_token_is_a_nonce_that_no_other_launch_has(rows: int) -> None:
    [launch] = launches([70], [rows])
    buffer = filled(launch)
    nonces = []
    for _ in range(3):
        canary = launch.write(buffer, np.zeros((rows, 6, 16), np.float32))
        assert (buffer.values[:, -1] == canary.nonce).all()
        assert not buffer.keys[:, -1, :16].any()
        nonces.append(tuple(canary.nonce.tolist()))
    assert all(set(nonce) == {-1.0, 1.0} for nonce in nonces)
    assert len(set(nonces)) == 3


def test_queries_are_scaled_and_lie_by_kv_head_then_token_then_group() -> None:
    [launch] = launches([70], [5])
    buffer = filled(launch)
    buffer.query[...] = np.nan  # of the launch before
    q = np.arange(5 * 6 * 16, dtype=np.float32).reshape(5, 6, 16)
    launch.write(buffer, q)
    for kv_head in range(2):
        for token in range(5):
            for member in range(GROUP):
                expected = (q[token, kv_head * GROUP + member] / 4).astype(np.float16)  # 4 is the root of 16
                assert buffer.query[kv_head, token * GROUP + member].tolist() == expected.tolist()
    assert buffer.query.shape[1] == 52
    assert not buffer.query[:, 15:].view(np.uint16).any()  # padding


def test_a_query_beyond_fp16_is_infinite() -> None:
    [launch] = launches([70], [1])
    buffer = filled(launch)
    launch.write(buffer, np.full((1, 6, 16), 4 * 65520, np.float32))  # 65520 is the first that rounds up
    assert np.isinf(buffer.query[:, :GROUP, :16]).all()


def test_results_go_back_to_where_their_queries_came_from() -> None:
    cut = launches([70, 30], [5, 1])
    rng = np.random.default_rng(0)
    q = (rng.integers(-100, 100, (6, 6, 16)) * 4).astype(np.float32)
    out = np.full_like(q, np.nan)
    for launch in cut:
        buffer = filled(launch)
        launch.write(buffer, q)
        buffer.out[...] = buffer.query[:, :, :16]
        launch.read_out(buffer, out)
    np.testing.assert_array_equal(out, q / 4)

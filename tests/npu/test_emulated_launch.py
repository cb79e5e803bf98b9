"""How a step is cut into launches, and what each of them writes beside K and V."""

from __future__ import annotations

import itertools
from collections import Counter

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
LEVELS = {-0.875, -0.625, -0.375, -0.125, 0.125, 0.375, 0.625, 0.875}
"""Of the shifts between the scores of the canary's two tokens."""
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
    # A bucket of 64 holds 62 tokens and the canary's two.
    cut = launches([200, 62, 70, 10], [130, 1, 65, 1])
    shapes = [(launch.plan.layout.tokens, *launch.rows.shape, launch.lengths.tolist()) for launch in cut]
    assert shapes == [
        (256, 1, 64, [134]),
        (256, 1, 64, [198]),
        (256, 1, 2, [200]),
        (128, 1, 64, [69]),
        (64, 2, 1, [62, 10]),
        (128, 1, 1, [70]),
    ]
    assert cut[4].rows.tolist() == [[130], [196]]
    every = np.concatenate([launch.rows.ravel() for launch in cut])
    assert sorted(every.tolist()) == list(range(197))  # each row once


def test_a_prompt_starts_in_small_buckets() -> None:
    cut = launches([254], [254])  # tiles end at 64, 128, 192 and 254
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
    # 1 * 3, 16 * 3 and 64 * 3 rows, one at least for the canary, and up to a multiple of 4.
    [launch] = launches([100], [rows])
    assert launch.plan.layout.rows == padded


@pytest.mark.parametrize(("length", "rows"), [(64, 64), (70, 5), (254, 63)])
def test_every_row_sees_up_to_its_own_token_and_padding_as_much_as_the_last(length: int, rows: int) -> None:
    [launch] = launches([length], [rows])
    buffer = filled(launch)
    launch.write(buffer, np.zeros((rows, 6, 16), np.float32))
    mask = buffer.mask[0]
    for row in range(len(mask) - 4):
        last = length - rows + min(row // GROUP, rows - 1)
        assert mask[row].tolist() == [0.0] * (last + 1) + [-1e4] * (mask.shape[1] - last - 1)
    assert mask[-4:, :-1].tolist() == [[-1e4] * (mask.shape[1] - 2) + [0.0]] * 4  # the canary's rows
    assert set(mask[-4:, -1].tolist()) <= LEVELS


def test_a_single_rows_mask_is_in_the_keys() -> None:
    [launch] = launches([20, 33], [1, 1])
    buffer = filled(launch)
    launch.write(buffer, np.zeros((2, 6, 16), np.float32))
    marks = buffer.keys[:, :, 16:]
    for head, length in enumerate([20, 20, 33, 33]):
        assert marks[head, :, 0].tolist() == [0.0] * length + [-1e4] * (64 - length)
    assert marks[:, :, 1].tolist() == [[0.0] * 62 + [64.0] * 2] * 4  # the canary's scores
    assert not marks[:, :63, 2:].any()
    shifts = marks[:, 63, 2].tolist()
    assert marks[:, 63, 2:].tolist() == [[shift, 1.0, *[0.0] * 4] for shift in shifts]
    assert buffer.query[:, :3, 16:].tolist() == [[[1.0, *[0.0] * 7]] * 3] * 4
    asked = buffer.query[:, 3, 19].tolist()
    assert buffer.query[:, 3].tolist() == [[*[0.0] * 17, 1.0, 1.0, shift, *[0.0] * 4] for shift in asked]
    assert {*shifts, *asked} <= LEVELS


@pytest.mark.parametrize("rows", [1, 5])
def test_the_last_two_tokens_are_nonces_that_no_other_launch_has(rows: int) -> None:
    [launch] = launches([70], [rows])
    buffer = filled(launch)
    nonces = []
    for _ in range(3):
        launch.write(buffer, np.zeros((rows, 6, 16), np.float32))
        first, second = buffer.values[0, -2:].tolist()
        assert (buffer.values[:, -2:] == [first, second]).all()
        assert second[::2] == first[::2]
        assert second[1::2] == [-value for value in first[1::2]]
        nonces.append(tuple(first))
    assert all(set(nonce) == {-1.0, 1.0} for nonce in nonces)
    assert len(set(nonces)) == 3


def test_in_a_tile_the_question_is_in_the_first_two_channels() -> None:
    [launch] = launches([70], [5])
    buffer = filled(launch)
    launch.write(buffer, np.zeros((5, 6, 16), np.float32))
    keys, query = buffer.keys[:, -2:].tolist(), buffer.query[:, -4:].tolist()
    for (first, second), asked in zip(keys, query, strict=True):
        assert first == [0.0] * 16
        assert second == [second[0], 1.0, *[0.0] * 14]
        assert asked == [[1.0, row[1], *[0.0] * 14] for row in asked]
        assert {second[0], *(row[1] for row in asked)} <= LEVELS


@pytest.mark.parametrize("rows", [1, 5])
def test_the_answer_is_the_attention_of_the_two(rows: int) -> None:
    """In float64, over all that was staged: nothing of the 70 tokens is in it, however large they are."""
    [launch] = launches([70], [rows])
    buffer = filled(launch)
    buffer.keys[:, :70, :16], buffer.values[:, :70] = np.random.default_rng(0).uniform(-4000, 4000, (2, 2, 70, 16))
    canary = launch.write(buffer, np.zeros((rows, 6, 16), np.float32))
    asking = canary.answer.shape[1]
    assert asking == (1 if rows == 1 else 4)
    query, keys, values = (
        operand.astype(np.float64) for operand in (buffer.query[:, -asking:], buffer.keys, buffer.values)
    )
    scores = query @ keys.swapaxes(1, 2)
    if rows > 1:
        scores += buffer.mask[:, -asking:].astype(np.float64)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    np.testing.assert_allclose(canary.answer, weights @ values / weights.sum(axis=2, keepdims=True), atol=1e-6)


def test_every_shift_is_drawn_and_none_more_often_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 launches of two heads, each of 8 shifts has 128 in the mean, with a deviation of 10.6 (binomial).

    Both heads of a launch have the same in one of 8: 64 in the mean, with a deviation of 7.5.
    """
    monkeypatch.setattr("npu.canary._launches", itertools.count())
    [launch] = launches([70], [1])
    buffer = filled(launch)
    drawn: Counter[tuple[str, float]] = Counter()
    alike: Counter[str] = Counter()
    for _ in range(512):
        launch.write(buffer, np.zeros((1, 6, 16), np.float32))
        for operand, shifts in (("K", buffer.keys[:, -1, 18].tolist()), ("query", buffer.query[:, -1, 19].tolist())):
            drawn.update((operand, shift) for shift in shifts)
            alike[operand] += shifts[0] == shifts[1]
    assert set(drawn) == {(operand, shift) for operand in ("K", "query") for shift in LEVELS}
    assert all(128 - 4 * 10.6 < times < 128 + 4 * 10.6 for times in drawn.values())
    assert all(64 - 4 * 7.5 < times < 64 + 4 * 7.5 for times in alike.values())


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
    assert not buffer.query[:, 15:48].view(np.uint16).any()  # padding, up to the canary's rows


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

"""The arrays of those that decode say what their requests say, whoever joins, leaves or is left out of a step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hostcache import BlockPool, BlockTable, Namespace, Request
from hostcache.decode_batch import DecodeBatch
from hostcache.window import AttentionWindow, WindowLayout

SIZE = 4

LIMIT = 200
"""Tokens that a request may grow to."""


def decoding(number: int, length: int, pool: BlockPool) -> Request:
    """A request of distinct tokens, all but the newest computed."""
    request = Request(
        number,
        np.arange(1000 * number, 1000 * number + LIMIT, dtype=np.int32),
        length,
        length,
        Namespace("model"),
        BlockTable(pool, lambda *_: None),
    )
    request.computed, request.rank = length - 1, (0, number)
    request.table.append(length - 1)
    return request


def assert_rows(batch: DecodeBatch, requests: list[Request], expected: dict[Request, list[int]]) -> None:
    rows = batch.rows(requests)
    assert rows.requests == requests
    assert rows.tokens.tolist() == [expected[request][-1] for request in requests]
    assert rows.positions.tolist() == [len(expected[request]) - 1 for request in requests]
    assert rows.slots.tolist() == [request.table.slot(len(expected[request]) - 1) for request in requests]
    width = max(len(request.table.blocks) for request in requests)
    tables = [request.table.blocks + [0] * (width - len(request.table.blocks)) for request in requests]
    assert rows.tables.tolist() == tables
    dtypes = [rows.tokens.dtype, rows.positions.dtype, rows.slots.dtype, rows.tables.dtype]
    assert dtypes == [np.int32, np.int32, np.int64, np.int32]


def assert_told(requests: list[Request], expected: dict[Request, list[int]]) -> None:
    """Whoever is asked between two steps knows all its tokens."""
    for request in requests:
        assert request.tokens.tolist() == expected[request]
        assert (request.computed, request.table.length) == (request.length - 1, request.length - 1)
        assert not request.in_flight


@pytest.mark.parametrize("seed", range(20))
def test_the_arrays_say_what_the_requests_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostcache.decode_batch.RECENT_TOKENS", SIZE * (2 + seed % 3))
    chance, pool = random.Random(seed), BlockPool(1000, SIZE)
    batch = DecodeBatch(12, SIZE)
    live: list[Request] = []
    expected: dict[Request, list[int]] = {}
    for number in range(150):
        if len(live) < 12 and chance.random() < 0.4:
            request = decoding(number, chance.randint(1, LIMIT - 10), pool)
            request.rank = (-chance.randint(0, 2), number)
            live.append(request)
            expected[request] = request.tokens.tolist()
            batch.add(request)
        if live and chance.random() < 0.2:
            gone = live.pop(chance.randrange(len(live)))
            batch.remove(gone)
            assert gone.tokens.tolist() == expected[gone]
            gone.table.release()
            assert not batch.has(gone)
        live.sort(key=lambda request: request.rank)
        assert batch.requests == live
        assert all(map(batch.has, live))
        taken = [request for request in live if chance.random() < 0.8] if chance.random() < 0.5 else list(live)
        grown = [request for request in live if request.computed % SIZE == 0]  # nobody shares a tail here
        places = batch.without_room()
        assert [live[place] for place in places] == grown
        if taken == live and len(places) and chance.random() < 0.5:
            assert batch.grow(places, pool)
        else:
            for request in [request for request in grown if request in taken]:
                request.table.append(1)
                batch.table_changed(request)
        if not taken:
            continue
        batch.take(taken)
        if chance.random() < 0.5:  # otherwise nobody asks until a block is full
            assert [request.in_flight for request in live] == [request in taken for request in live]
            assert all(request.table.length == request.computed + 1 for request in taken)
        assert_rows(batch, taken, expected)
        if chance.random() < 0.1:
            batch.take_back()
            for request in taken:
                request.table.truncate(request.computed)
                batch.table_changed(request)
            assert not any(request.in_flight for request in live)
            continue
        tokens = [chance.randrange(10**6) for _ in taken]
        filled, ended = batch.advance(taken, tokens)
        for request, token in zip(taken, tokens, strict=True):
            expected[request].append(token)
        whole = [request for request in taken if len(expected[request]) % SIZE == 1]
        assert [(request, index) for request, index, _, _ in filled] == [
            (r, len(expected[r]) // SIZE - 1) for r in whole
        ]
        texts = [np.frombuffer(text, np.int32).tolist() for _, _, text, _ in filled]
        assert texts == [expected[request][-SIZE - 1 : -1] for request in whole]
        asked = [(request, block) for request, _, _, block in filled if chance.random() < 0.5]  # which settles it
        assert [block for _, block in asked] == [request.table.blocks[-1] for request, _ in asked]
        assert ended == [index for index, request in enumerate(taken) if len(expected[request]) == LIMIT]
        assert_told([request for request in taken if chance.random() < 0.3], expected)
        for index in reversed(ended):
            batch.remove(taken[index])
            assert taken[index].tokens.tolist() == expected[taken[index]]
            live.remove(taken[index])


def test_rows_are_the_receivers() -> None:
    pool = BlockPool(40, SIZE)
    batch = DecodeBatch(2, SIZE)
    request = decoding(1, 6, pool)
    batch.add(request)
    request.table.append(1)
    rows = batch.rows([request])
    batch.advance([request], [99])
    assert (rows.tokens.tolist(), rows.positions.tolist(), rows.tables.tolist()) == ([1005], [5], [[0, 1]])


def test_who_needs_a_copy_or_blocks_that_are_missing_is_not_grown_with_the_rest() -> None:
    pool = BlockPool(3, SIZE)
    batch = DecodeBatch(3, SIZE)
    first, second = decoding(1, 5, pool), decoding(2, 7, pool)
    batch.add(first)
    batch.add(second)
    assert pool.available == 0
    assert batch.without_room().tolist() == [0]
    assert not batch.grow(batch.without_room(), pool)
    first.table.truncate(0)
    batch.remove(first)
    fork = second.table.fork()
    batch.table_changed(second)
    assert batch.without_room().tolist() == [0]
    assert not batch.grow(batch.without_room(), pool)  # its next token would land in the fork's block
    assert (second.table.blocks, fork.blocks, pool.available) == ([1, 2], [1, 2], 1)


def test_a_block_that_is_filled_behind_a_gap_is_the_right_one() -> None:
    """Of six blocks, the first three were let go of: the next token fills the last one of three."""
    pool, batch = BlockPool(10, SIZE), DecodeBatch(1, SIZE)
    request = decoding(1, 6 * SIZE, pool)
    request.layout = WindowLayout(AttentionWindow(3 * SIZE), SIZE, largest_chunk=1)
    request.table.append(1)
    assert request.let_go()
    batch.add(request)
    ((owner, number, text, block),), _ = batch.advance([request], [99])
    assert (owner, number, block) == (request, 5, 5)
    assert np.frombuffer(text, np.int32).tolist() == [1020, 1021, 1022, 1023]
    assert batch.grow(batch.without_room(), pool)
    assert request.table.blocks == [3, 4, 5, 0]
    assert batch.rows([request]).tables.tolist() == [[3, 4, 5, 0]]


def test_each_client_pays_for_its_tokens() -> None:
    pool, batch = BlockPool(9, SIZE), DecodeBatch(3, SIZE)
    requests = [decoding(number, 2, pool) for number in range(3)]
    requests[2].account = requests[0].account
    for request in requests:
        batch.add(request)
    batch.charge(requests)
    batch.charge(requests[:2])
    assert (requests[0].account.counter, requests[1].account.counter) == (2.0 * 3, 2.0 * 2)
    batch.remove(requests[0])
    batch.charge(requests[1:])
    assert (requests[2].account.counter, requests[1].account.counter) == (2.0 * 4, 2.0 * 3)
    batch.add(requests[0])
    batch.charge(requests)
    assert (requests[2].account.counter, requests[1].account.counter) == (2.0 * 6, 2.0 * 4)


def test_one_that_is_not_asked_for_long_misses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostcache.decode_batch.RECENT_TOKENS", 2 * SIZE)
    pool, batch = BlockPool(20, SIZE), DecodeBatch(1, SIZE)
    request = decoding(1, 6, pool)
    batch.add(request)
    for token in range(50):
        places = batch.without_room()
        assert len(places) == 0 or batch.grow(places, pool)
        batch.take([request])
        batch.advance([request], [token])
    assert request.tokens.tolist() == [1000, 1001, 1002, 1003, 1004, 1005, *range(50)]

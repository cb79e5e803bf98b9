"""The arrays of those that decode say what their requests say, whoever joins, leaves or is left out of a step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hostcache import BlockPool, BlockTable, Namespace, Request
from hostcache.decode_batch import DecodeBatch

SIZE = 4


def decoding(number: int, length: int, pool: BlockPool) -> Request:
    """A request of distinct tokens, all but the newest computed."""
    request = Request(
        number,
        np.arange(1000 * number, 1000 * number + 200, dtype=np.int32),
        length,
        length,
        Namespace("model"),
        BlockTable(pool, lambda *_: None),
        computed=length - 1,
    )
    request.table.append(length - 1)
    return request


def assert_rows(batch: DecodeBatch, requests: list[Request]) -> None:
    rows = batch.rows(requests)
    assert rows.requests == requests
    assert rows.tokens.tolist() == [int(request.buffer[request.computed]) for request in requests]
    assert rows.positions.tolist() == [request.computed for request in requests]
    assert rows.slots.tolist() == [request.table.slot(request.computed) for request in requests]
    width = max(len(request.table.blocks) for request in requests)
    tables = [request.table.blocks + [0] * (width - len(request.table.blocks)) for request in requests]
    assert rows.tables.tolist() == tables
    dtypes = [rows.tokens.dtype, rows.positions.dtype, rows.slots.dtype, rows.tables.dtype]
    assert dtypes == [np.int32, np.int32, np.int64, np.int32]


@pytest.mark.parametrize("seed", range(20))
def test_the_arrays_say_what_the_requests_say(seed: int) -> None:
    chance, pool = random.Random(seed), BlockPool(400, SIZE)
    batch = DecodeBatch(12, SIZE)
    live: list[Request] = []
    for number in range(150):
        if len(live) < 12 and chance.random() < 0.4:
            request = decoding(number, chance.randint(1, 90), pool)
            request.rank = (-chance.randint(0, 2), number)
            live.append(request)
            batch.add(request)
        if live and chance.random() < 0.2:
            gone = live.pop(chance.randrange(len(live)))
            batch.remove(gone)
            gone.table.release()
            assert not batch.has(gone)
        live.sort(key=lambda request: request.rank)
        assert batch.requests == live
        assert all(map(batch.has, live))
        taken = [request for request in live if chance.random() < 0.8] if chance.random() < 0.5 else list(live)
        grown = [request for request in live if request.computed % SIZE == 0]  # nobody shares a tail here
        assert batch.without_room() == grown
        for request in taken:
            request.table.append(1)
            if request in grown:
                batch.table_changed(request)
        if not taken:
            continue
        assert_rows(batch, taken)
        if chance.random() < 0.1:  # rolled back
            for request in taken:
                request.table.truncate(request.computed)
                batch.table_changed(request)
            continue
        tokens = [chance.randrange(10**6) for _ in taken]
        batch.advance(taken, tokens)
        for request, token in zip(taken, tokens, strict=True):
            request.computed += 1
            request.buffer[request.computed] = token
        for request in [request for request in taken if request.computed > 150]:
            batch.remove(request)
            live.remove(request)


def test_rows_are_the_receivers() -> None:
    pool = BlockPool(40, SIZE)
    batch = DecodeBatch(2, SIZE)
    request = decoding(1, 6, pool)
    batch.add(request)
    request.table.append(1)
    rows = batch.rows([request])
    batch.advance([request], [99])
    assert (rows.tokens.tolist(), rows.positions.tolist(), rows.tables.tolist()) == ([1005], [5], [[0, 1]])

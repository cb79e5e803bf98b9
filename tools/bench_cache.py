"""`rockpage bench cache`: what finding a prefix costs, publishing a block, and appending a token.

Against nano-vllm's `BlockManager`, which hashes each block of a prompt, chained to the hash of those in front, and then
compares the tokens. Both sides verify every token.

- A prefix is looked up: `PrefixCache.known_tokens` against `can_allocate`.
- It is looked up, taken, and given back, while another sequence uses it, with a block of one's own for the token behind
  it, as an admission does: `match` and `allocate` against `can_allocate` and `allocate`; `release_all` and
  `release_node` against `deallocate`.
- A block is published: `publish` against `hash_blocks`.
- A token is appended in a step of many sequences: it gets its slot, is noted, and the block that it fills is published.
  Ours is all of them at once in `DecodeBatch`, which is how our step does it, and `publish_full`; theirs is a loop over
  `can_append`, `may_append`, `hash_blocks` and `append_token`.
- A token gets its slot in one table: `BlockTable.append` against `can_append`, `may_append` and `append_token`.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from hostcache import BlockPool, BlockTable, Namespace, PrefixCache, Request
from hostcache.decode_batch import DecodeBatch

from . import bench_cache_peer as theirs
from .bench_cache_work import APPENDS, BLOCKS, DECODING, PREFIX, PROMPT, REPEATS, make_prompt, require_hit
from .bench_peer import NanoVllm
from .bench_rows import Case, Work

__all__ = ["cases"]

HOME = Namespace("model")


def cases(peer: NanoVllm | None, block_tokens: int) -> list[Case]:
    """One for each thing that the books are asked for."""
    return [
        Case(
            f"look up {PREFIX} tokens",
            partial(own_lookup, block_tokens),
            None if peer is None else partial(theirs.lookup, peer, block_tokens),
            0.05,
        ),
        Case(
            f"look up {PREFIX} tokens, take, give back",
            partial(own_admission, block_tokens),
            None if peer is None else partial(theirs.admission, peer, block_tokens),
            0.05,
        ),
        Case(
            f"publish a block of {block_tokens}",
            partial(own_publish, block_tokens),
            None if peer is None else partial(theirs.publish, peer, block_tokens),
        ),
        Case(
            f"append a token, step of {DECODING}",
            partial(own_append, block_tokens),
            None if peer is None else partial(theirs.append, peer, block_tokens),
            0.3,
        ),
        Case(
            "append a token, one table",
            partial(own_table_append, block_tokens),
            None if peer is None else partial(theirs.table_append, peer, block_tokens),
            0.3,
        ),
    ]


class Published:
    """A prefix cache that knows a prompt but for its last token, and a sequence that uses it."""

    def __init__(self, block_tokens: int) -> None:
        self.prompt = make_prompt()
        self.pool = BlockPool(BLOCKS, block_tokens)
        self.cache = PrefixCache(self.pool)
        self._texts = [self.prompt[start : start + block_tokens] for start in range(0, PREFIX, block_tokens)]
        self._blocks = self.pool.allocate(len(self._texts))
        self.publish()

    def publish(self) -> float:
        """Make all blocks known, which nothing is of yet; returns the seconds that one took."""
        node = self.cache.match(HOME, self.prompt[:0]).node
        started = time.perf_counter()
        for text, block in zip(self._texts, self._blocks, strict=True):
            node = self.cache.publish(node, text, block)
        seconds = time.perf_counter() - started
        self.cache.release_node(node)
        return seconds / len(self._texts)


def own_lookup(block_tokens: int, _: int) -> Work:
    """Seconds of a lookup that takes nothing."""
    home = Published(block_tokens)
    find, prompt = home.cache.known_tokens, home.prompt

    def work() -> float:
        started = time.perf_counter()
        for _ in range(REPEATS):
            found = find(HOME, prompt)
        seconds = time.perf_counter() - started
        require_hit(found)
        return seconds / REPEATS

    return work


def own_admission(block_tokens: int, _: int) -> Work:
    """Seconds of finding, taking and giving back."""
    home = Published(block_tokens)
    cache, pool, prompt = home.cache, home.pool, home.prompt

    def work() -> float:
        started = time.perf_counter()
        for _ in range(REPEATS):
            hit = cache.match(HOME, prompt)
            blocks = hit.blocks + pool.allocate(1)
            pool.release_all(blocks)
            cache.release_node(hit.node)
        seconds = time.perf_counter() - started
        require_hit(len(hit.blocks) * block_tokens)
        return seconds / REPEATS

    return work


def own_publish(block_tokens: int, _: int) -> Work:
    """Seconds of publishing a block behind another."""
    home = Published(block_tokens)

    def work() -> float:
        home.cache.invalidate()
        return home.publish()

    return work


def own_append(block_tokens: int, times: int) -> Work:
    """Seconds of a token, in a step in which many sequences append one each."""
    length = PROMPT + block_tokens + times + 1
    pool, batch = BlockPool(DECODING * -(-length // block_tokens), block_tokens), DecodeBatch(DECODING, block_tokens)
    cache = PrefixCache(pool)
    for number in range(DECODING):
        tokens, table = PROMPT + number % block_tokens, BlockTable(pool, _copies_nothing)
        request = Request(number, np.arange(length, dtype=np.int32), tokens, tokens, HOME, table)
        request.computed, request.rank = tokens - 1, (0, number)
        request.node = cache.match(Namespace("model", salt=str(number)), request.tokens).node
        table.append(tokens - 1)
        batch.add(request)
    sampled = [7] * DECODING

    def work() -> float:
        started = time.perf_counter()
        places = batch.without_room()
        if len(places):
            batch.grow(places, pool)
        batch.take(batch.requests)
        filled, _ = batch.advance(batch.requests, sampled)
        for request, _, text, block in filled:
            assert request.node is not None
            request.node = cache.publish_full(request.node, text, block)
        return (time.perf_counter() - started) / DECODING

    return work


def own_table_append(block_tokens: int, times: int) -> Work:
    """Seconds of a token that is appended to a table by itself."""
    table = BlockTable(BlockPool(-(-(PROMPT + times * APPENDS) // block_tokens), block_tokens), _copies_nothing)
    table.append(PROMPT)

    def work() -> float:
        started = time.perf_counter()
        for _ in range(APPENDS):
            table.append(1)
        return (time.perf_counter() - started) / APPENDS

    return work


def _copies_nothing(source: int, destination: int, tokens: int) -> None:
    """There are no bytes, and nothing is shared."""

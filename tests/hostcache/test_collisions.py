"""Colliding hashes: a block is never spliced behind a prefix that it was not computed behind."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import BlockPool, Namespace, PrefixCache, PrefixHit, PrefixNode
from tests.hostcache.shadow import Fault, ShadowEngine

Prefix = tuple[Namespace, tuple[int, ...]]


class WeakBytes(bytes):
    """Token bytes whose hash has four bits."""

    def __hash__(self) -> int:
        return sum(self) & 15

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other)


def weak(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, wrap=WeakBytes)


class OwnTokensOnly(PrefixCache):
    """The control: a hash of the whole prefix, cut to four bits, names a block, and the block's own tokens confirm it.

    That is how hash-chained caches compare; the parent is not looked at.
    """

    def match(self, namespace: Namespace, tokens: NDArray[np.int32], *, whole: bool = False) -> PrefixHit:
        size, root = self._pool.block_tokens, self.root(namespace)
        node, blocks = root, []
        for start in range(0, (len(tokens) - (not whole)) // size * size, size):
            text = tokens[start : start + size].tobytes()
            name = hash(WeakBytes(root.tokens + tokens[: start + size].tobytes()))
            same = (n for n in self._by_block.values() if n.tokens == text and chain_hash(n) == name)
            found = next(same, None)
            if found is None:
                break
            self._pool.acquire(found.block)
            blocks.append(found.block)
            node = found
        node.holders += 1
        return PrefixHit(blocks, node)


def chain_hash(node: PrefixNode) -> int:
    text, front = b"", node
    while front.parent is not None:
        text, front = front.tokens + text, front.parent
    return hash(WeakBytes(front.tokens + text))


@dataclass
class NamingEngine(ShadowEngine):
    """Watches besides which prefix each node number stands for."""

    named: dict[int, Prefix] = field(default_factory=dict, init=False)

    def check(self) -> None:
        super().check()
        standing: dict[Prefix, PrefixNode] = {}
        for request in self.scheduler.running:
            node = request.node
            assert node is not None
            if not node.alive:  # invalidated: nothing is published behind it any more
                continue
            prefix = (request.namespace, tuple(request.tokens[: request.published * self.block_tokens].tolist()))
            if self.named.setdefault(node.number, prefix) != prefix:
                raise Fault(f"node number {node.number} has stood for two prefixes")
            if standing.setdefault(prefix, node) is not node:
                raise Fault(f"request {request.id} has a node of its own for a prefix that has one")
            ancestors = [node]
            while (parent := ancestors[-1].parent) is not None:
                ancestors.append(parent)
            self.seen["a parent outlived its bytes"] += any(above.block < 0 for above in ancestors[1:-1])


def runs(count: int, prefix_cache: type[PrefixCache] | None = None) -> Counter[str]:
    """Random traffic over two tokens and few blocks: most blocks hold tokens that others hold behind other prefixes."""
    seen: Counter[str] = Counter()
    for seed in range(count):
        engine = NamingEngine(seed, 4, (5, 9, 16)[seed % 3], prefix_cache or weak)
        engine.run(40)
        seen += engine.seen
    return seen


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.long)])
def test_random_runs_with_a_4_bit_hash_never_read_foreign_kv(count: int) -> None:
    seen = runs(count)
    assert seen["hit"] > 10 * count
    assert seen["a parent outlived its bytes"] > count // 2


def test_the_same_runs_catch_a_cache_that_compares_a_blocks_own_tokens_only() -> None:
    with pytest.raises(Fault, match=r"would read KV at \d+ that was computed for other tokens"):
        runs(300, OwnTokensOnly)


def test_every_prefix_is_found_among_all_that_collide() -> None:
    """243 texts in 16 hashes: each finds the block that was computed for it."""
    pool = BlockPool(300, 4)
    cache = weak(pool)
    home = Namespace("model")
    texts = [np.array(text, np.int32) for text in itertools.product((1, 2, 3), repeat=5)]
    owner: dict[int, bytes] = {}
    for text in texts:
        node = cache.root(home)
        cache.hold_node(node)
        (block,) = pool.allocate(1)
        node = cache.publish(node, text[:4], block)
        if pool.is_kept(block):
            owner[block] = text[:4].tobytes()
        pool.release(block)
        cache.release_node(node)
    for text in texts:
        hit = cache.match(home, text)
        assert [owner[block] for block in hit.blocks] == [text[:4].tobytes()]
        pool.release_all(hit.blocks)
        cache.release_node(hit.node)

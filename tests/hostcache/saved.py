"""What the tests of saved KV have in common: a small pool whose bytes can be told apart, and a file made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache import KVGeometry, Namespace, PagedKVCache, PrefixCache
from hostcache.saved_prefix import restore_prefix, save_prefix
from hostcache.state_file import StateReader

SMALL = KVGeometry(layers=2, kv_heads=1, head_dim=4, block_tokens=4)
HOME = Namespace("a model", salt="a secret")
NOTE = b'{"said": "hello"}'


def prompt(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


def kv_rows(tokens: NDArray[np.int32], layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K and V `[n, 1, 4]` that depend on a token, its position, the layer and which of the two it is."""
    keys = np.stack([tokens % 97 + layer, np.arange(len(tokens)), tokens % 89, tokens * 0 + 1], axis=1)
    return keys[:, None].astype(np.float32), (keys[:, None] + 100).astype(np.float32)


class Home:
    """A pool with a prefix cache, full of what is nobody's business, as a pool is that was used before."""

    def __init__(self, blocks: int = 12, geometry: KVGeometry = SMALL, max_pinned: int | None = None) -> None:
        self.cache = PagedKVCache.create(geometry, blocks * geometry.block_bytes)
        self.cache.buffer[:] = 0xAB
        self.pool = self.cache.pool
        self.prefix = PrefixCache(self.pool, max_pinned=max_pinned)

    def compute(self, tokens: NDArray[np.int32], namespace: Namespace = HOME) -> list[int]:
        """Compute a sequence from nothing, publish it and end it; returns its blocks."""
        size = self.cache.geometry.block_tokens
        table = self.cache.table()
        table.append(len(tokens))
        for layer in range(self.cache.geometry.layers):
            self.cache.write(layer, table.slots(0, len(tokens)), *kv_rows(tokens, layer))
        node = self.prefix.match(namespace, tokens[:0]).node
        for index, block in enumerate(table.blocks):
            node = self.prefix.publish(node, tokens[index * size : (index + 1) * size], block)
        blocks = list(table.blocks)
        table.release()
        self.prefix.release_node(node)
        return blocks

    def save(self, path: Path, tokens: NDArray[np.int32], namespace: Namespace = HOME, note: bytes = NOTE) -> int:
        """Returns how many tokens' KV is in the file."""
        return save_prefix(path, self.cache, self.prefix, namespace, tokens, kind="session", note=note).computed

    def restore(self, path: Path, namespace: Namespace = HOME, most: int | None = None) -> int:
        with StateReader(path) as reader:
            return restore_prefix(reader, self.cache, self.prefix, namespace, most)

    def known(self, tokens: NDArray[np.int32], namespace: Namespace = HOME) -> int:
        """Tokens that are known, all of whose KV is proven to be theirs."""
        hit = self.prefix.match(namespace, tokens, whole=True)
        blocks = hit.blocks if hit.partial < 0 else [*hit.blocks, hit.partial]
        count = len(hit.blocks) * self.cache.geometry.block_tokens + hit.partial_tokens
        for layer in range(self.cache.geometry.layers):
            for found, expected in zip(
                self.cache.read(layer, blocks, count), kv_rows(tokens[:count], layer), strict=True
            ):
                assert np.array_equal(found, expected.astype(np.float16))
        self.pool.release_all(blocks)
        self.prefix.release_node(hit.node)
        return count

    def check_idle(self) -> None:
        """Nothing is held, and everything adds up."""
        self.pool.check()
        self.prefix.check()
        assert self.pool.used == 0


def saved_file(path: Path, length: int = 10) -> NDArray[np.int32]:
    """Write a state file of a small conversation; returns its tokens."""
    home, tokens = Home(), prompt(length)
    home.compute(tokens)
    assert home.save(path, tokens) == length
    return tokens

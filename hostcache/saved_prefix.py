"""Between the prefix cache and state files: what is known of some tokens goes to a file and comes back from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .cache import PagedKVCache
from .namespace import Namespace
from .prefix import PrefixCache
from .state_file import StateReader, save_state
from .state_format import StateHeader, StateKind

__all__ = ["restore_prefix", "save_prefix"]


def save_prefix(
    path: Path,
    cache: PagedKVCache,
    prefix: PrefixCache,
    namespace: Namespace,
    tokens: NDArray[np.int32],
    *,
    kind: StateKind,
    note: bytes = b"",
) -> StateHeader:
    """Write tokens to a file, with as much of their KV as the prefix cache knows, in its codec.

    Args:
        path: the file's name; one that is there is replaced.
        cache: holds the KV.
        prefix: knows where.
        namespace: whose KV.
        tokens: int32 `[n]`.
        kind: what the file is for.
        note: the application's own.

    Returns:
        What the file says of itself, how many tokens' KV it holds among it.

    Raises:
        UsageError: the namespace is too long, or the tokens are not int32.
        OSError: the file cannot be written. What was there is there still.
    """
    hit = prefix.match(namespace, tokens, whole=True)
    blocks = hit.blocks if hit.partial < 0 else [*hit.blocks, hit.partial]
    try:
        computed = len(hit.blocks) * cache.geometry.block_tokens + hit.partial_tokens
        header = StateHeader.of(
            kind, cache.geometry, namespace, tokens, computed=computed, note=note, codec=prefix.codec
        )
        save_state(path, cache, blocks, header, tokens, note=note)
    finally:
        cache.pool_of(prefix.codec).release_all(blocks)
        prefix.release_node(hit.node)
    return header


def restore_prefix(
    reader: StateReader, cache: PagedKVCache, prefix: PrefixCache, namespace: Namespace, most: int | None = None
) -> int:
    """Bring a file's KV back, as far as it is not known: afterwards prompts that begin with its tokens hit it.

    It takes free blocks, wherever they are, and those of the least recently used prefixes; of what is in use nothing.
    What comes back can be evicted like anything else that the prefix cache knows. All of it is proven before any of
    it is known.

    Args:
        reader: the open file.
        cache: where the KV goes.
        prefix: what is to know it.
        namespace: whose KV it is.
        most: leading tokens of the file that are of use; None: all.

    Returns:
        Leading tokens whose KV was read from the file.

    Raises:
        UsageError: the file was saved with another model, other options or for somebody else.
        BadStateFile: it is damaged; nothing of it is known.
        OSError: it cannot be read; nothing of it is known.
    """
    codec, pool = prefix.codec, cache.pool_of(prefix.codec)
    reader.require(namespace, cache, codec)
    size, header = cache.geometry.block_tokens, reader.header
    wanted = header.computed if most is None or most >= header.computed else most // size * size
    tokens = reader.tokens[:wanted]
    hit = prefix.match(namespace, tokens, whole=True)  # held, so that making room cannot evict what is there
    if hit.partial >= 0:
        pool.release(hit.partial)
    first, node = len(hit.blocks), hit.node
    missing = 0 if first * size + hit.partial_tokens == wanted else cache.geometry.blocks_for(wanted) - first
    taken: list[int] = []
    try:
        taken = pool.allocate(min(missing, pool.available))
        for index, block in enumerate(taken, first):
            cache.overwrite(block, reader.read_block(index), header.tokens_in(index), codec)
        for index, block in enumerate(taken, first):
            node = prefix.publish(node, tokens[index * size : (index + 1) * size], block)
    finally:
        pool.release_all([*hit.blocks, *taken])
        prefix.release_node(node)
    return min(wanted - first * size, len(taken) * size)

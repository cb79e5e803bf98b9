"""Prompts that begin alike share the blocks of their beginning."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool
from .codec import Codec
from .errors import BlockStateError, UsageError
from .namespace import Namespace
from .pins import PinRoom, PrefixPins
from .prefix_node import TOKEN_BYTES, PrefixHit, PrefixNode, PrefixRun, bytes_of, common_tokens, resident_below, walk

__all__ = ["Namespace", "PrefixCache", "PrefixHit", "PrefixNode"]

PARTIAL_CANDIDATES = 64
"""Children looked at, newest first, for a partial match: bounds the cost under a prompt with thousands of them."""


class PrefixCache:
    """A tree of nodes, one per block of tokens, under one root per namespace.

    A node is found by its parent's identity and its own exact tokens (a dictionary per parent, keyed by the
    tokens themselves), so that a hash collision cannot splice a block behind a prefix it was not computed for.
    Nodes are published only after their KV has been computed. Eviction is leaf first, least recently used first.

    Args:
        pool: holds the blocks; the cache becomes its evictor.
        wrap: turns a node's token bytes into its dictionary key; tests pass one with a weak hash.
        max_pinned: most blocks that may be pinned, or how many extents by all codecs together; None: half of the pool.
        clock: seconds, for the end of pins.
        numbers: where nodes get theirs, if caches of several codecs are used beside each other.

    Attributes:
        on_invalidate: set by whoever keeps what this cache knows somewhere else; called with the arguments of
            `invalidate`.

    Example:
        >>> import numpy as np
        >>> from hostcache import BlockPool, Namespace, PrefixCache
        >>> pool = BlockPool(total=4, block_tokens=16)
        >>> prefix, prompt, mine = PrefixCache(pool), np.arange(20, dtype=np.int32), Namespace("my model", salt="mine")
        >>> hit = prefix.match(mine, prompt)  # of nothing, so far
        >>> (block,) = pool.allocate(1)
        >>> node = prefix.publish(hit.node, prompt[:16], block)  # once its KV has been computed
        >>> prefix.match(mine, prompt).blocks, prefix.match(Namespace("my model", salt="yours"), prompt).blocks
        ([0], [])
    """

    def __init__(
        self,
        pool: BlockPool,
        wrap: Callable[[bytes], bytes] | None = None,
        *,
        max_pinned: PinRoom | int | None = None,
        clock: Callable[[], float] = time.monotonic,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._pool = pool
        self._wrap = wrap or (lambda tokens: tokens)
        self._key_bytes = pool.block_tokens * TOKEN_BYTES
        self._roots: dict[bytes, PrefixNode] = {}
        self._versions: dict[bytes, str] = {}  # namespace key -> prompt version
        self._by_block: dict[int, PrefixNode] = {}
        self._numbers = itertools.count(1) if numbers is None else numbers
        room = max_pinned if isinstance(max_pinned, PinRoom) else PinRoom(pool.extents, max_pinned)
        self._pins = PrefixPins(pool, room, clock)
        self.on_invalidate: Callable[[Namespace | None, str | None], object] | None = None
        pool.evict = self._evict

    @property
    def codec(self) -> Codec:
        """How the KV is stored that it knows."""
        return self._pool.codec

    def of(self, codec: Codec) -> PrefixCache:
        """Itself, for its own codec: where one codec is in use, a cache does for `PrefixCaches`.

        Raises:
            UsageError: it knows blocks of another codec.
        """
        if codec is not self._pool.codec:
            raise UsageError(
                f"this prefix cache knows {self._pool.codec.name} blocks, not {codec.name} ones: use PrefixCaches",
                codec=codec.name,
            )
        return self

    @property
    def resident(self) -> int:
        """Blocks whose content the cache knows, used or not."""
        return len(self._by_block)

    @property
    def nodes(self) -> int:
        """Nodes in the tree, roots included: for tests and reports. O(nodes)."""
        return sum(1 for root in self._roots.values() for _ in walk(root))

    def root(self, namespace: Namespace) -> PrefixNode:
        """The root of a namespace."""
        key = namespace.key()
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = self._new_node(None, key)
            self._versions[key] = namespace.prompt_version
        return root

    def match(self, namespace: Namespace, tokens: NDArray[np.int32], *, whole: bool = False) -> PrefixHit:
        """Find the longest known beginning of a prompt, at most `len(tokens) - 1` tokens of it.

        One token is always left to compute: its logits are what the caller wants.

        Args:
            namespace: whose KV may be used.
            tokens: int32 `[n]`, the prompt.
            whole: leave none, for a caller that copies KV and wants no logits.

        Returns:
            The hit; the caller owns its references (see `PrefixHit`) and one hold on its node
            (`release_node`).

        Raises:
            UsageError: the tokens are not int32.
        """
        self.expire_pins()
        text = bytes_of(tokens)
        if not whole:
            text = text[:-TOKEN_BYTES]
        blocks, node = self._known(self.root(namespace), text)
        self._pool.acquire_all(blocks)
        node.holders += 1
        if not node.resident_children:
            return PrefixHit(blocks, node)
        offset = len(blocks) * self._key_bytes
        partial, matched = self._match_partial(node, text[offset : offset + self._key_bytes])
        if partial is None:
            return PrefixHit(blocks, node)
        self._pool.acquire(partial.block)
        return PrefixHit(blocks, node, partial.block, matched)

    def publish(self, node: PrefixNode, tokens: NDArray[np.int32], block: int) -> PrefixNode:
        """Make a block's content known behind `node`; its KV must have been computed.

        An equal child that exists is adopted: it gets the bytes if it had none, otherwise the caller's block
        stays private.

        Args:
            node: the node in front; the caller holds it, and holds the returned one instead afterwards.
            tokens: int32, a block full; or fewer, for the tail of a sequence that has ended.
            block: the block that holds their KV, used by the caller.

        Raises:
            UsageError: no tokens, more than a block holds, or not int32.
        """
        text = bytes_of(tokens)
        if len(text) == self._key_bytes:
            return self.publish_full(node, text, block)
        if not node.alive:
            return node
        if not text or len(text) > self._key_bytes:
            raise UsageError(f"a node holds 1..{self._pool.block_tokens} tokens, got {len(tokens)}", tokens=len(tokens))
        key = self._wrap(text)
        tail = node.tails.get(key)
        if tail is None:
            if self._match_partial(node, text)[1] == len(tokens):
                return node  # a longer sibling holds these tokens already
            tail = node.tails[key] = self._new_node(node, text)
        self._give_block(tail, node, block)
        self._prune(tail)  # one without bytes is of no use
        return node

    def publish_full(self, node: PrefixNode, text: bytes, block: int) -> PrefixNode:
        """As `publish`, of a full block.

        Args:
            node: as there.
            text: the int32 bytes of exactly a block's tokens.
            block: as there.
        """
        if not node.alive:  # its namespace was invalidated while the sequence ran
            return node
        key = self._wrap(text)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = self._new_node(node, text)
            run = node.run
            if run is None or run.nodes[-1] is not node:
                run = PrefixRun()
            run.append(child)
        self._give_block(child, node, block)
        child.holders += 1
        node.holders -= 1  # it has a child, so it stays
        return child

    def release_node(self, node: PrefixNode) -> None:
        """Give up the hold that `match` or `publish` gave."""
        node.holders -= 1
        self._prune(node)

    def hold_node(self, node: PrefixNode) -> None:
        """Take one more hold on a node, for a fork."""
        node.holders += 1

    def invalidate(self, *, namespace: Namespace | None = None, prompt_version: str | None = None) -> int:
        """Forget a namespace, every namespace of a prompt version, or (without arguments) everything.

        New requests never hit what was forgotten; running sequences keep their blocks and finish; pins end.

        Returns:
            Blocks that were forgotten.
        """
        if namespace is not None:
            keys = [key for key in (namespace.key(),) if key in self._roots]
        else:
            keys = [key for key, version in self._versions.items() if prompt_version in (None, version)]
        if self.on_invalidate is not None:
            self.on_invalidate(namespace, prompt_version)
        forgotten = 0
        for key in keys:
            self._pins.release_space(key)
            del self._versions[key]
            for node in list(walk(self._roots.pop(key))):
                node.alive = False
                if node.block >= 0:
                    self._drop_bytes(node)
                    forgotten += 1
        return forgotten

    def forget(self, block: int) -> None:
        """Forget what a kept block holds, so that the one table that uses it may write into it."""
        node = self._by_block[block]
        self._drop_bytes(node)
        self._prune(node)

    def known_tokens(self, namespace: Namespace, tokens: NDArray[np.int32]) -> int:
        """Leading tokens of a prompt whose KV is in full blocks of the pool. Takes nothing.

        Raises:
            UsageError: the tokens are not int32.
        """
        return len(self._resident(namespace, bytes_of(tokens))) * self._pool.block_tokens

    def pin(self, namespace: Namespace, tokens: NDArray[np.int32], owner: str, seconds: float) -> int:
        """Keep the beginning of a prompt, as far as its KV is in full blocks of the pool, from being evicted.

        Pinned blocks count as used. Pinning the same again renews it; what was computed meanwhile is pinned, too.

        Args:
            namespace: whose KV.
            tokens: int32 `[n]`, the prompt.
            owner: on whose behalf, for `unpin`.
            seconds: how long at most, by the clock.

        Returns:
            Tokens that are pinned; 0 if nothing of the prompt is there.

        Raises:
            UsageError: more blocks than may be pinned, `seconds` is not positive, or the tokens are not int32.
        """
        self.expire_pins()
        text = bytes_of(tokens)
        blocks = self._resident(namespace, text)
        if blocks:
            self._pins.add(owner, namespace.key(), text, blocks, seconds)
        return len(blocks) * self._pool.block_tokens

    def unpin(self, owner: str) -> int:
        """End all pins of an owner; returns how many. Their blocks stay known, and may be evicted again."""
        return self._pins.release(owner)

    def expire_pins(self) -> int:
        """End the pins whose time is over; returns how many. O(1) while there is none."""
        return self._pins.expire()

    @property
    def pinned(self) -> int:
        """Blocks that are pinned."""
        return self._pins.blocks

    def pinned_blocks(self) -> set[int]:
        """Ids of the blocks that are pinned, each with one reference for it: for tests and reports."""
        return self._pins.ids()

    def check(self) -> None:
        """Prove that tree, block index and pool agree. O(nodes): for tests and idle moments.

        Raises:
            BlockStateError: what does not agree.
        """
        resident = {}
        for root in self._roots.values():
            for node in walk(root):
                below = list(node.children.values()) + list(node.tails.values())
                if node.resident_children != sum(child.block >= 0 for child in below):
                    raise BlockStateError(f"node {node.number} miscounts its resident children", node=node.number)
                if node.block >= 0:
                    resident[node.block] = node
                is_full = node.parent is not None and len(node.tokens) == self._key_bytes
                if is_full != (node.run is not None) or (node.run and not node.place and not node.run.agrees()):
                    raise BlockStateError(f"node {node.number} and its run do not agree", node=node.number)
        if resident != self._by_block or any(not self._pool.is_kept(block) for block in resident):
            raise BlockStateError(f"{len(resident)} blocks in the tree, {len(self._by_block)} in the index")

    def _resident(self, namespace: Namespace, text: bytes) -> list[int]:
        """The blocks of a text's full blocks that are in the pool."""
        root = self._roots.get(namespace.key())
        return [] if root is None else self._known(root, text)[0]

    def _known(self, root: PrefixNode, text: bytes) -> tuple[list[int], PrefixNode]:
        """The blocks of `text`'s full blocks, up to the first without bytes, and the last one's node, or the root."""
        key_bytes = self._key_bytes
        blocks: list[int] = []
        node, offset = root, 0
        while offset + key_bytes <= len(text):
            child = node.children.get(self._wrap(text[offset : offset + key_bytes]))
            if child is None or child.block < 0:
                break
            # It begins its run: one that continues a run begun above was compared there.
            run = child.run
            assert run is not None
            found = run.match(text, offset, key_bytes)
            blocks += found
            count = len(found)
            node = run.nodes[count - 1]
            offset += count * key_bytes
        return blocks, node

    def _match_partial(self, node: PrefixNode, text: bytes) -> tuple[PrefixNode | None, int]:
        """The child or tail of `node` that shares most leading tokens with `text`, and how many."""
        best, best_tokens = None, 0
        first = text[:TOKEN_BYTES]
        if not first:
            return best, best_tokens
        for siblings in (node.tails, node.children):
            for _, child in zip(range(PARTIAL_CANDIDATES), reversed(siblings.values()), strict=False):
                if child.block >= 0 and child.tokens.startswith(first):
                    tokens = common_tokens(child.tokens, text)
                    if tokens > best_tokens:
                        best, best_tokens = child, tokens
        return best, best_tokens

    def _give_block(self, child: PrefixNode, node: PrefixNode, block: int) -> None:
        """Keep a block for a child or tail of `node` that has none; one that is known for something else stays that."""
        if child.block < 0 and block not in self._by_block:
            self._pool.keep(block)
            self._by_block[block] = child
            child.block = block
            node.resident_children += 1
            if node.tails:
                self._drop_superseded_tails(node, child.tokens)

    def _drop_superseded_tails(self, node: PrefixNode, text: bytes) -> None:
        """A tail whose tokens a longer sibling repeats would never be the best match again."""
        for end in range(TOKEN_BYTES, len(text), TOKEN_BYTES):
            tail = node.tails.pop(self._wrap(text[:end]), None)
            if tail is not None and tail.block >= 0:
                self._drop_bytes(tail)

    def _evict(self, oldest: int) -> int:
        """Pool callback: forget the least recently used cached block, or rather a cached leaf below it."""
        node = self._by_block[oldest]
        while node.resident_children:
            below = next((child for child in resident_below(node) if self._pool.is_cached(child.block)), None)
            if below is None:
                break
            node = below
        block = node.block
        self.forget(block)
        return block

    def _drop_bytes(self, node: PrefixNode) -> None:
        del self._by_block[node.block]
        self._pool.forget(node.block)
        node.block = -1
        if node.run is not None:
            node.run.lost_bytes(node)
        if node.parent is not None:
            node.parent.resident_children -= 1

    def _prune(self, node: PrefixNode) -> None:
        """Remove a node that nothing refers to, and then its parents if that leaves them useless."""
        while node.alive and not (node.block >= 0 or node.children or node.tails or node.holders):
            parent = node.parent
            if parent is None:
                del self._roots[node.tokens], self._versions[node.tokens]
                return
            siblings = parent.tails if len(node.tokens) < self._key_bytes else parent.children
            del siblings[self._wrap(node.tokens)]
            if node.run is not None:
                node.run.pop()  # without children, it is the last of its run
            node = parent

    def _new_node(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode:
        return PrefixNode(next(self._numbers), parent, tokens)

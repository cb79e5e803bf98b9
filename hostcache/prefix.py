"""Prompts that begin alike share the blocks of their beginning."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool
from .errors import BlockStateError, UsageError

__all__ = ["Namespace", "PrefixCache", "PrefixHit", "PrefixNode"]

TOKEN_BYTES = 4
"""Tokens travel as int32."""

PARTIAL_CANDIDATES = 64
"""Children looked at, newest first, for a partial match: bounds the cost under a prompt with thousands of them."""


@dataclass(frozen=True)
class Namespace:
    """Whose KV may be shared with whom: requests share only when every field is equal.

    Attributes:
        numerics: names everything that changes KV bytes (weights, activation mode, dense runtime, RoPE, codec).
        adapter: content id of a LoRA adapter, never its name.
        salt: secret of a tenant; tenants with different salts never share.
        prompt_version: version of the application's prompts, so that old ones can be invalidated.

    Raises:
        UsageError: a field is not valid Unicode text.
    """

    numerics: str
    adapter: str = ""
    salt: str = ""
    prompt_version: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise UsageError(f"{name} is {value!r}; it must be text without surrogates", name=name, value=value)

    def key(self) -> bytes:
        """The fields, each typed by its name and prefixed with its length, so that no two namespaces collide."""
        parts = []
        for name in ("numerics", "adapter", "salt", "prompt_version"):
            value = getattr(self, name).encode()
            parts.append(struct.pack("<II", len(name), len(value)) + name.encode() + value)
        return b"".join(parts)


@dataclass(eq=False)
class PrefixNode:
    """The tokens of one block behind all the tokens of its parents.

    A node outlives its bytes: it stays while children or running sequences refer to it, and gets bytes again
    when somebody recomputes them.

    Attributes:
        number: identity, 64-bit, never reused, independent of where the bytes lie.
        parent: the node in front; None for a root.
        tokens: int32 bytes of this node's tokens; a block full, or fewer for a tail; a root's namespace key.
        block: the block that holds the bytes, or -1.
        children: full nodes behind this one, by their tokens.
        tails: nodes with less than a block of tokens behind this one, by their tokens.
        holders: running sequences whose last published node this is.
        resident_children: children and tails that have bytes.
    """

    number: int
    parent: PrefixNode | None
    tokens: bytes
    block: int = -1
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    tails: dict[bytes, PrefixNode] = field(default_factory=dict)
    holders: int = 0
    resident_children: int = 0
    alive: bool = True


@dataclass(frozen=True)
class PrefixHit:
    """What is known of a prompt. The receiver owns one reference per block, the partial source included.

    Attributes:
        blocks: full blocks, in order.
        node: the node of the last of them (or the root): where publishing goes on.
        partial: a block whose first `partial_tokens` tokens fit behind `blocks`, or -1. It is kept, so whoever
            appends behind those tokens gets a private copy.
        partial_tokens: tokens of `partial` that match.
    """

    blocks: list[int]
    node: PrefixNode
    partial: int = -1
    partial_tokens: int = 0


class PrefixCache:
    """A tree of nodes, one per block of tokens, under one root per namespace.

    A node is found by its parent's identity and its own exact tokens (a dictionary per parent, keyed by the
    tokens themselves), so that a hash collision cannot splice a block behind a prefix it was not computed for.
    Nodes are published only after their KV has been computed. Eviction is leaf first, least recently used first.

    Args:
        pool: holds the blocks; the cache becomes its evictor.
        wrap: turns a node's token bytes into its dictionary key; tests pass one with a weak hash.

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

    def __init__(self, pool: BlockPool, wrap: Callable[[bytes], bytes] | None = None) -> None:
        self._pool = pool
        self._wrap = wrap or (lambda tokens: tokens)
        self._key_bytes = pool.block_tokens * TOKEN_BYTES
        self._roots: dict[bytes, PrefixNode] = {}
        self._versions: dict[bytes, str] = {}  # namespace key -> prompt version
        self._by_block: dict[int, PrefixNode] = {}
        self._next_number = 0
        pool.evict = self._evict

    @property
    def resident(self) -> int:
        """Blocks whose content the cache knows, used or not."""
        return len(self._by_block)

    @property
    def nodes(self) -> int:
        """Nodes in the tree, roots included: for tests and reports. O(nodes)."""
        return sum(1 for root in self._roots.values() for _ in _walk(root))

    def root(self, namespace: Namespace) -> PrefixNode:
        """The root of a namespace."""
        key = namespace.key()
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = self._new_node(None, key)
            self._versions[key] = namespace.prompt_version
        return root

    def match(self, namespace: Namespace, tokens: NDArray[np.int32]) -> PrefixHit:
        """Find the longest known beginning of a prompt, at most `len(tokens) - 1` tokens of it.

        One token is always left to compute: its logits are what the caller wants.

        Args:
            namespace: whose KV may be used.
            tokens: int32 `[n]`, the prompt.

        Returns:
            The hit; the caller owns its references (see `PrefixHit`) and one hold on its node
            (`release_node`).

        Raises:
            UsageError: the tokens are not int32.
        """
        key_bytes = self._key_bytes
        text = _bytes_of(tokens)[: max(len(tokens) - 1, 0) * TOKEN_BYTES]
        node = self.root(namespace)
        blocks: list[int] = []
        offset = 0
        while offset + key_bytes <= len(text):
            child = node.children.get(self._wrap(text[offset : offset + key_bytes]))
            if child is None or child.block < 0:
                break
            self._pool.acquire(child.block)
            blocks.append(child.block)
            node = child
            offset += key_bytes
        partial, matched = self._match_partial(node, text[offset : offset + key_bytes])
        node.holders += 1
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
        if not node.alive:  # its namespace was invalidated while the sequence ran
            return node
        text = _bytes_of(tokens)
        is_tail = len(text) < self._key_bytes
        if not text or len(text) > self._key_bytes:
            raise UsageError(f"a node holds 1..{self._pool.block_tokens} tokens, got {len(tokens)}", tokens=len(tokens))
        siblings = node.tails if is_tail else node.children
        child = siblings.get(self._wrap(text))
        if child is None:
            if is_tail and self._match_partial(node, text)[1] == len(tokens):
                return node  # a longer sibling holds these tokens already
            child = siblings[self._wrap(text)] = self._new_node(node, text)
        if child.block < 0 and not self._pool.is_kept(block):
            self._pool.keep(block)
            self._by_block[block] = child
            child.block = block
            node.resident_children += 1
            self._drop_superseded_tails(node, text)
        if is_tail:
            self._prune(child)  # a tail without bytes is of no use
            return node
        child.holders += 1
        self.release_node(node)
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

        New requests never hit what was forgotten; running sequences keep their blocks and finish.

        Returns:
            Blocks that were forgotten.
        """
        if namespace is not None:
            keys = [key for key in (namespace.key(),) if key in self._roots]
        else:
            keys = [key for key, version in self._versions.items() if prompt_version in (None, version)]
        forgotten = 0
        for key in keys:
            del self._versions[key]
            for node in list(_walk(self._roots.pop(key))):
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

    def check(self) -> None:
        """Prove that tree, block index and pool agree. O(nodes): for tests and idle moments.

        Raises:
            BlockStateError: what does not agree.
        """
        resident = {}
        for root in self._roots.values():
            for node in _walk(root):
                below = list(node.children.values()) + list(node.tails.values())
                if node.resident_children != sum(child.block >= 0 for child in below):
                    raise BlockStateError(f"node {node.number} miscounts its resident children", node=node.number)
                if node.block >= 0:
                    resident[node.block] = node
        if resident != self._by_block or any(not self._pool.is_kept(block) for block in resident):
            raise BlockStateError(f"{len(resident)} blocks in the tree, {len(self._by_block)} in the index")

    def _match_partial(self, node: PrefixNode, text: bytes) -> tuple[PrefixNode | None, int]:
        """The child or tail of `node` that shares most leading tokens with `text`, and how many."""
        best, best_tokens = None, 0
        first = text[:TOKEN_BYTES]
        if not first or not node.resident_children:
            return best, best_tokens
        for siblings in (node.tails, node.children):
            for _, child in zip(range(PARTIAL_CANDIDATES), reversed(siblings.values()), strict=False):
                if child.block >= 0 and child.tokens.startswith(first):
                    tokens = _common_tokens(child.tokens, text)
                    if tokens > best_tokens:
                        best, best_tokens = child, tokens
        return best, best_tokens

    def _drop_superseded_tails(self, node: PrefixNode, text: bytes) -> None:
        """A tail whose tokens a longer sibling repeats would never be the best match again."""
        if not node.tails:
            return
        for end in range(TOKEN_BYTES, len(text), TOKEN_BYTES):
            tail = node.tails.pop(self._wrap(text[:end]), None)
            if tail is not None and tail.block >= 0:
                self._drop_bytes(tail)

    def _evict(self, oldest: int) -> int:
        """Pool callback: forget the least recently used cached block, or rather a cached leaf below it."""
        node = self._by_block[oldest]
        while node.resident_children:
            below = next((child for child in _below(node) if self._pool.is_cached(child.block)), None)
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
            node = parent

    def _new_node(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode:
        self._next_number += 1
        return PrefixNode(self._next_number, parent, tokens)


def _bytes_of(tokens: NDArray[np.int32]) -> bytes:
    """Tokens as the tree holds them; any other type would make other tokens of the same bytes."""
    if tokens.dtype != np.int32:
        raise UsageError(f"tokens must be int32, got {tokens.dtype}: pass tokens.astype(np.int32)", dtype=tokens.dtype)
    return tokens.tobytes()


def _below(node: PrefixNode) -> list[PrefixNode]:
    """Resident children and tails."""
    return [child for child in (*node.tails.values(), *node.children.values()) if child.block >= 0]


def _walk(root: PrefixNode) -> list[PrefixNode]:
    """Every node of a tree, parents before children."""
    found = [root]
    for node in found:  # grows while it is walked
        found.extend(node.children.values())
        found.extend(node.tails.values())
    return found


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two runs of int32 tokens share."""
    size = min(len(left), len(right)) // TOKEN_BYTES
    for token in range(size):
        at = token * TOKEN_BYTES
        if left[at : at + TOKEN_BYTES] != right[at : at + TOKEN_BYTES]:
            return token
    return size

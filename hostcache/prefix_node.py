"""The prefix cache's tree: its nodes, the runs they are compared in, and what is found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError

__all__ = [
    "TOKEN_BYTES",
    "PrefixHit",
    "PrefixNode",
    "PrefixRun",
    "bytes_of",
    "common_beginning",
    "common_tokens",
    "resident_below",
    "walk",
]

TOKEN_BYTES = 4
"""Tokens travel as int32."""


@dataclass(eq=False, slots=True, init=False)
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
        alive: False when its namespace was invalidated.
        run: what it is compared in; None for roots and tails.
        place: where in its run it stands.
    """

    number: int
    parent: PrefixNode | None
    tokens: bytes
    block: int
    children: dict[bytes, PrefixNode]
    tails: dict[bytes, PrefixNode]
    holders: int
    resident_children: int
    alive: bool
    run: PrefixRun | None
    place: int

    def __init__(self, number: int, parent: PrefixNode | None, tokens: bytes) -> None:
        # There is one for each block that is ever filled; a generated __init__ takes a third longer.
        self.number = number
        self.parent = parent
        self.tokens = tokens
        self.block = -1
        self.children = {}
        self.tails = {}
        self.holders = 0
        self.resident_children = 0
        self.alive = True
        self.run = None
        self.place = 0


class PrefixRun:
    """A path of nodes, each a child of the one before, that a prompt is compared with in one go.

    A new node continues its parent's run if nothing does yet, and begins one otherwise. So the runs of a tree split its
    full nodes into paths, and a lookup needs a dictionary only where it changes from one run to another.

    Attributes:
        nodes: in order.
    """

    def __init__(self) -> None:
        self.nodes: list[PrefixNode] = []
        # Of the first nodes, all of which have bytes; the next lookup adds those that have come behind them.
        self._tokens = bytearray()
        self._blocks: list[int] = []

    def append(self, node: PrefixNode) -> None:
        """Go on with a child of the last node."""
        node.run, node.place = self, len(self.nodes)
        self.nodes.append(node)

    def pop(self) -> None:
        """Remove the last node, which has no bytes any more."""
        self.nodes.pop()

    def lost_bytes(self, node: PrefixNode) -> None:
        """One of the nodes has no bytes any more: what is behind it is not found until it has some again."""
        if node.place < len(self._blocks):
            del self._tokens[node.place * len(node.tokens) :], self._blocks[node.place :]

    def match(self, text: bytes, offset: int, key_bytes: int) -> list[int]:
        """The blocks of the run's first nodes, as far as they have bytes and hold what `text` has from `offset` on.

        Args:
            text: int32 bytes.
            offset: where the run's first node would begin.
            key_bytes: of a node's tokens.
        """
        if len(self._blocks) < len(self.nodes):
            self._catch_up()
        known, asked = len(self._blocks), (len(text) - offset) // key_bytes
        count = known if known < asked else asked
        tokens = self._tokens[: count * key_bytes]
        if not text.startswith(tokens, offset):
            count = common_tokens(tokens, text[offset : offset + len(tokens)]) * TOKEN_BYTES // key_bytes
        return self._blocks[:count]

    def agrees(self) -> bool:
        """Whether what is kept for comparing is what the nodes say. O(nodes): for tests and idle moments."""
        linked = all(node.run is self and node.place == place for place, node in enumerate(self.nodes))
        seen = self.nodes[: len(self._blocks)]
        tokens = b"".join(node.tokens for node in seen)
        return linked and self._tokens == tokens and self._blocks == [node.block for node in seen if node.block >= 0]

    def _catch_up(self) -> None:
        for node in self.nodes[len(self._blocks) :]:
            if node.block < 0:
                break
            self._tokens += node.tokens
            self._blocks.append(node.block)


@dataclass(eq=False, slots=True)  # frozen would set each field by a call, in every lookup
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


def bytes_of(tokens: NDArray[np.int32]) -> bytes:
    """Tokens as the tree holds them.

    Raises:
        UsageError: they are not int32; the bytes of any other type would be those of other tokens.
    """
    if tokens.dtype != np.int32:
        raise UsageError(f"tokens must be int32, got {tokens.dtype}: pass tokens.astype(np.int32)", dtype=tokens.dtype)
    return tokens.tobytes()


def resident_below(node: PrefixNode) -> list[PrefixNode]:
    """Resident children and tails."""
    return [child for child in (*node.tails.values(), *node.children.values()) if child.block >= 0]


def walk(root: PrefixNode) -> list[PrefixNode]:
    """Every node of a tree, parents before children."""
    found = [root]
    for node in found:  # grows while it is walked
        found.extend(node.children.values())
        found.extend(node.tails.values())
    return found


def common_tokens(left: bytes | bytearray, right: bytes) -> int:
    """Leading tokens that two runs of int32 tokens share."""
    return common_beginning(np.frombuffer(left, np.int32), np.frombuffer(right, np.int32))


def common_beginning(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """How many tokens two prompts have in common before they part."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size

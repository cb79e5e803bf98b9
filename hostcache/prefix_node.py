"""The prefix cache's tree: its nodes, the runs they are compared in, and what is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError

__all__ = ["TOKEN_BYTES", "PrefixHit", "PrefixNode", "PrefixRun", "bytes_of", "common_tokens", "resident_below", "walk"]

TOKEN_BYTES = 4
"""Tokens travel as int32."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """The tokens of one block behind all the tokens of its parents.

    A node outlives its bytes: it stays while children or running sequences refer to it, and gets bytes again
    when somebody recomputes them.

    Attributes:
        number: identity, 64-bit, never reused, independent of where the bytes lie.
        parent: the node in front; None for a root.
        tokens: int32 bytes of this node's tokens; a block full, or fewer for a tail; a root's namespace key.
        block: the block that holds the bytes, or -1; changed only through `set_block`.
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
    block: int = -1
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    tails: dict[bytes, PrefixNode] = field(default_factory=dict)
    holders: int = 0
    resident_children: int = 0
    alive: bool = True
    run: PrefixRun | None = None
    place: int = 0

    def set_block(self, block: int) -> None:
        """The bytes are in `block` from now on; -1: nowhere."""
        self.block = block
        if self.run is not None:
            self.run.set_block(self.place, block)


class PrefixRun:
    """A path of nodes, each a child of the one before, that a prompt is compared with in one go.

    A new node continues its parent's run if nothing does yet, and begins one otherwise. So the runs of a tree split its
    full nodes into paths, and a lookup needs a dictionary only where it changes from one run to another.

    Attributes:
        nodes: in order.
    """

    def __init__(self) -> None:
        self.nodes: list[PrefixNode] = []
        self._tokens = bytearray()  # of all nodes
        self._blocks: list[int] = []  # of all nodes; -1: no bytes
        self._resident = 0  # nodes in front of the first that has no bytes

    def append(self, node: PrefixNode) -> None:
        """Go on with a child of the last node; it has no bytes yet."""
        node.run, node.place = self, len(self.nodes)
        self.nodes.append(node)
        self._tokens += node.tokens
        self._blocks.append(-1)

    def pop(self) -> None:
        """Remove the last node, which has no bytes any more."""
        node = self.nodes.pop()
        del self._tokens[-len(node.tokens) :], self._blocks[-1]

    def set_block(self, place: int, block: int) -> None:
        """The node at `place` has its bytes in `block`; -1: nowhere."""
        blocks = self._blocks
        blocks[place] = block
        if block < 0:
            self._resident = min(self._resident, place)
        elif place == self._resident:
            while self._resident < len(blocks) and blocks[self._resident] >= 0:
                self._resident += 1

    def match(self, text: bytes, offset: int, key_bytes: int) -> list[int]:
        """The blocks of the run's first nodes, as far as they have bytes and hold what `text` has from `offset` on.

        Args:
            text: int32 bytes.
            offset: where the run's first node would begin.
            key_bytes: of a node's tokens.
        """
        count = min(self._resident, (len(text) - offset) // key_bytes)
        tokens = self._tokens[: count * key_bytes]
        if not text.startswith(tokens, offset):
            count = common_tokens(tokens, text[offset : offset + len(tokens)]) * TOKEN_BYTES // key_bytes
        return self._blocks[:count]

    def agrees(self) -> bool:
        """Whether what is kept for comparing is what the nodes say. O(nodes): for tests and idle moments."""
        blocks = [node.block for node in self.nodes]
        resident = next((place for place, block in enumerate(blocks) if block < 0), len(blocks))
        linked = all(node.run is self and node.place == place for place, node in enumerate(self.nodes))
        tokens = b"".join(node.tokens for node in self.nodes)
        return linked and self._tokens == tokens and (self._blocks, self._resident) == (blocks, resident)


class PrefixHit(NamedTuple):
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
    """Tokens as the tree holds them; any other type would make other tokens of the same bytes."""
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
    size = min(len(left), len(right)) // TOKEN_BYTES
    differs = np.frombuffer(left, np.int32, size) != np.frombuffer(right, np.int32, size)
    return int(differs.argmax()) if differs.any() else size

"""The prefix cache's tree: its nodes, what is found in it, and how tokens are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError

__all__ = ["TOKEN_BYTES", "PrefixHit", "PrefixNode", "bytes_of", "common_tokens", "resident_below", "walk"]

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


def common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two runs of int32 tokens share."""
    size = min(len(left), len(right)) // TOKEN_BYTES
    for token in range(size):
        at = token * TOKEN_BYTES
        if left[at : at + TOKEN_BYTES] != right[at : at + TOKEN_BYTES]:
            return token
    return size

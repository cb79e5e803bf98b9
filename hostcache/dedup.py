"""Prompts that arrive together and begin alike: one computes, the others wait for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .prefix import PrefixNode
from .request import Request

__all__ = ["ComingBlocks"]


class ComingBlocks:
    """The block that each running prompt will publish next, found by what is in front of it and its tokens.

    The key is that of the prefix cache (a node's number and the exact tokens behind it), so that whoever finds its own
    next block here will have it as a hit once the owner has computed it.

    Args:
        block_tokens: tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._owners: dict[tuple[int, bytes], Request] = {}

    def announce(self, request: Request) -> None:
        """Say what a running request publishes next, in place of what it said before."""
        self.withdraw(request)
        if request.node is None:
            return
        key = self._key(request.node, request.tokens[: request.shareable], request.published)
        if key is not None and self._owners.setdefault(key, request) is request:
            request.announced = key

    def withdraw(self, request: Request) -> None:
        """The request publishes nothing more for now."""
        if request.announced is not None:
            del self._owners[request.announced]
            request.announced = None

    def owner(self, node: PrefixNode, tokens: NDArray[np.int32], published: int) -> Request | None:
        """Who is computing the block behind `published` blocks of `tokens`, the last of them `node`; None: nobody."""
        key = self._key(node, tokens, published)
        return None if key is None else self._owners.get(key)

    def _key(self, node: PrefixNode, tokens: NDArray[np.int32], published: int) -> tuple[int, bytes] | None:
        block = tokens[published * self._block_tokens : (published + 1) * self._block_tokens]
        return (node.number, block.tobytes()) if len(block) == self._block_tokens else None

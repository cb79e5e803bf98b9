"""Blocks that running requests were promised."""

from __future__ import annotations

from collections import Counter

from .blocks import BlockPool

__all__ = ["Promises"]


class Promises:
    """Blocks that are kept for running requests, by the pool that they will come from.

    A codec's free memory is every codec's: what is promised of one takes extents from all. So the promises of other
    codecs count by whole extents, as far as they do not fit into extents that those codecs have in use anyway.

    Attributes:
        total: blocks, of whatever codec.
    """

    def __init__(self) -> None:
        self.total = 0
        self._blocks: Counter[BlockPool] = Counter()

    def of(self, pool: BlockPool) -> int:
        """Blocks promised out of a pool."""
        return self._blocks[pool]

    def change(self, pool: BlockPool, blocks: int) -> None:
        """So many more blocks are promised out of a pool, or fewer."""
        self.total += blocks
        self._blocks[pool] += blocks

    def missing(self, pool: BlockPool, blocks: int) -> int:
        """Blocks of a pool that are not there if `blocks` more are taken and all promises are kept; 0 or less: none."""
        extents = sum(other.extents_for(promised) for other, promised in self._blocks.items() if other is not pool)
        return blocks + self._blocks[pool] + extents * pool.per_extent - pool.available

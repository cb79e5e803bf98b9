"""Blocks that something outside still reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["Fence", "FencedPool"]


class FencedPool(Protocol):
    """What a fence asks of a pool; `BlockPool` is one."""

    def raise_fence(self, block: int) -> None:
        """One more reader of a block."""

    def lower_fence(self, block: int) -> None:
        """One reader fewer."""


class Fence:
    """Holds blocks back from reuse while something outside still reads them. A context manager; made by the pool.

    The ids are copied: a table that changes later does not change what the fence protects.
    """

    def __init__(self, pool: FencedPool, blocks: Iterable[int]) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        try:
            for block in blocks:
                pool.raise_fence(int(block))
                self._blocks.append(int(block))
        except BaseException:  # ids may come from anywhere, a generator that raises included
            self.release()
            raise

    def release(self) -> None:
        """The reader is done. Safe to call twice."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            self._pool.lower_fence(block)

    def __enter__(self) -> Fence:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

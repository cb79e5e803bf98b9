"""What a gather plan reads of one codec's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hostcache.block_layout import BlockLayout

__all__ = ["GatherPart"]


@dataclass(frozen=True, eq=False)
class GatherPart:
    """What is read of the blocks of one codec.

    Attributes:
        rows: how a block's rows lie.
        runs: int64 `[runs, 4]`, C-contiguous: byte offset of a block in the pool; sequence, first token and tokens in
            the layout. A run's tokens are of one block, in which they begin at the first one's place modulo
            `block_tokens`; it is copied for each head, K and V.
        unit_bytes: the step from a block's id to the next one's.
    """

    rows: BlockLayout
    runs: NDArray[np.int64]
    unit_bytes: int

    @property
    def ids(self) -> NDArray[np.int64]:
        """Block id of each run: int64 `[runs]`."""
        return self.runs[:, 0] // self.unit_bytes

    @cached_property
    def blocks(self) -> list[int]:
        """Each block that is read, once, in ascending order."""
        blocks: list[int] = np.unique(self.ids).tolist()
        return blocks

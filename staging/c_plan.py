"""A gather plan as C takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hostcache.block_layout import BlockLayout

from ._gather import ffi
from .gather_part import GatherPart
from .layout import MASKED, StagingLayout

if TYPE_CHECKING:
    from hostcache._cffi import CData

__all__ = ["CPlan", "c_plan"]

_HIDDEN_MARK = int(MASKED.view(np.uint16))


class CPlan:
    """A plan's struct, and what it points to, which it does not keep alive.

    Attributes:
        struct: `rp_plan *`.
        checked: the cache that the plan was found to fit; None: none yet.
    """

    def __init__(self, struct: CData, kept: Sequence[object]) -> None:
        self.struct = struct
        self.checked: object = None
        self._kept = kept


def c_plan(layout: StagingLayout, parts: Sequence[GatherPart], tails: NDArray[np.int64]) -> CPlan:
    """The struct of a plan; a few microseconds."""
    c_runs = [ffi.from_buffer("int64_t[]", part.runs) for part in parts]
    c_parts = ffi.new(
        "rp_part[]", [(_rows(part.rows), runs, len(part.runs)) for part, runs in zip(parts, c_runs, strict=True)]
    )
    c_tails = ffi.from_buffer("int64_t[]", tails)
    places = vars(layout.keys_place), vars(layout.values_place)
    offsets = layout.keys_offset, layout.values_offset
    struct = ffi.new("rp_plan *", (*places, *offsets, c_parts, len(parts), c_tails, len(tails), _HIDDEN_MARK))
    return CPlan(struct, [c_runs, c_parts, c_tails])


def _rows(layout: BlockLayout) -> dict[str, int]:
    geometry = layout.geometry
    return {
        "layer_bytes": layout.layer_bytes,
        "kv_bytes": layout.kv_bytes,
        "row_bytes": layout.row_bytes,
        "block_tokens": geometry.block_tokens,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "codec": layout.codec.code,
    }

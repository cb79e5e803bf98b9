"""How the elements of a K or V row are stored: fp16, or small integers behind a scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .errors import UsageError

__all__ = ["CODECS", "FP16", "INT4", "INT8", "Codec", "codec_named"]

SCALE_BYTES = 2
"""A scale is fp16."""


@dataclass(frozen=True)
class Codec:
    """One way to store a token's row of one head, by which tokens never touch each other.

    A scale depends on its own token, head and group alone. So a block may be appended to, computed in chunks, shared
    and copied, and its bytes are the same whichever way they came about.

    Attributes:
        name: `"fp16"`, `"int8"` or `"int4"`.
        code: the number that C knows it by (`_codec.h`).
        bits: of an element.
        blocks_per_extent: blocks in the memory of one fp16 block.
        group_limit: most elements that share a scale; 0: as many as a head has, or no scale at all for fp16.
        rotated: rows are stored multiplied by a Walsh-Hadamard matrix, which spreads outliers over their neighbours.

    Example:
        >>> from hostcache.codec import INT4, INT8
        >>> INT8.group(head_dim=128), INT4.group(head_dim=128), INT4.group(head_dim=80)
        (128, 32, 80)
    """

    name: str
    code: int
    bits: int
    blocks_per_extent: int
    group_limit: int = 0
    rotated: bool = False

    @property
    def scaled(self) -> bool:
        """Whether rows have scales; fp16 has none."""
        return self.bits < 16

    def group(self, head_dim: int) -> int:
        """Elements that share a scale: `group_limit` where it divides a head, else the whole head."""
        return self.group_limit if self.group_limit and head_dim % self.group_limit == 0 else head_dim

    def rotation(self, head_dim: int) -> int:
        """Elements that are rotated together: the largest power of two that divides a head; 1: no rotation."""
        return head_dim & -head_dim if self.rotated else 1


FP16 = Codec("fp16", code=0, bits=16, blocks_per_extent=1)
"""Elements as they are, rounded to nearest even."""

INT8 = Codec("int8", code=1, bits=8, blocks_per_extent=2, rotated=True)
"""Integers -127..127 behind one scale a head: half the memory."""

INT4 = Codec("int4", code=2, bits=4, blocks_per_extent=4, group_limit=32, rotated=True)
"""One of 16 levels behind a scale for 32 elements: a quarter of the memory, and an eighth of that for scales."""

CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in (FP16, INT8, INT4)})
"""By name, the richest first."""


def codec_named(name: str) -> Codec:
    """The codec of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        return CODECS[name]
    except (KeyError, TypeError):  # whoever has it from JSON may have a list
        raise UsageError(f"there is no KV codec {name!r}: choose one of {', '.join(CODECS)}", name=name) from None

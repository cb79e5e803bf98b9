"""From block tables to the copies that make them flat: once per step, for every layer, K and V."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hostcache.block_layout import BlockLayout
from hostcache.codec import CODECS, FP16
from hostcache.errors import NoBucket, UsageError
from hostcache.geometry import KVGeometry

from .c_plan import CPlan, c_plan
from .gather_part import GatherPart
from .layout import FP16_BYTES, StagingLayout

__all__ = ["GatherPlan"]


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """The copies and clears that stage some sequences' K and V, the same for every layer.

    Copies are never merged: a block holds all its layers, so the same head's rows of two neighbouring blocks are a
    block apart in the pool, and two heads of one block are a bucket apart in the layout.

    Attributes:
        geometry: of the cache the plan reads.
        layout: where the copies go.
        units: of the pool that the plan was checked against.
        unit_bytes: bytes of each.
        parts: one for each codec, in the order of their codes.
        tails: int64 `[runs, 3]`, C-contiguous: head, first token, tokens; what is cleared: what lies behind the valid
            ones, up to the layout's end, and the hidden ones.
        hidden: int64 `[batch, 2]`: valid tokens of each sequence, from and to, that no row sees.

    Example:
        >>> import numpy as np
        >>> from hostcache import KVGeometry
        >>> from staging import GatherPlan, StagingLayout
        >>> geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8)  # 256 bytes of K, then of V, in a block
        >>> layout = StagingLayout(batch=1, kv_heads=1, tokens=32, rows=4, head_dim=8, mask_rows=4)
        >>> tables, lengths = np.array([[5, 2]], np.int32), np.array([20], np.int32)
        >>> plan = GatherPlan.build(geometry, 8, tables, lengths, layout)
        >>> plan.parts[0].runs.tolist()  # block 5 whole, then 4 tokens of block 2
        [[2560, 0, 0, 16], [1024, 0, 16, 4]]
        >>> plan.tails.tolist()  # 12 tokens to clear
        [[0, 20, 12]]
    """

    geometry: KVGeometry
    layout: StagingLayout
    units: int
    unit_bytes: int
    parts: tuple[GatherPart, ...]
    tails: NDArray[np.int64]
    hidden: NDArray[np.int64]

    @classmethod
    def build(
        cls,
        geometry: KVGeometry,
        units: int,
        tables: NDArray[np.int32],
        lengths: NDArray[np.int32],
        layout: StagingLayout,
        *,
        unit_bytes: int | None = None,
        codecs: NDArray[np.uint8] | None = None,
        hidden: NDArray[np.int64] | None = None,
    ) -> GatherPlan:
        """Plan the gather of `layout.batch` sequences.

        Args:
            geometry: of the cache.
            units: in the pool; every id is below. In a pool for fp16 alone they are its blocks.
            tables: int32 `[batch, width]`; block ids, the first `ceil(length / block_tokens)` of a row valid.
            lengths: int32 `[batch]`; tokens of each sequence, at most `layout.tokens`.
            layout: where they go.
            unit_bytes: bytes of a unit of the pool; None: those of an fp16 block.
            codecs: uint8 `[batch]`; the code of each sequence's codec. None: fp16.
            hidden: int64 `[batch, 2]`; tokens of each sequence, from and to, that no row sees: they are cleared, and
                not read. None: every row sees all, or a mask says what.

        Raises:
            NoBucket: a sequence is longer than the layout's bucket.
            UsageError: a table is too short, an id is outside the pool, the shapes do not fit each other, or a dtype is
                another.
        """
        hidden = np.zeros((layout.batch, 2), np.int64) if hidden is None else hidden
        _check_types(tables=(tables, np.int32), lengths=(lengths, np.int32), hidden=(hidden, np.int64))
        if codecs is not None:
            _check_types(codecs=(codecs, np.uint8))
        valid = lengths.astype(np.int64)
        _check_shapes(geometry, tables, valid, layout, codecs)
        _check_hidden(hidden, valid)
        unit_bytes = geometry.block_bytes if unit_bytes is None else unit_bytes
        runs = _runs(geometry, tables, valid, hidden)
        parts = []
        for codec in CODECS.values() if codecs is not None else (FP16,):
            own = runs if codecs is None else runs[codecs[runs[:, 1]] == codec.code]
            if len(own) or codecs is None:
                rows = BlockLayout(geometry, codec)
                _check_ids(own[:, 0], units, rows.block_bytes, unit_bytes)
                parts.append(GatherPart(rows, own * np.array([unit_bytes, 1, 1, 1]), unit_bytes))
        return cls(geometry, layout, units, unit_bytes, tuple(parts), _tails(valid, hidden, layout), hidden)

    @cached_property
    def in_c(self) -> CPlan:
        """The plan as C takes it."""
        return c_plan(self.layout, self.parts, self.tails)

    def without(self, kept: NDArray[np.int64], staged: NDArray[np.int32]) -> GatherPlan:
        """The part of the plan that brings in what is not there yet.

        Args:
            kept: int64 `[batch]`; tokens of each sequence that are there.
            staged: int32 `[batch]`; tokens that are there, right or wrong: behind the valid ones they must be cleared,
                as the hidden ones are each time.
        """
        parts = []
        for part in self.parts:
            runs = part.runs.copy()
            skipped = np.maximum(kept[runs[:, 1]] - runs[:, 2], 0)  # of a run's tokens, those in front
            runs[:, 2] += skipped
            runs[:, 3] -= skipped
            parts.append(GatherPart(part.rows, runs[runs[:, 3] > 0], part.unit_bytes))
        tails = self.tails.copy()
        behind = tails[:, 1] + tails[:, 2] == self.layout.tokens
        tails[behind, 2] = staged[tails[behind, 0] // self.geometry.kv_heads] - tails[behind, 1]
        return replace(self, parts=tuple(parts), tails=np.ascontiguousarray(tails[tails[:, 2] > 0]))


def _runs(
    geometry: KVGeometry, tables: NDArray[np.int32], lengths: NDArray[np.int64], hidden: NDArray[np.int64]
) -> NDArray[np.int64]:
    """What is read of each block, int64 `[runs, 4]`: its id, the sequence, first token, tokens; no run is empty.

    Raises:
        UsageError: a table is too short.
    """
    per_sequence = -(-lengths // geometry.block_tokens)
    if per_sequence.max(initial=0) > tables.shape[1]:
        raise UsageError(
            f"a context of {lengths.max()} tokens needs {per_sequence.max()} blocks, "
            f"its table holds {tables.shape[1]}: append before planning",
            needed=int(per_sequence.max()),
            width=tables.shape[1],
        )
    # One entry per block: whose it is, and its place in that table.
    sequence = np.repeat(np.arange(len(lengths)), per_sequence)
    nth = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    ids = tables[sequence, nth].astype(np.int64)
    first = nth * geometry.block_tokens
    tokens = np.minimum(geometry.block_tokens, lengths[sequence] - first)
    if hidden.any():
        # Of each block, what lies before the hidden tokens, and what lies behind them.
        starts = np.stack([first, np.maximum(first, hidden[sequence, 1])], axis=1)
        ends = np.stack([np.minimum(first + tokens, hidden[sequence, 0]), first + tokens], axis=1)
        block, part = np.nonzero(starts < ends)
        first, tokens = starts[block, part], (ends - starts)[block, part]
        sequence, ids = sequence[block], ids[block]
    return np.stack([ids, sequence, first, tokens], axis=1)


def _tails(lengths: NDArray[np.int64], hidden: NDArray[np.int64], layout: StagingLayout) -> NDArray[np.int64]:
    """What lies behind the valid tokens of every head, and what is hidden; no run is empty."""
    head, valid = np.arange(layout.heads), np.repeat(lengths, layout.kv_heads)
    runs = np.stack([head, valid, layout.tokens - valid], axis=1)[valid < layout.tokens]
    if hidden.any():
        start, end = np.repeat(hidden, layout.kv_heads, axis=0).T
        runs = np.concatenate([runs, np.stack([head, start, end - start], axis=1)[start < end]])
    return np.ascontiguousarray(runs)


def _check_ids(ids: NDArray[np.int64], units: int, block_bytes: int, unit_bytes: int) -> None:
    """Refuse a block that does not lie in the pool as a whole."""
    highest = units - -(-block_bytes // unit_bytes)
    if len(ids) and not (ids.min() >= 0 and ids.max() <= highest):
        raise UsageError(
            f"block ids {ids.min()}..{ids.max()} are outside a pool of {units} blocks",
            lowest=int(ids.min()),
            highest=int(ids.max()),
            units=units,
        )


def _check_hidden(hidden: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    if hidden.shape != (len(lengths), 2):
        raise UsageError(f"{len(lengths)} sequences need hidden [{len(lengths)}, 2], got {hidden.shape}")
    bounds = np.column_stack([np.zeros_like(lengths), hidden, lengths])
    for i in np.flatnonzero((np.diff(bounds, axis=1) < 0).any(axis=1)):
        raise UsageError(
            f"tokens {hidden[i, 0]} to {hidden[i, 1]} of sequence {i} cannot be hidden: it has {lengths[i]}",
            sequence=int(i),
            hidden=hidden[i].tolist(),
            length=int(lengths[i]),
        )


def _check_types(**arrays: tuple[NDArray[np.generic], type[np.generic]]) -> None:
    """Refuse what C or an index would read as other numbers than it says."""
    for name, (array, dtype) in arrays.items():
        if array.dtype != dtype:
            raise UsageError(f"{name} must be {np.dtype(dtype).name}, got {array.dtype}", name=name, dtype=array.dtype)


def _check_shapes(
    geometry: KVGeometry,
    tables: NDArray[np.int32],
    lengths: NDArray[np.int64],
    layout: StagingLayout,
    codecs: NDArray[np.uint8] | None,
) -> None:
    """Refuse what would make a copy read or write outside its memory."""
    token_bytes = layout.head_dim * FP16_BYTES
    cache_shape = (geometry.kv_heads, geometry.head_dim * geometry.itemsize)
    if cache_shape != (layout.kv_heads, token_bytes):
        raise UsageError(
            f"the layout has {layout.kv_heads} heads of {token_bytes} bytes, the cache "
            f"{geometry.kv_heads} of {geometry.head_dim * geometry.itemsize}",
            layout=layout,
            geometry=geometry,
        )
    if tables.ndim != 2 or lengths.shape != (layout.batch,) or len(tables) != layout.batch:
        raise UsageError(
            f"{layout.batch} sequences need tables [{layout.batch}, width] and lengths [{layout.batch}], "
            f"got {tables.shape} and {lengths.shape}",
            tables=tables.shape,
            lengths=lengths.shape,
        )
    if codecs is not None and (codecs.shape != (layout.batch,) or codecs.max(initial=0) >= len(CODECS)):
        raise UsageError(
            f"{layout.batch} sequences need as many codes of a codec, below {len(CODECS)}, got {codecs.tolist()}",
            codecs=codecs.tolist(),
        )
    if lengths.min(initial=0) < 0:
        raise UsageError(f"a length is negative: {lengths.min()}", length=int(lengths.min()))
    if lengths.max(initial=0) > layout.tokens:
        raise NoBucket(
            f"a context of {lengths.max()} tokens does not fit the bucket of {layout.tokens}: take a larger one",
            tokens=int(lengths.max()),
            largest=layout.tokens,
        )

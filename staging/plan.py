"""From block tables to the copies that make them flat: once per step, for every layer, K and V."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import NoBucket, UsageError
from hostcache.geometry import KVGeometry

from .layout import FP16_BYTES, StagingLayout

__all__ = ["GatherPlan"]


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """The copies and clears that stage some sequences' K; shift the source by a constant for V or another layer.

    Copies are never merged: a block holds all its layers, so the same head's rows of two neighbouring blocks are
    `geometry.block_bytes` apart in the pool, and two heads of one block are a bucket apart in the layout.

    Attributes:
        geometry: of the cache the plan reads.
        layout: where the copies go.
        pool_blocks: blocks of the pool the plan was checked against.
        copies: int64 `[copies, 4]`, C-contiguous: source offset in the pool for K of layer 0; head, first token and
            tokens in the layout. A block's heads follow each other: they are neighbours in the pool.
        tails: int64 `[runs, 3]`, C-contiguous: head, first token, tokens; what is cleared: what lies behind the valid
            ones, up to the layout's end, and the hidden ones.
        blocks: each block that is read, once.
        hidden: int64 `[batch, 2]`: valid tokens of each sequence, from and to, that no row sees.

    Example:
        >>> import numpy as np
        >>> from hostcache import KVGeometry
        >>> from staging import GatherPlan, StagingLayout
        >>> geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8)  # 256 bytes of K, then of V, in a block
        >>> layout = StagingLayout(batch=1, kv_heads=1, tokens=32, rows=4, head_dim=8, mask_rows=4)
        >>> tables, lengths = np.array([[5, 2]], np.int32), np.array([20], np.int32)
        >>> plan = GatherPlan.build(geometry, 8, tables, lengths, layout)
        >>> plan.copies.tolist()  # block 5 whole, then 4 tokens of block 2
        [[2560, 0, 0, 16], [1024, 0, 16, 4]]
        >>> plan.tails.tolist()  # 12 tokens to clear
        [[0, 20, 12]]
    """

    geometry: KVGeometry
    layout: StagingLayout
    pool_blocks: int
    copies: NDArray[np.int64]
    tails: NDArray[np.int64]
    blocks: list[int]
    hidden: NDArray[np.int64]

    @classmethod
    def build(
        cls,
        geometry: KVGeometry,
        pool_blocks: int,
        tables: NDArray[np.int32],
        lengths: NDArray[np.int32],
        layout: StagingLayout,
        *,
        hidden: NDArray[np.int64] | None = None,
    ) -> GatherPlan:
        """Plan the gather of `layout.batch` sequences.

        Args:
            geometry: of the cache.
            pool_blocks: blocks in the pool; every id is below.
            tables: int32 `[batch, width]`; block ids, the first `ceil(length / block_tokens)` of a row valid.
            lengths: int32 `[batch]`; tokens of each sequence, at most `layout.tokens`.
            layout: where they go.
            hidden: int64 `[batch, 2]`; tokens of each sequence, from and to, that no row sees: they are cleared, and
                not read. None: every row sees all, or a mask says what.

        Raises:
            NoBucket: a sequence is longer than the layout's bucket.
            UsageError: a table is too short, an id is outside the pool, or the shapes do not fit each other.
        """
        valid = lengths.astype(np.int64)
        per_sequence = -(-valid // geometry.block_tokens)
        _check_shapes(geometry, tables, valid, layout)
        if per_sequence.max(initial=0) > tables.shape[1]:
            raise UsageError(
                f"a context of {valid.max()} tokens needs {per_sequence.max()} blocks, "
                f"its table holds {tables.shape[1]}: append before planning",
                needed=int(per_sequence.max()),
                width=tables.shape[1],
            )

        # One entry per block: whose it is, and its place in that table.
        sequence = np.repeat(np.arange(layout.batch), per_sequence)
        nth = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
        ids = tables[sequence, nth].astype(np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < pool_blocks):
            raise UsageError(
                f"block ids {ids.min()}..{ids.max()} are outside a pool of {pool_blocks} blocks",
                lowest=int(ids.min()),
                highest=int(ids.max()),
                pool_blocks=pool_blocks,
            )

        first = nth * geometry.block_tokens
        start, tokens = first, np.minimum(geometry.block_tokens, valid[sequence] - first)
        if hidden is None:
            hidden = np.zeros((layout.batch, 2), np.int64)
        else:
            _check_hidden(hidden, valid)
            # Of each block, what lies before the hidden tokens, and what lies behind them.
            starts = np.stack([first, np.maximum(first, hidden[sequence, 1])], axis=1)
            ends = np.stack([np.minimum(first + tokens, hidden[sequence, 0]), first + tokens], axis=1)
            block, part = np.nonzero(starts < ends)
            start, tokens = starts[block, part], (ends - starts)[block, part]
            sequence, first, ids = sequence[block], first[block], ids[block]

        token_bytes = geometry.row_bytes // geometry.block_tokens
        head = np.arange(geometry.kv_heads)
        copies = np.empty((len(ids), geometry.kv_heads, 4), np.int64)
        source = ids * geometry.block_bytes + (start - first) * token_bytes
        copies[..., 0] = source[:, None] + head * geometry.row_bytes
        copies[..., 1] = sequence[:, None] * geometry.kv_heads + head
        copies[..., 2] = start[:, None]
        copies[..., 3] = tokens[:, None]
        tails = _tails(valid, hidden, layout)
        return cls(geometry, layout, pool_blocks, copies.reshape(-1, 4), tails, np.unique(ids).tolist(), hidden)


def _tails(lengths: NDArray[np.int64], hidden: NDArray[np.int64], layout: StagingLayout) -> NDArray[np.int64]:
    """What lies behind the valid tokens of every head, and what is hidden; no run is empty."""
    head, valid = np.arange(layout.heads), np.repeat(lengths, layout.kv_heads)
    runs = np.stack([head, valid, layout.tokens - valid], axis=1)[valid < layout.tokens]
    if hidden.any():
        start, end = np.repeat(hidden, layout.kv_heads, axis=0).T
        runs = np.concatenate([runs, np.stack([head, start, end - start], axis=1)[start < end]])
    return np.ascontiguousarray(runs)


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


def _check_shapes(
    geometry: KVGeometry, tables: NDArray[np.int32], lengths: NDArray[np.int64], layout: StagingLayout
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
    if lengths.min(initial=0) < 0:
        raise UsageError(f"a length is negative: {lengths.min()}", length=int(lengths.min()))
    if lengths.max(initial=0) > layout.tokens:
        raise NoBucket(
            f"a context of {lengths.max()} tokens does not fit the bucket of {layout.tokens}: take a larger one",
            tokens=int(lengths.max()),
            largest=layout.tokens,
        )

"""Cutting a step into launches: decode rows batched per bucket, prompt chunks in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DimensionTooLarge, UsageError
from hostcache.geometry import KVGeometry
from staging import Buckets, GatherPlan, StagingBuffer, StagingLayout

from .attention import AttentionBatch
from .device import MASKED, MAX_DIMENSION, ROW_MULTIPLE

__all__ = ["TILE_TOKENS", "Launch", "LaunchPlanner"]

TILE_TOKENS = 64
"""Query tokens of a prompt chunk that share a launch."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One job's share of a step, the same for every layer: `batch` sequences with `tile` query tokens each.

    Row r of a KV head is query token `r // group` and query head `r % group` of its group; the rows that pad to
    `layout.rows` repeat the last token's mask, so that none of them sees nothing, and their results are dropped.

    Attributes:
        plan: how K and V are gathered.
        lengths: int32 `[batch]`; tokens each sequence holds up to the tile's last token.
        rows: int64 `[batch, tile]`; rows of the step's q and out.
        group: query heads per KV head.
    """

    plan: GatherPlan
    lengths: NDArray[np.int32]
    rows: NDArray[np.int64]
    group: int

    def write_query(self, buffer: StagingBuffer, q: NDArray[np.float32]) -> None:
        """Put the launch's rows of q `[rows, heads, head_dim]` in place, scaled by `head_dim ** -0.5`, as fp16."""
        layout = self.plan.layout
        batch, tile = self.rows.shape
        scaled = q[self.rows] * np.float32(layout.head_dim**-0.5)  # [batch, tile, heads, head_dim]
        by_head = scaled.reshape(batch, tile, layout.kv_heads, self.group, layout.head_dim).swapaxes(1, 2)
        used = tile * self.group
        with np.errstate(over="ignore"):  # beyond fp16 is infinity, as in the cache
            buffer.query[:, :used] = by_head.reshape(layout.heads, used, layout.head_dim)
        buffer.query[:, used:] = 0

    def write_mask(self, buffer: StagingBuffer) -> None:
        """Hide from each row what is behind its own token.

        The graph compiled for a board carries a decode batch's mask in an extra channel of K; here it is an operand.
        """
        layout = self.plan.layout
        tile = self.rows.shape[1]
        token = np.minimum(np.arange(layout.mask_rows) // self.group, tile - 1)
        seen = self.lengths[:, np.newaxis] - tile + 1 + token  # [batch, mask_rows]: tokens the row sees
        everyone = int(seen.min())
        position = np.arange(everyone, layout.tokens)
        hidden = position[:, np.newaxis] >= seen[:, np.newaxis]
        mask = buffer.mask
        mask[:, :everyone] = 0
        mask[:, everyone:] = np.where(hidden, MASKED, np.float16(0))

    def read_out(self, buffer: StagingBuffer, out: NDArray[np.float32]) -> None:
        """Put the buffer's result into the launch's rows of out `[rows, heads, head_dim]`."""
        layout = self.plan.layout
        batch, tile = self.rows.shape
        by_head = buffer.out[:, : tile * self.group].reshape(batch, layout.kv_heads, tile, -1)
        out[self.rows] = by_head.swapaxes(1, 2).reshape(batch, tile, -1, layout.head_dim)


class _Part(NamedTuple):
    """Consecutive rows of one sequence that share a launch."""

    sequence: int
    first: int  # row of the step's q
    rows: int
    length: int  # tokens the sequence holds up to and including the last of these rows


class LaunchPlanner:
    """Cuts steps into launches that fit one size of staging buffer.

    A tile needs only the context up to its own last token, so that the tiles at the start of a long prompt take a
    small bucket. Every tile gathers for itself: that costs a few percent of its arithmetic, and keeps no state
    between launches.

    Args:
        geometry: of the cache.
        pool_blocks: blocks in its pool.
        heads: query heads, a multiple of the KV heads.
        buckets: lengths that contexts are padded to.

    Attributes:
        buffer_bytes: bytes a staging buffer needs: those of a full tile over the largest bucket.

    Raises:
        UsageError: the heads do not fit the cache, or its elements are not fp16.
        DimensionTooLarge: a bucket, or the rows of a tile, are beyond `MAX_DIMENSION`.
    """

    def __init__(self, geometry: KVGeometry, pool_blocks: int, heads: int, buckets: Buckets) -> None:
        if heads < 1 or heads % geometry.kv_heads:
            raise UsageError(
                f"{heads} query heads are not a multiple of {geometry.kv_heads} KV heads",
                heads=heads,
                kv_heads=geometry.kv_heads,
            )
        if geometry.itemsize != 2:
            raise UsageError(f"the NPU reads fp16, got itemsize {geometry.itemsize}", itemsize=geometry.itemsize)
        self._geometry = geometry
        self._pool_blocks = pool_blocks
        self._group = heads // geometry.kv_heads
        self._buckets = buckets
        largest = self._layout(batch=1, tile=TILE_TOKENS, tokens=buckets.largest)
        if max(largest.mask_shape) > MAX_DIMENSION:
            raise DimensionTooLarge(
                f"a bucket of {largest.tokens} tokens and a tile of {largest.rows} rows: the NPU's registers end "
                f"at {MAX_DIMENSION}",
                tokens=largest.tokens,
                rows=largest.rows,
                limit=MAX_DIMENSION,
            )
        self.buffer_bytes = largest.nbytes

    def plan(self, batch: AttentionBatch, sequences: NDArray[np.int64]) -> list[Launch]:
        """Cut some sequences of a step: each tile of several rows is a launch, single rows share one per bucket.

        Args:
            batch: the step.
            sequences: int64; which of its sequences to plan.

        Raises:
            NoBucket: a sequence is longer than the largest bucket.
            UsageError: a table is too short or names a block outside the pool.
        """
        launches = []
        singles: dict[int, list[_Part]] = {}  # by bucket
        for sequence in sequences.tolist():
            for part in _parts(batch, sequence):
                if part.rows > 1:
                    launches.append(self._launch(batch, [part]))
                else:
                    singles.setdefault(self._buckets.fit(part.length), []).append(part)
        for bucket, parts in sorted(singles.items()):
            most = self._most_singles(bucket)
            for start in range(0, len(parts), most):
                launches.append(self._launch(batch, parts[start : start + most]))  # noqa: PERF401 - reads as above
        return launches

    def _launch(self, batch: AttentionBatch, parts: list[_Part]) -> Launch:
        """One launch of parts that have the same number of rows and the same bucket."""
        tile = parts[0].rows
        layout = self._layout(len(parts), tile, self._buckets.fit(parts[0].length))
        lengths = np.array([part.length for part in parts], np.int32)
        tables = batch.tables[[part.sequence for part in parts]]
        first = np.array([part.first for part in parts], np.int64)
        plan = GatherPlan.build(self._geometry, self._pool_blocks, tables, lengths, layout)
        return Launch(plan, lengths, first[:, np.newaxis] + np.arange(tile), self._group)

    def _most_singles(self, tokens: int) -> int:
        """Sequences of one row each that fit a buffer at this bucket."""
        alone = self._layout(batch=1, tile=1, tokens=tokens).nbytes  # together they pad less
        return min(self.buffer_bytes // alone, MAX_DIMENSION // self._geometry.kv_heads)

    def _layout(self, batch: int, tile: int, tokens: int) -> StagingLayout:
        geometry = self._geometry
        rows = -(-tile * self._group // ROW_MULTIPLE) * ROW_MULTIPLE
        mask_rows = 1 if tile == 1 else rows
        return StagingLayout(batch, geometry.kv_heads, tokens, rows, geometry.head_dim, mask_rows)


def _parts(batch: AttentionBatch, sequence: int) -> Iterator[_Part]:
    """A sequence's rows, `TILE_TOKENS` at a time."""
    start, end = (int(row) for row in batch.query_starts[sequence : sequence + 2])
    before = int(batch.context_lens[sequence]) - (end - start)  # tokens in front of the step's own
    for first in range(start, end, TILE_TOKENS):
        last = min(first + TILE_TOKENS, end)
        yield _Part(sequence, first, last - first, before + last - start)

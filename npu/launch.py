"""Cutting a step into launches: decode rows batched per bucket, prompt chunks in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.attention_work import PaddedTiles
from hostcache.block_layout import BlockLayout
from hostcache.codec import CODECS
from hostcache.errors import DimensionTooLarge, UsageError
from hostcache.geometry import KVGeometry
from staging import MASKED, Buckets, GatherPlan, StagingBuffer, StagingLayout

from .attention import AttentionBatch
from .canary import CANARY_ROWS, CANARY_TOKENS, Canary
from .cost_model import Work
from .device import MAX_DIMENSION, ROW_MULTIPLE
from .host_share import Share
from .parts import Part, parts_of

__all__ = ["BATCHES", "TILES", "Cut", "Launch", "LaunchPlanner", "capacity"]

TILES = (16, 64)
"""Query tokens of a prompt chunk that share a launch, at most; a graph is compiled for each size."""

BATCHES = (1, 2, 4, 8, 16)
"""Sequences with one query row each that share a launch; a graph is compiled for each size."""


STAGING_ROWS = 20
"""Query rows whose arithmetic takes as long as staging their context does: between 14, on the emulated NPU (the demo's
model), and 27, on an RK3588 by published figures (see `npu.cost_model.PUBLISHED`); three query heads to a KV head."""


def capacity(bucket: int) -> int:
    """Tokens of context that a bucket holds."""
    return bucket - CANARY_TOKENS


@dataclass(frozen=True, eq=False)
class Launch:
    """One job's share of a step, the same for every layer: some sequences with `tile` query tokens each.

    Row r of a KV head is query token `r // group` and query head `r % group` of its group. Rows that pad to
    `layout.rows` see what the last token sees, sequences that pad to `layout.batch` one token: none sees nothing, and
    nobody reads their results. The last rows are the canary's.

    Positions are those of `npu.parts.Part`: without the blocks that none of the rows sees.

    Attributes:
        plan: how K and V are gathered.
        lengths: int32 `[layout.batch]`; tokens each sequence holds up to the tile's last token.
        before: int32 `[layout.batch]`; tokens each held before the step, which writes the others.
        rows: int64 `[sequences, tile]`; rows of the step's q and out.
        share: the same rows, as the host's runtime takes them.
        group: query heads per KV head.
    """

    plan: GatherPlan
    lengths: NDArray[np.int32]
    before: NDArray[np.int32]
    rows: NDArray[np.int64]
    share: Share
    group: int

    def write(self, buffer: StagingBuffer, q: NDArray[np.float32]) -> Canary:
        """Put everything but K and V into a filled buffer.

        Args:
            buffer: filled by `plan`.
            q: float32 `[rows, heads, head_dim]`, the step's, not scaled.

        Returns:
            The question that the result must answer.
        """
        self._write_query(buffer, q)
        if self.plan.layout.mask_rows:
            self._write_mask(buffer)
        canary = Canary(self.plan.layout)
        canary.write(buffer)
        return canary

    def read_out(self, buffer: StagingBuffer, out: NDArray[np.float32]) -> None:
        """Put the buffer's result into the launch's rows of out `[rows, heads, head_dim]`."""
        layout = self.plan.layout
        sequences, tile = self.rows.shape
        used = buffer.out[: sequences * layout.kv_heads, : tile * self.group]
        by_head = used.reshape(sequences, layout.kv_heads, tile, -1)
        out[self.rows] = by_head.swapaxes(1, 2).reshape(sequences, tile, -1, layout.head_dim)

    def _write_query(self, buffer: StagingBuffer, q: NDArray[np.float32]) -> None:
        """The launch's rows of q, scaled by `head_dim ** -0.5`, as fp16."""
        layout = self.plan.layout
        sequences, tile = self.rows.shape
        scaled = q[self.rows] * np.float32(layout.head_dim**-0.5)  # [sequences, tile, heads, head_dim]
        by_head = scaled.reshape(sequences, tile, layout.kv_heads, self.group, layout.head_dim).swapaxes(1, 2)
        heads, used = sequences * layout.kv_heads, tile * self.group
        query = buffer.query
        query[...] = 0
        with np.errstate(over="ignore"):  # beyond fp16 is infinity, as in the cache
            query[:heads, :used, : layout.head_dim] = by_head.reshape(heads, used, layout.head_dim)
        if not layout.mask_rows:
            query[:, :, layout.head_dim] = 1  # K's mark counts

    def _write_mask(self, buffer: StagingBuffer) -> None:
        """Hide from each row what is behind its own token, and what its window leaves out."""
        layout = self.plan.layout
        tile = self.rows.shape[1]
        token = np.minimum(np.arange(layout.mask_rows) // self.group, tile - 1)
        seen = self.lengths[:, np.newaxis] - tile + 1 + token  # [batch, mask_rows]: tokens the row sees
        everyone = int(seen.min())
        position = np.arange(everyone, layout.tokens)
        mask = buffer.mask
        mask[..., :everyone] = 0
        mask[..., everyone:] = np.where(position >= seen[..., np.newaxis], MASKED, np.float16(0))
        batch = self.share.batch
        if batch.windows is None or batch.sinks is None:
            return
        oldest = np.where(batch.windows > 0, seen.T - batch.windows, 0).T  # [batch, mask_rows]: token of its window
        early = np.arange(max(0, int(oldest.max())))
        left_out = (early >= batch.sinks[:, np.newaxis, np.newaxis]) & (early < oldest[..., np.newaxis])
        mask[..., : len(early)][left_out] = MASKED


@dataclass(frozen=True, eq=False)
class Cut:
    """What one launch will be of, before anything is planned for it.

    Attributes:
        layout: of its operands.
        work: what it costs, for one layer.
        share: its rows, as the host's runtime takes them.
        before: int32 `[sequences]`; tokens each held before the step.
        hidden: int64 `[sequences, 2]`; tokens of each that none of the rows sees, from and to.
    """

    layout: StagingLayout
    work: Work
    share: Share
    before: NDArray[np.int32]
    hidden: NDArray[np.int64]


class LaunchPlanner:
    """Cuts steps into launches that fit one size of staging buffer.

    A tile needs only the context up to its own last token, so that the tiles at the start of a long prompt take a
    small bucket. Every tile gathers for itself: that costs a few percent of its arithmetic, and keeps no state
    between launches.

    Args:
        geometry: of the cache.
        units: in its pool; a block's id is the number of its first one. In a pool for fp16 alone they are its blocks.
        heads: query heads, a multiple of the KV heads.
        buckets: lengths that contexts are padded to.
        batches: counts that decoding sequences are padded to, ascending.
        tiled: K and V lie as the NPU keeps them.
        unit_bytes: bytes of a unit of the pool; None: those of an fp16 block.

    Attributes:
        work: how much attention a step is, with what pads its launches.
        buffer_bytes: bytes a staging buffer needs: those of the largest launch over the largest bucket that is not a
            batch of several sequences.

    Raises:
        UsageError: the heads do not fit the cache, its elements are not fp16, or the batches do not rise from 1.
        DimensionTooLarge: a bucket, or the rows of a tile, are beyond `MAX_DIMENSION`.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        units: int,
        heads: int,
        buckets: Buckets,
        *,
        batches: Sequence[int] = BATCHES,
        tiled: bool = False,
        unit_bytes: int | None = None,
    ) -> None:
        if heads < 1 or heads % geometry.kv_heads:
            raise UsageError(
                f"{heads} query heads are not a multiple of {geometry.kv_heads} KV heads",
                heads=heads,
                kv_heads=geometry.kv_heads,
            )
        if geometry.itemsize != 2:
            raise UsageError(f"the NPU reads fp16, got itemsize {geometry.itemsize}", itemsize=geometry.itemsize)
        if list(batches) != sorted({1, *batches}) or batches[0] != 1:
            raise UsageError(f"batches must rise from 1, got {tuple(batches)}", batches=tuple(batches))
        self._geometry = geometry
        self._units = units
        self._unit_bytes = unit_bytes
        self._group = heads // geometry.kv_heads
        self._buckets = buckets
        self._batches = tuple(batches)
        self._tiled = tiled
        self.work = PaddedTiles((1, *TILES), buckets.sizes, CANARY_TOKENS, STAGING_ROWS)
        largest = self._layout(batch=1, tile=TILES[-1], tokens=buckets.largest)
        if max(largest.mask_shape) > MAX_DIMENSION:
            raise DimensionTooLarge(
                f"a bucket of {largest.tokens} tokens and a tile of {largest.rows} rows: the NPU's registers end "
                f"at {MAX_DIMENSION}",
                tokens=largest.tokens,
                rows=largest.rows,
                limit=MAX_DIMENSION,
            )
        self.buffer_bytes = max(largest.nbytes, self._layout(batch=1, tile=1, tokens=buckets.largest).nbytes)

    def staged_tokens(self, batch: AttentionBatch) -> NDArray[np.int64]:
        """Tokens of each sequence that its longest launch stages: int64 `[sequences]`."""
        tokens = batch.context_lens.astype(np.int64)
        if batch.windows is not None:
            for sequence in np.flatnonzero(batch.windows).tolist():
                tokens[sequence] = max((part.length for part in self._parts(batch, sequence)), default=0)
        return tokens

    def cut(self, batch: AttentionBatch, sequences: NDArray[np.int64]) -> list[Cut]:
        """Cut some sequences of a step: each tile of several rows is a launch, single rows share one per bucket.

        Args:
            batch: the step.
            sequences: int64; which of its sequences to cut.

        Raises:
            NoBucket: a sequence is longer than the largest bucket holds.
        """
        cuts = []
        singles: dict[int, list[Part]] = {}  # by bucket
        for sequence in sequences.tolist():
            for part in self._parts(batch, sequence):
                if part.rows > 1:
                    cuts.append(self._cut(batch, [part]))
                else:
                    singles.setdefault(self._bucket(part), []).append(part)
        for bucket, parts in sorted(singles.items()):
            most = self._most_singles(bucket)
            for start in range(0, len(parts), most):
                cuts.append(self._cut(batch, parts[start : start + most]))  # noqa: PERF401 - reads as above
        return cuts

    def launch(self, cut: Cut) -> Launch:
        """Plan a launch.

        Raises:
            UsageError: a table is too short or names a block outside the pool.
        """
        share, layout = cut.share, cut.layout
        # Sequences that pad the batch hold the first token that the first one sees.
        padding = layout.batch - share.batch.sequences
        hidden_from, hidden_to = cut.hidden[0].tolist()
        first = 0 if hidden_from else hidden_to
        lengths = np.concatenate([share.batch.context_lens, np.full(padding, first + 1, np.int32)])
        before = np.concatenate([cut.before, np.zeros(padding, np.int32)])
        hidden = np.concatenate([cut.hidden, np.full((padding, 2), (0, first), np.int64)])
        tables = np.concatenate([share.batch.tables, np.repeat(share.batch.tables[:1], padding, axis=0)])
        codecs = share.batch.codecs
        plan = GatherPlan.build(
            self._geometry,
            self._units,
            tables,
            lengths,
            layout,
            unit_bytes=self._unit_bytes,
            codecs=None if codecs is None else np.concatenate([codecs, np.repeat(codecs[:1], padding)]),
            hidden=hidden,
        )
        return Launch(plan, lengths, before, share.rows.reshape(share.batch.sequences, -1), share, self._group)

    def _parts(self, batch: AttentionBatch, sequence: int) -> Iterator[Part]:
        return parts_of(batch, sequence, TILES[-1], self._geometry.block_tokens)

    def _cut(self, batch: AttentionBatch, parts: list[Part]) -> Cut:
        """One launch of parts that have the same number of rows and the same bucket."""
        rows = parts[0].rows
        geometry, layout = self._geometry, self._layout(self._padded(len(parts)), rows, self._bucket(parts[0]))
        lengths = np.array([part.length for part in parts], np.int32)
        starts = np.arange(len(parts) + 1, dtype=np.int32) * np.int32(rows)
        first = np.array([part.first for part in parts], np.int64)
        sequences = [part.sequence for part in parts]
        windows, sinks = (None if counts is None else counts[sequences] for counts in (batch.windows, batch.sinks))
        tables = np.stack([part.table(batch.tables) for part in parts])
        codecs = None if batch.codecs is None else batch.codecs[sequences]
        share = Share(
            AttentionBatch(starts, lengths, tables, windows, sinks, codecs),
            (first[:, np.newaxis] + np.arange(rows)).ravel(),
        )
        tokens = int(lengths.sum())
        work = Work(
            kv_bytes=self._kv_bytes(lengths, codecs),
            staged_bytes=layout.nbytes,
            multiply_adds=2 * rows * tokens * geometry.kv_heads * self._group * geometry.head_dim,
            gathered_bytes=layout.nbytes,
        )
        before = np.array([part.before for part in parts], np.int32)
        return Cut(layout, work, share, before, np.array([part.hidden for part in parts], np.int64))

    def _kv_bytes(self, lengths: NDArray[np.int32], codecs: NDArray[np.uint8] | None) -> int:
        """Bytes of one layer's K and V, as they lie in the pool."""
        if codecs is None:
            return int(lengths.sum()) * self._geometry.bytes_per_token // self._geometry.layers
        used = (codec for codec in CODECS.values() if codec.code in codecs)
        by_codec = {codec.code: BlockLayout(self._geometry, codec).layer_bytes for codec in used}
        nbytes: int = sum(
            length * by_codec[code] for length, code in zip(lengths.tolist(), codecs.tolist(), strict=True)
        )
        return nbytes // self._geometry.block_tokens

    def _bucket(self, part: Part) -> int:
        return self._buckets.fit(part.length + CANARY_TOKENS)

    def _padded(self, sequences: int) -> int:
        return next(batch for batch in self._batches if batch >= sequences)

    def _most_singles(self, tokens: int) -> int:
        """Sequences of one row each that fit a buffer at this bucket: a number there is a graph for."""
        fitting = (batch for batch in self._batches if self._layout(batch, 1, tokens).nbytes <= self.buffer_bytes)
        return max(batch for batch in fitting if batch * self._geometry.kv_heads <= MAX_DIMENSION)

    def _layout(self, batch: int, tile: int, tokens: int) -> StagingLayout:
        geometry = self._geometry
        graph_tile = 1 if tile == 1 else next(size for size in TILES if size >= tile)
        rows = -(-(graph_tile * self._group + CANARY_ROWS) // ROW_MULTIPLE) * ROW_MULTIPLE
        mask_rows = 0 if tile == 1 else rows
        return StagingLayout(batch, geometry.kv_heads, tokens, rows, geometry.head_dim, mask_rows, self._tiled)

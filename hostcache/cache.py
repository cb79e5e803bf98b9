"""The pool's bytes: one region cut into blocks, written token by token, copied block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ._kv import ffi, lib
from .balloon import Balloon
from .block_layout import BlockLayout
from .blocks import BlockPool
from .codec import CODECS, FP16, Codec
from .codec_pools import open_pools, pool_of, unit_bytes
from .errors import BlockStateError, UsageError
from .extents import ExtentPool
from .geometry import KVGeometry
from .region import Region
from .table import BlockTable

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """A region of memory seen as blocks of keys and values, with the pools that say who owns them.

    It is cut into extents of `units` each (`ExtentPool`). A block of any codec begins at byte `id * unit_bytes`.

    Args:
        geometry: shape of the model's KV.
        region: memory to use; the cache owns it from now on and gives it back at `close()`.
        leanest: the codec of which an extent holds most blocks; it and all richer ones can be used.

    Attributes:
        geometry: as given.
        leanest: as given.
        blocks: fp16 blocks that fit into the region.
        units: units that fit into it: every block's id is below.
        unit_bytes: bytes of each; for fp16 alone those of a block.
        extents: which of the memory is free.
        pools: reference counts of each codec's blocks, by its name.
        pool: those of fp16 blocks.
        buffer: uint8, the whole region.
        rewrites: int64 `[units]`, raised whenever a token of a block is written that was written before. For whoever
            keeps copies: while neither this nor `pool.generation` changes, a block has only grown.

    Raises:
        UsageError: the region is smaller than one block, a codec cannot store heads of this size, or the geometry has
            elements of another size than fp16.

    Example:
        >>> import numpy as np
        >>> from hostcache import KVGeometry, PagedKVCache
        >>> cache = PagedKVCache.create(KVGeometry(layers=1, kv_heads=2, head_dim=8), nbytes=1 << 20)
        >>> table = cache.table()
        >>> table.append(3)
        >>> ones = np.ones((3, 2, 8), np.float32)
        >>> cache.write(0, table.slots(0, 3), keys=ones, values=2 * ones)
        >>> keys, values = cache.read(0, table.blocks, tokens=3)
        >>> values[:, 0, 0].tolist()
        [2.0, 2.0, 2.0]
    """

    def __init__(self, geometry: KVGeometry, region: Region, leanest: Codec = FP16) -> None:
        self.geometry = geometry
        self.leanest = leanest
        self.blocks = _whole_extents(geometry, leanest, region.nbytes)
        self.units = self.blocks * leanest.blocks_per_extent
        self.unit_bytes = unit_bytes(geometry, leanest)
        self.extents = ExtentPool(self.blocks, leanest.blocks_per_extent)
        self.pools: Mapping[str, BlockPool] = open_pools(self.extents, geometry.block_tokens)
        self.pool = self.pools[FP16.name]
        self.buffer: NDArray[np.uint8] = region.buffer
        self.rewrites = np.zeros(self.units, np.int64)
        self._layouts = {name: BlockLayout(geometry, CODECS[name]) for name in self.pools}
        self._written = np.zeros((geometry.layers, self.units), np.int32)  # tokens up to the last one written
        self._region = region
        self._closed = False
        self._base = ffi.from_buffer("uint8_t[]", region.buffer, require_writable=True)
        # For C, by a codec's number; 0: the pool was not opened for it.
        self._c_row_bytes = ffi.new("int64_t[3]", [layout.row_bytes for layout in self._layouts.values()])
        self._c_spans = ffi.new("int64_t[3]", [pool.span for pool in self.pools.values()])
        self._c_rewrites = ffi.from_buffer("int64_t[]", self.rewrites, require_writable=True)
        self._c_written = ffi.from_buffer("int32_t[]", self._written, require_writable=True)

    @classmethod
    def create(cls, geometry: KVGeometry, nbytes: int, leanest: Codec = FP16) -> PagedKVCache:
        """Take an anonymous region of at most `nbytes`, a whole number of extents.

        Raises:
            UsageError: not even one block fits.
            RegionError: the memory is not there.
        """
        extents = _whole_extents(geometry, leanest, nbytes)
        extent_bytes = unit_bytes(geometry, leanest) * leanest.blocks_per_extent
        return cls(geometry, Region.anonymous(extents * extent_bytes), leanest)

    @property
    def pointer(self) -> Any:  # noqa: ANN401 - cffi's types exist for type checkers only, and the reference imports all
        """The region's first byte as `uint8_t *`, for C; not to be kept.

        Raises:
            UsageError: the cache is closed.
        """
        self._check_open()
        return self._base

    def pool_of(self, codec: Codec) -> BlockPool:
        """Reference counts of a codec's blocks.

        Raises:
            UsageError: the pool was not opened for it.
        """
        return pool_of(self.pools, codec)

    def layout(self, codec: Codec) -> BlockLayout:
        """How a block of a codec is laid out.

        Raises:
            UsageError: the pool was not opened for it.
        """
        pool_of(self.pools, codec)
        return self._layouts[codec.name]

    def table(self, codec: Codec = FP16) -> BlockTable:
        """An empty block table over this cache.

        Raises:
            UsageError: the pool was not opened for the codec.
        """
        copy = self.copy_block if codec is FP16 else partial(self.copy_block, codec=codec)
        return BlockTable(self.pool_of(codec), copy)

    def balloon(self) -> Balloon:
        """What lends the memory of unused blocks to the rest of the machine; one per cache."""
        return Balloon(self.extents, self._region, self.unit_bytes * self.extents.units)

    def write(
        self,
        layer: int,
        slots: NDArray[np.int64],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        codecs: NDArray[np.uint8] | None = None,
    ) -> None:
        """Scatter one layer's keys and values into their slots, each as its codec has it.

        The caller owns the slots: they belong to blocks that only one table refers to. A sequence's tokens are written
        in order; one that is written again takes back those behind it.

        Args:
            layer: layer index.
            slots: int64 `[rows]`; a negative slot skips its row.
            keys: float32 `[rows, kv_heads, head_dim]`, C-contiguous, rotated by position.
            values: float32 `[rows, kv_heads, head_dim]`, C-contiguous.
            codecs: uint8 `[rows]`, `Codec.code` of each row's table; None: all are fp16.

        Raises:
            UsageError: a shape, a dtype, the layer, a slot or a codec does not fit; nothing was written.
        """
        self._check_open()
        geometry = self.geometry
        rows = slots.size
        expected = (rows, geometry.kv_heads, geometry.head_dim)
        _check_array("slots", slots, (rows,), np.int64)
        _check_array("keys", keys, expected, np.float32)
        _check_array("values", values, expected, np.float32)
        c_slots, c_codecs = ffi.from_buffer("int64_t[]", slots), ffi.NULL
        if codecs is not None:
            _check_array("codecs", codecs, (rows,), np.uint8)
            c_codecs = ffi.from_buffer("uint8_t[]", codecs)
        row = lib.rp_kv_misfit(c_slots, c_codecs, rows, geometry.block_tokens, self._c_spans, self.units)
        if row >= 0 or (rows and not 0 <= layer < geometry.layers):
            slot, code = int(slots[row]), 0 if codecs is None else int(codecs[row])
            raise UsageError(
                f"layer {layer} or slot {slot} of codec {code} is outside {geometry.layers} layers of {self.units} "
                f"blocks for {', '.join(self.pools)}",
                layer=layer,
                slot=slot,
                codec=code,
            )
        lib.rp_kv_note(c_slots, rows, geometry.block_tokens, self._c_written + layer * self.units, self._c_rewrites)
        lib.rp_kv_write(
            self._base,
            self.unit_bytes,
            self._c_row_bytes,
            layer,
            geometry.block_tokens,
            geometry.kv_heads,
            geometry.head_dim,
            c_slots,
            c_codecs,
            rows,
            ffi.from_buffer("float[]", keys),
            geometry.kv_heads * geometry.head_dim,
            ffi.from_buffer("float[]", values),
            geometry.kv_heads * geometry.head_dim,
        )

    def copy_block(self, source: int, destination: int, tokens: int, codec: Codec = FP16) -> None:
        """Copy the first `tokens` tokens of a block, all layers and heads, to another of the same codec.

        Raises:
            UsageError: a block or the count is out of range.
        """
        self._check_open()
        geometry = self.geometry
        in_range = self._has(source, codec) and self._has(destination, codec)
        if not in_range or not 0 <= tokens <= geometry.block_tokens:
            raise UsageError(
                f"cannot copy {tokens} tokens from block {source} to {destination} of {self.units}",
                source=source,
                destination=destination,
                tokens=tokens,
            )
        self.rewrites[destination] += 1
        self._written[:, destination] = tokens
        lib.rp_kv_copy_block(
            self._base,
            self.unit_bytes,
            self._layouts[codec.name].row_bytes,
            geometry.layers * 2 * geometry.kv_heads,
            codec.code,
            geometry.block_tokens,
            geometry.head_dim,
            source,
            destination,
            tokens,
        )

    def view(self, block: int, codec: Codec = FP16) -> NDArray[np.uint8]:
        """One block's bytes as they lie, uint8 `[layout(codec).block_bytes]`, read-only; drop it before `close`.

        Raises:
            UsageError: there is no such block.
        """
        whole = self._whole(block, codec)
        whole.flags.writeable = False
        return whole

    def tokens_written(self, block: int) -> int:
        """Tokens of a block up to the last one that was written, in any layer."""
        return int(self._written[:, block].max())

    def overwrite(self, block: int, content: NDArray[np.uint8], tokens: int, codec: Codec = FP16) -> None:
        """Replace all of a block's bytes.

        Args:
            block: block id, of one table and not kept.
            content: uint8 `[layout(codec).block_bytes]`, laid out as that says.
            tokens: tokens it holds.
            codec: the block's.

        Raises:
            UsageError: there is no such block, or the content or the count does not fit one; nothing was changed.
            BlockStateError: it is free, shared, or known to the prefix cache.
        """
        whole = self._whole(block, codec)
        if not self.pool_of(codec).writable(block):
            raise BlockStateError(f"block {block} cannot be overwritten: it is free, shared or kept", block=block)
        _check_array("content", content, whole.shape, np.uint8)
        if not 0 <= tokens <= self.geometry.block_tokens:
            raise UsageError(
                f"a block holds 0 to {self.geometry.block_tokens} tokens, got {tokens}", tokens=tokens, block=block
            )
        self.rewrites[block] += 1
        self._written[:, block] = tokens
        whole[:] = content

    def read(
        self, layer: int, blocks: Sequence[int], tokens: int, codec: Codec = FP16
    ) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Copy out one layer's keys and values of a table's first tokens: for tests and tools, not for a hot path.

        Args:
            layer: layer index.
            blocks: block ids, first position first.
            tokens: how many tokens to read.
            codec: the table's.

        Returns:
            Keys and values, fp16 `[tokens, kv_heads, head_dim]`, owned by the caller: as they lie, or scaled, rotated
            back and rounded once more.

        Raises:
            UsageError: the layer or a block is out of range, or the blocks hold fewer tokens.
        """
        self._check_open()
        geometry = self.geometry
        in_range = 0 <= layer < geometry.layers and all(self._has(block, codec) for block in blocks)
        if not in_range or not 0 <= tokens <= len(blocks) * geometry.block_tokens:
            raise UsageError(
                f"cannot read {tokens} tokens of layer {layer} from blocks {list(blocks)}: there are {geometry.layers} "
                f"layers and {self.units} blocks of {geometry.block_tokens} tokens",
                layer=layer,
                blocks=list(blocks),
                tokens=tokens,
            )
        keys, values = np.empty((2, tokens, geometry.kv_heads, geometry.head_dim), np.float16)
        lib.rp_kv_read(
            self._base,
            self.unit_bytes,
            self._layouts[codec.name].row_bytes,
            codec.code,
            layer,
            geometry.block_tokens,
            geometry.kv_heads,
            geometry.head_dim,
            ffi.from_buffer("int64_t[]", np.array(blocks, np.int64)),
            tokens,
            ffi.from_buffer("uint16_t[]", keys, require_writable=True),
            ffi.from_buffer("uint16_t[]", values, require_writable=True),
        )
        return keys, values

    def close(self) -> None:
        """Give the region back; whatever would touch it afterwards raises UsageError. Safe to call twice.

        Raises:
            RegionError: somebody still holds a view of `buffer`.
        """
        self._closed = True  # the pointer survives its release, and would lead to unmapped memory
        ffi.release(self._base)
        self.buffer = np.empty(0, dtype=np.uint8)
        self._region.close()

    def _whole(self, block: int, codec: Codec) -> NDArray[np.uint8]:
        self._check_open()
        if not self._has(block, codec):
            raise UsageError(f"there is no block {block} among {self.units}", block=block, blocks=self.units)
        start = block * self.unit_bytes
        return self.buffer[start : start + self._layouts[codec.name].block_bytes]

    def _has(self, block: int, codec: Codec) -> bool:
        """Whether a block of the codec can begin there."""
        return 0 <= block < self.units and block % self.pool_of(codec).span == 0

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the cache is closed: its memory has been given back")


def _check_array(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise UsageError(
            f"{name} must be contiguous {np.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}",
            name=name,
            shape=array.shape,
        )


def _whole_extents(geometry: KVGeometry, leanest: Codec, nbytes: int) -> int:
    """Extents that fit into `nbytes`, at least one."""
    if geometry.itemsize != np.dtype(np.float16).itemsize:
        raise UsageError(
            f"the cache stores fp16, 2 bytes an element, or less by a codec, got itemsize {geometry.itemsize}",
            itemsize=geometry.itemsize,
        )
    extent_bytes = unit_bytes(geometry, leanest) * leanest.blocks_per_extent
    extents = nbytes // extent_bytes
    if extents < 1:
        count = leanest.blocks_per_extent
        least = "block" if count == 1 else f"extent, {count} {leanest.name} blocks,"
        raise UsageError(
            f"a pool of {nbytes} bytes does not hold one {least} of {extent_bytes} bytes: give it at least that much",
            pool_bytes=nbytes,
            block_bytes=extent_bytes,
        )
    return extents

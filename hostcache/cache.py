"""The pool's bytes: one region cut into blocks, written token by token, copied block by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._kv import ffi, lib
from .balloon import Balloon
from .blocks import BlockPool
from .errors import BlockStateError, UsageError
from .geometry import KVGeometry
from .region import Region
from .table import BlockTable

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """A region of memory seen as blocks of fp16 keys and values, with the pool that says who owns them.

    Args:
        geometry: shape of the model's KV.
        region: memory to use; the cache owns it from now on and gives it back at `close()`.

    Attributes:
        geometry: as given.
        blocks: blocks that fit into the region.
        pool: their reference counts.
        buffer: uint8, the whole region; blocks start at multiples of `geometry.block_bytes`.
        rewrites: int64 `[blocks]`, raised whenever a token of a block is written that was written before. For whoever
            keeps copies: while neither this nor `pool.generation` changes, a block has only grown.

    Raises:
        UsageError: the region is smaller than one block.

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

    def __init__(self, geometry: KVGeometry, region: Region) -> None:
        self.geometry = geometry
        self.blocks = _whole_blocks(geometry, region.nbytes)
        self.pool = BlockPool(self.blocks, geometry.block_tokens)
        self.buffer: NDArray[np.uint8] = region.buffer
        self.rewrites = np.zeros(self.blocks, np.int64)
        self._written = np.zeros((geometry.layers, self.blocks), np.int32)  # tokens up to the last one written
        self._region = region
        self._closed = False
        self._base = ffi.from_buffer("uint8_t[]", region.buffer, require_writable=True)
        self._c_rewrites = ffi.from_buffer("int64_t[]", self.rewrites, require_writable=True)
        self._c_written = ffi.from_buffer("int32_t[]", self._written, require_writable=True)

    @classmethod
    def create(cls, geometry: KVGeometry, nbytes: int) -> PagedKVCache:
        """Take an anonymous region of at most `nbytes`, a whole number of blocks.

        Raises:
            UsageError: not even one block fits.
            RegionError: the memory is not there.
        """
        return cls(geometry, Region.anonymous(_whole_blocks(geometry, nbytes) * geometry.block_bytes))

    def table(self) -> BlockTable:
        """An empty block table over this cache."""
        return BlockTable(self.pool, self.copy_block)

    def balloon(self) -> Balloon:
        """What lends the memory of unused blocks to the rest of the machine; one per cache."""
        return Balloon(self.pool, self._region, self.geometry.block_bytes)

    def write(
        self, layer: int, slots: NDArray[np.int64], keys: NDArray[np.float32], values: NDArray[np.float32]
    ) -> None:
        """Scatter one layer's keys and values into their slots, rounded to fp16.

        The caller owns the slots: they belong to blocks that only one table refers to. A sequence's tokens are written
        in order; one that is written again takes back those behind it.

        Args:
            layer: layer index.
            slots: int64 `[rows]`; a negative slot skips its row.
            keys: float32 `[rows, kv_heads, head_dim]`, C-contiguous, rotated.
            values: float32 `[rows, kv_heads, head_dim]`, C-contiguous.

        Raises:
            UsageError: a shape, a dtype, the layer or a slot does not fit; nothing was written.
        """
        self._check_open()
        geometry = self.geometry
        rows = len(slots)
        expected = (rows, geometry.kv_heads, geometry.head_dim)
        for name, array, shape, dtype in (
            ("slots", slots, (rows,), np.int64),
            ("keys", keys, expected, np.float32),
            ("values", values, expected, np.float32),
        ):
            if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                raise UsageError(
                    f"{name} must be contiguous {np.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}",
                    name=name,
                    shape=array.shape,
                )
        if rows and not (0 <= layer < geometry.layers and int(slots.max()) < self.blocks * geometry.block_tokens):
            raise UsageError(
                f"layer {layer} or slot {int(slots.max())} is outside {geometry.layers} layers of {self.blocks} blocks",
                layer=layer,
            )
        c_slots = ffi.from_buffer("int64_t[]", slots)
        lib.rp_kv_note(c_slots, rows, geometry.block_tokens, self._c_written + layer * self.blocks, self._c_rewrites)
        lib.rp_kv_write(
            self._base,
            geometry.block_bytes,
            layer * geometry.layer_bytes,
            geometry.kv_bytes,
            geometry.block_tokens,
            geometry.kv_heads,
            geometry.head_dim,
            c_slots,
            rows,
            ffi.from_buffer("float[]", keys),
            geometry.kv_heads * geometry.head_dim,
            ffi.from_buffer("float[]", values),
            geometry.kv_heads * geometry.head_dim,
        )

    def copy_block(self, source: int, destination: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a block, all layers and heads.

        Raises:
            UsageError: a block or the count is out of range.
        """
        self._check_open()
        geometry = self.geometry
        in_range = 0 <= source < self.blocks and 0 <= destination < self.blocks
        if not in_range or not 0 <= tokens <= geometry.block_tokens:
            raise UsageError(
                f"cannot copy {tokens} tokens from block {source} to {destination} of {self.blocks}",
                source=source,
                destination=destination,
                tokens=tokens,
            )
        self.rewrites[destination] += 1
        self._written[:, destination] = tokens
        lib.rp_kv_copy_block(
            self._base,
            geometry.block_bytes,
            geometry.row_bytes,
            geometry.layers * 2 * geometry.kv_heads,
            geometry.head_dim * geometry.itemsize,
            source,
            destination,
            tokens,
        )

    def view(self, block: int) -> NDArray[np.uint8]:
        """One block's bytes as they lie, uint8 `[geometry.block_bytes]`, read-only; drop it before `close`.

        Raises:
            UsageError: there is no such block.
        """
        whole = self._whole(block)
        whole.flags.writeable = False
        return whole

    def tokens_written(self, block: int) -> int:
        """Tokens of a block up to the last one that was written, in any layer."""
        return int(self._written[:, block].max())

    def overwrite(self, block: int, content: NDArray[np.uint8], tokens: int) -> None:
        """Replace all of a block's bytes.

        Args:
            block: block id, of one table and not kept.
            content: uint8 `[geometry.block_bytes]`, laid out as `KVGeometry` says.
            tokens: tokens it holds.

        Raises:
            UsageError: there is no such block.
            BlockStateError: it is free, shared, or known to the prefix cache.
        """
        whole = self._whole(block)
        if not self.pool.writable(block):
            raise BlockStateError(f"block {block} cannot be overwritten: it is free, shared or kept", block=block)
        self.rewrites[block] += 1
        self._written[:, block] = tokens
        whole[:] = content

    def read(self, layer: int, blocks: Sequence[int], tokens: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Copy out one layer's keys and values of a table's first tokens: for tests and tools, not for a hot path.

        Args:
            layer: layer index.
            blocks: block ids, first position first.
            tokens: how many tokens to read.

        Returns:
            Keys and values, fp16 `[tokens, kv_heads, head_dim]`, owned by the caller.

        Raises:
            UsageError: the layer or a block is out of range, or the blocks hold fewer tokens.
        """
        self._check_open()
        geometry = self.geometry
        in_range = 0 <= layer < geometry.layers and all(0 <= block < self.blocks for block in blocks)
        if not in_range or not 0 <= tokens <= len(blocks) * geometry.block_tokens:
            raise UsageError(
                f"cannot read {tokens} tokens of layer {layer} from blocks {list(blocks)}: there are {geometry.layers} "
                f"layers and {self.blocks} blocks of {geometry.block_tokens} tokens",
                layer=layer,
                blocks=list(blocks),
                tokens=tokens,
            )
        shape = (geometry.layers, 2, geometry.kv_heads, geometry.block_tokens, geometry.head_dim)
        whole = self.buffer[: self.blocks * geometry.block_bytes].view(np.float16).reshape(self.blocks, *shape)
        picked = whole[list(blocks), layer]  # a copy: [n, 2, kv_heads, block_tokens, head_dim]
        flat = picked.transpose(1, 0, 3, 2, 4).reshape(2, -1, geometry.kv_heads, geometry.head_dim)
        return flat[0, :tokens].copy(), flat[1, :tokens].copy()

    def close(self) -> None:
        """Give the region back; whatever would touch it afterwards raises UsageError. Safe to call twice.

        Raises:
            RegionError: somebody still holds a view of `buffer`.
        """
        self._closed = True  # the pointer survives its release, and would lead to unmapped memory
        ffi.release(self._base)
        self.buffer = np.empty(0, dtype=np.uint8)
        self._region.close()

    def _whole(self, block: int) -> NDArray[np.uint8]:
        self._check_open()
        if not 0 <= block < self.blocks:
            raise UsageError(f"there is no block {block} among {self.blocks}", block=block, blocks=self.blocks)
        nbytes = self.geometry.block_bytes
        return self.buffer[block * nbytes : (block + 1) * nbytes]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the cache is closed: its memory has been given back")


def _whole_blocks(geometry: KVGeometry, nbytes: int) -> int:
    """Blocks that fit into `nbytes`, at least one."""
    blocks = nbytes // geometry.block_bytes
    if blocks < 1:
        raise UsageError(
            f"a pool of {nbytes} bytes does not hold one block of {geometry.block_bytes} bytes: "
            "give it at least that much",
            pool_bytes=nbytes,
            block_bytes=geometry.block_bytes,
        )
    return blocks

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache import KVGeometry, PagedKVCache, Region
from hostcache.codec import CODECS, INT4, Codec
from hostcache.errors import BlockStateError, RegionError, UsageError

SMALL = KVGeometry(layers=3, kv_heads=2, head_dim=8)


def filled(blocks: int = 4) -> PagedKVCache:
    cache = PagedKVCache.create(SMALL, blocks * SMALL.block_bytes)
    cache.buffer.view(np.float16)[:] = np.nan
    return cache


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, SMALL.kv_heads, SMALL.head_dim)
    return rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)


def test_a_pool_is_cut_into_whole_blocks() -> None:
    cache = PagedKVCache.create(SMALL, 5 * SMALL.block_bytes + 100)
    assert cache.blocks == cache.pool.total == 5
    assert cache.buffer.nbytes == 5 * SMALL.block_bytes
    cache.close()


def test_less_than_a_block_is_refused_with_both_numbers() -> None:
    message = f"a pool of {SMALL.block_bytes - 1} bytes does not hold one block of {SMALL.block_bytes} bytes"
    with pytest.raises(UsageError, match=message):
        PagedKVCache.create(SMALL, SMALL.block_bytes - 1)
    with pytest.raises(UsageError, match=message):
        PagedKVCache(SMALL, Region.anonymous(SMALL.block_bytes - 1))


def test_less_than_an_extent_is_refused_as_such() -> None:
    """Three layers of 16 tokens in int4: 12 rows of 16 * 4 bytes of codes and 16 scales, a multiple of 64 already."""
    unit = 12 * (16 * 4 + 16 * 2)
    message = f"a pool of {4 * unit - 1} bytes does not hold one extent, 4 int4 blocks, of {4 * unit} bytes"
    with pytest.raises(UsageError, match=message):
        PagedKVCache.create(SMALL, 4 * unit - 1, INT4)
    PagedKVCache.create(SMALL, 4 * unit, INT4).close()


def test_the_layout_is_block_layer_kv_head_token_dim() -> None:
    """One token's K and V land where the documented strides say, and nothing else changes."""
    cache = filled()
    keys, values = rows(1)
    cache.write(1, np.array([2 * 16 + 5]), keys, values)
    flat = cache.buffer.view(np.float16)
    expected = np.full_like(flat, np.nan)
    for kv, source in enumerate((keys, values)):
        for head in range(2):
            offset = 2 * SMALL.block_bytes + 1 * SMALL.layer_bytes + kv * SMALL.kv_bytes + head * SMALL.row_bytes
            start = offset // 2 + 5 * 8
            expected[start : start + 8] = source[0, head].astype(np.float16)
    assert np.array_equal(flat, expected, equal_nan=True)
    del flat
    cache.close()


@settings(max_examples=40, deadline=None)
@given(slots=st.lists(st.integers(-1, 4 * 16 - 1), max_size=40, unique_by=lambda s: s if s >= 0 else object()))
def test_what_is_written_is_read_back_rounded_once(slots: list[int]) -> None:
    cache = filled()
    keys, values = rows(len(slots), seed=1)
    for layer in range(SMALL.layers):
        cache.write(layer, np.array(slots, dtype=np.int64), keys + layer, values - layer)
    for layer in range(SMALL.layers):
        read_keys, read_values = cache.read(layer, range(4), 64)
        expected_keys, expected_values = (np.full((64, 2, 8), np.nan, np.float16) for _ in range(2))
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected_keys[slot] = (keys[row] + np.float32(layer)).astype(np.float16)
                expected_values[slot] = (values[row] - np.float32(layer)).astype(np.float16)
        assert np.array_equal(read_keys, expected_keys, equal_nan=True)
        assert np.array_equal(read_values, expected_values, equal_nan=True)
    cache.close()


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_copying_a_block_takes_the_first_tokens_of_every_row(tokens: int) -> None:
    cache = filled()
    keys, values = rows(16)
    for layer in range(SMALL.layers):
        cache.write(layer, np.arange(16, dtype=np.int64) + 16, keys + layer, values)
    cache.copy_block(1, 3, tokens)
    for layer in range(SMALL.layers):
        for copied, original in zip(cache.read(layer, [3], 16), cache.read(layer, [1], 16), strict=True):
            assert np.array_equal(copied[:tokens], original[:tokens])
            assert np.isnan(copied[tokens:]).all()
    cache.close()


def test_rewrites_tell_growth_from_what_was_written_again() -> None:
    """Growth leaves the count alone, in every layer; each token written twice raises it, of its block alone."""
    cache = filled()

    def write(*slots: int, layer: int = 0) -> list[int]:
        cache.write(layer, np.array(slots, np.int64), *rows(len(slots)))
        return cache.rewrites.tolist()

    assert write(0, 1, 2, -1, 16) == [0, 0, 0, 0]
    assert write(0, 1, 2, 16, layer=1) == [0, 0, 0, 0]
    assert write(3, 17) == [0, 0, 0, 0]
    assert write(2, -1, 48) == [1, 0, 0, 0]  # truncated to two tokens, and written on
    assert write(3, 4) == [1, 0, 0, 0]
    assert write(2, layer=1) == [2, 0, 0, 0]
    assert write(16) == [2, 1, 0, 0]  # a new owner begins
    cache.close()


def test_a_copied_block_counts_as_rewritten_up_to_its_last_copied_token() -> None:
    cache = filled()
    for layer in range(SMALL.layers):
        cache.write(layer, np.arange(16, 32, dtype=np.int64), *rows(16))
    cache.copy_block(1, 2, 5)
    assert cache.rewrites.tolist() == [0, 0, 1, 0]
    for layer in (0, 1):
        cache.write(layer, np.array([37], np.int64), *rows(1))  # the first behind the copy
    assert cache.rewrites.tolist() == [0, 0, 1, 0]
    cache.write(2, np.array([36], np.int64), *rows(1))  # the last of the copy
    assert cache.rewrites.tolist() == [0, 0, 2, 0]
    cache.close()


def test_a_refused_write_or_copy_is_not_counted() -> None:
    cache = filled()
    cache.write(0, np.array([0]), *rows(1))
    with pytest.raises(UsageError, match="outside"):
        cache.write(0, np.array([0, 64]), *rows(2))
    with pytest.raises(UsageError, match="cannot copy"):
        cache.copy_block(0, 1, 17)
    assert not cache.rewrites.any()
    cache.close()


def test_only_the_one_table_of_a_block_that_nobody_else_knows_may_overwrite_it() -> None:
    cache = filled()
    content = np.arange(SMALL.block_bytes, dtype=np.uint8)
    (block,) = cache.pool.allocate(1)
    cache.overwrite(block, content, 16)
    cache.pool.acquire(block)  # a second table's
    with pytest.raises(BlockStateError, match="block 0 cannot be overwritten: it is free, shared or kept"):
        cache.overwrite(block, content[::-1], 16)
    cache.pool.release(block)
    cache.pool.keep(block)
    with pytest.raises(BlockStateError, match="cannot be overwritten"):
        cache.overwrite(block, content[::-1], 16)
    with pytest.raises(BlockStateError, match="block 1 cannot be overwritten"):
        cache.overwrite(1, content, 16)
    assert np.array_equal(cache.buffer[: SMALL.block_bytes], content)
    assert cache.rewrites.tolist() == [1, 0, 0, 0]
    cache.close()


@pytest.mark.parametrize(
    "content",
    [
        np.zeros(1, np.uint8),
        np.zeros(SMALL.block_bytes - 1, np.uint8),
        np.zeros(SMALL.block_bytes // 2, np.float16),
        np.zeros(SMALL.block_bytes, np.int64),
    ],
)
def test_what_is_no_block_overwrites_none(content: np.ndarray) -> None:
    """numpy would repeat one byte over all of it, and cut large numbers to bytes."""
    cache = filled()
    (block,) = cache.pool.allocate(1)
    with pytest.raises(UsageError, match=rf"content must be contiguous uint8 \({SMALL.block_bytes},\)"):
        cache.overwrite(block, content, 5)
    for tokens in (-1, 17):
        with pytest.raises(UsageError, match=f"a block holds 0 to 16 tokens, got {tokens}"):
            cache.overwrite(block, np.zeros(SMALL.block_bytes, np.uint8), tokens)
    assert np.isnan(cache.buffer.view(np.float16)).all()
    assert (cache.tokens_written(block), cache.rewrites[block]) == (0, 0)
    cache.close()


@pytest.mark.parametrize("leanest", list(CODECS.values()), ids=list(CODECS))
@pytest.mark.parametrize("itemsize", [1, 4])
def test_elements_of_another_size_than_fp16_are_refused(itemsize: int, leanest: Codec) -> None:
    """Rows are two bytes an element whatever the geometry says: of one, blocks would overlap and leave the region."""
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=16, itemsize=itemsize)
    with pytest.raises(UsageError, match=f"got itemsize {itemsize}"):
        PagedKVCache.create(geometry, nbytes=1 << 20, leanest=leanest)
    region = Region.anonymous(1 << 20)
    with pytest.raises(UsageError, match=f"got itemsize {itemsize}"):
        PagedKVCache(geometry, region, leanest)
    region.close()


def test_read_returns_a_copy() -> None:
    cache = filled()
    keys, _ = cache.read(0, [0], 16)
    keys[:] = 1
    assert np.isnan(cache.buffer.view(np.float16)).all()
    cache.close()


@pytest.mark.parametrize(
    ("layer", "slots", "keys", "match"),
    [
        (3, np.array([0]), np.zeros((1, 2, 8), np.float32), "layer 3 or slot 0 of codec 0 is outside 3 layers"),
        (0, np.array([64]), np.zeros((1, 2, 8), np.float32), "slot 64 of codec 0 is outside"),
        (0, np.array(0), np.zeros((1, 2, 8), np.float32), "slots must be contiguous int64"),
        (0, np.array([0], np.int32), np.zeros((1, 2, 8), np.float32), "slots must be contiguous int64"),
        (0, np.array([0]), np.zeros((1, 2, 8)), "keys must be contiguous float32"),
        (0, np.array([0]), np.zeros((2, 2, 8), np.float32), r"keys must be .*\(1, 2, 8\), got float32 \(2, 2, 8\)"),
        (0, np.array([0]), np.zeros((1, 2, 16), np.float32)[:, :, ::2], "keys must be contiguous"),
    ],
)
def test_a_write_that_does_not_fit_writes_nothing(layer: int, slots: np.ndarray, keys: np.ndarray, match: str) -> None:
    cache = filled()
    with pytest.raises(UsageError, match=match):
        cache.write(layer, slots, keys, np.zeros((1, 2, 8), np.float32))
    assert np.isnan(cache.buffer.view(np.float16)).all()
    cache.close()


@pytest.mark.parametrize(("source", "destination", "tokens"), [(-1, 0, 1), (0, 4, 1), (0, 1, 17), (0, 1, -1)])
def test_a_copy_out_of_range_is_refused(source: int, destination: int, tokens: int) -> None:
    cache = filled()
    with pytest.raises(UsageError, match=f"cannot copy {tokens} tokens from block {source} to {destination} of 4"):
        cache.copy_block(source, destination, tokens)
    cache.close()


@pytest.mark.parametrize(
    ("layer", "blocks", "tokens"), [(-1, [0], 1), (3, [0], 1), (0, [-1], 1), (0, [4], 1), (0, [0], 17), (0, [0], -1)]
)
def test_a_read_out_of_range_is_refused(layer: int, blocks: list[int], tokens: int) -> None:
    cache = filled()
    with pytest.raises(UsageError, match=rf"cannot read {tokens} tokens of layer {layer} from blocks \[{blocks[0]}\]"):
        cache.read(layer, blocks, tokens)
    cache.close()


def test_a_read_of_nothing_is_empty() -> None:
    cache = filled()
    keys, values = cache.read(0, [], 0)
    assert keys.shape == values.shape == (0, 2, 8)
    cache.close()


def test_a_cache_in_use_is_not_closed() -> None:
    cache = filled()
    view = cache.buffer[:4]
    with pytest.raises(RegionError, match="still in use"):
        cache.close()
    del view
    cache.close()


def test_a_closed_cache_touches_no_memory() -> None:
    cache = filled()
    cache.close()
    with pytest.raises(UsageError, match="the cache is closed"):
        cache.write(0, np.array([0]), *rows(1))
    with pytest.raises(UsageError, match="the cache is closed"):
        cache.copy_block(0, 1, 16)
    with pytest.raises(UsageError, match="the cache is closed"):
        cache.read(0, [0], 1)
    cache.close()


def test_an_empty_write_is_fine() -> None:
    cache = filled()
    cache.write(0, np.empty(0, np.int64), *rows(0))
    cache.close()

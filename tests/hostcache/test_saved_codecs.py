"""State files of KV in every codec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry, Namespace, PagedKVCache, PrefixStore
from hostcache.codec import CODECS, FP16, INT4, INT8, Codec
from hostcache.errors import UsageError
from hostcache.prefix_caches import PrefixCaches
from hostcache.saved_prefix import restore_prefix, save_prefix
from hostcache.state_file import StateReader

HOME = Namespace("a model", salt="a secret")
GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=40)
TOKENS = np.arange(40, dtype=np.int32)  # two blocks and a half
DIRT = 0xAB


class Home:
    """A pool of all codecs, full of what is nobody's business."""

    def __init__(self) -> None:
        self.cache = PagedKVCache.create(GEOMETRY, 1 << 18, INT4)
        self.cache.buffer[:] = DIRT
        self.prefix = PrefixCaches(self.cache.pools)

    def compute(self, codec: Codec, seed: int = 0) -> None:
        """Compute the tokens from nothing and publish them."""
        table, prefix, rng = self.cache.table(codec), self.prefix.of(codec), np.random.default_rng(seed)
        table.append(len(TOKENS))
        for layer in range(GEOMETRY.layers):
            keys, values = rng.standard_normal((2, len(TOKENS), 2, 40), dtype=np.float32)
            self.cache.write(layer, table.slots(0, len(TOKENS)), keys, values, self.codes(codec))
        node = prefix.match(HOME, TOKENS[:0]).node
        for index, block in enumerate(table.blocks):
            node = prefix.publish(node, TOKENS[index * 16 : (index + 1) * 16], block)
        prefix.release_node(node)
        table.release()

    def codes(self, codec: Codec) -> NDArray[np.uint8]:
        return np.full(len(TOKENS), codec.code, np.uint8)

    def known(self, codec: Codec) -> list[NDArray[np.float16]]:
        """K and V of all tokens that are known, layer by layer."""
        hit = self.prefix.of(codec).match(HOME, TOKENS, whole=True)
        blocks = hit.blocks if hit.partial < 0 else [*hit.blocks, hit.partial]
        count = 16 * len(hit.blocks) + hit.partial_tokens
        rows = [array for layer in range(GEOMETRY.layers) for array in self.cache.read(layer, blocks, count, codec)]
        self.cache.pool_of(codec).release_all(blocks)
        self.prefix.of(codec).release_node(hit.node)
        self.prefix.check()
        self.cache.extents.check()
        assert self.cache.extents.used == 0
        return rows

    def save(self, path: Path, codec: Codec) -> int:
        return save_prefix(path, self.cache, self.prefix.of(codec), HOME, TOKENS, kind="session").computed

    def restore(self, path: Path, codec: Codec) -> int:
        with StateReader(path) as reader:
            return restore_prefix(reader, self.cache, self.prefix.of(codec), HOME)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_was_saved_comes_back_in_its_codec(codec: Codec, tmp_path: Path) -> None:
    home, other = Home(), Home()
    home.compute(codec)
    assert home.save(tmp_path / "state", codec) == 40
    assert other.restore(tmp_path / "state", codec) == 40
    assert len(other.known(codec)[0]) == 40
    for mine, theirs in zip(home.known(codec), other.known(codec), strict=True):
        assert np.array_equal(mine, theirs)
    # fp16: 40 tokens of 2 layers, K and V, 2 heads, 80 bytes. int8: 40 bytes and a scale, rows padded to 16. int4: 20.
    row = {FP16: 16 * 80, INT8: 16 * 42, INT4: 16 * 22}[codec]
    with StateReader(tmp_path / "state") as reader:
        assert reader.header.block_bytes == 8 * row
        assert (reader.header.codec, reader.header.blocks) == (codec.name, 3)
        assert ("rows as BlockLayout 1 has them" in reader.header.layout) == (codec is not FP16)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_nothing_of_a_neighbours_is_in_the_file(codec: Codec, tmp_path: Path) -> None:
    """Of the last block eight tokens are the session's."""
    home = Home()
    home.compute(codec)
    home.save(tmp_path / "state", codec)
    assert bytes([DIRT] * 3) not in (tmp_path / "state").read_bytes()
    layout = home.cache.layout(codec)
    with StateReader(tmp_path / "state") as reader:
        rows = reader.read_block(2).reshape(-1, layout.row_bytes)
    assert rows[:, : 8 * layout.token_bytes].any()
    assert not rows[:, 8 * layout.token_bytes : layout.payload_bytes].any()
    scales = rows[:, layout.payload_bytes :]
    assert not scales[:, 8 * layout.groups * 2 :].any()


def test_a_file_is_not_used_in_another_codec(tmp_path: Path) -> None:
    home = Home()
    home.compute(INT8)
    home.save(tmp_path / "state", INT8)
    for codec in (FP16, INT4):
        with pytest.raises(UsageError, match=f"was saved with codec 'int8', not '{codec.name}'"):
            home.restore(tmp_path / "state", codec)
    assert (tmp_path / "state").exists()


def test_a_folder_keeps_a_prompt_in_each_codec_and_forgets_it_in_all(tmp_path: Path) -> None:
    home = Home()
    store = PrefixStore(tmp_path, home.cache, home.prefix)
    for seed, codec in enumerate(CODECS.values()):
        home.compute(codec, seed)
        assert store.save(HOME, TOKENS, codec) == 32
    assert len(list(tmp_path.iterdir())) == 3
    other = Home()
    again = PrefixStore(tmp_path, other.cache, other.prefix)
    for codec in (INT8, INT4, FP16):
        assert again.restore(HOME, TOKENS, codec) == 32
        for mine, theirs in zip(home.known(codec), other.known(codec), strict=True):
            assert np.array_equal(mine[:32], theirs)
    other.prefix.of(INT8).invalidate(namespace=HOME)  # a namespace is forgotten in whichever codec
    assert list(tmp_path.iterdir()) == []

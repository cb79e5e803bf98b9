from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry, Namespace, PrefixCache, UnbackedCache
from hostcache.codec import FP16, INT4, INT8, Codec
from hostcache.errors import UsageError
from hostcache.prefix_caches import PrefixCaches

HOME = Namespace("model")
PROMPT = np.arange(64, dtype=np.int32)


class Home:
    """Blocks of four tokens, four extents of four units."""

    def __init__(self, max_pinned: int | None = None) -> None:
        self.now = 0.0
        self.cache = UnbackedCache(KVGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=4), 4, INT4)
        self.prefix = PrefixCaches(self.cache.pools, max_pinned=max_pinned, clock=lambda: self.now)

    def compute(self, codec: Codec, tokens: NDArray[np.int32] = PROMPT[:8], namespace: Namespace = HOME) -> list[int]:
        """Publish the full blocks of a prompt and let go of them; returns them."""
        prefix, table = self.prefix.of(codec), self.cache.table(codec)
        node = prefix.match(namespace, tokens[:1]).node
        table.append(len(tokens))
        blocks = table.blocks.copy()
        for index, block in enumerate(blocks):
            node = prefix.publish(node, tokens[4 * index : 4 * index + 4], block)
        prefix.release_node(node)
        table.release()
        self.check()
        return blocks

    def known(self) -> list[int]:
        """Tokens of the prompt that are known in fp16, int8 and int4."""
        return [self.prefix.of(codec).known_tokens(HOME, PROMPT) for codec in (FP16, INT8, INT4)]

    def check(self) -> None:
        self.prefix.check()
        self.cache.extents.check()


def test_each_codec_knows_what_was_computed_in_it() -> None:
    home = Home()
    home.compute(INT4)
    assert home.known() == [0, 0, 8]
    home.compute(FP16, PROMPT[:4])
    assert home.known() == [4, 0, 8]


def test_no_two_nodes_have_the_same_number() -> None:
    home = Home()
    numbers = [home.prefix.of(codec).root(Namespace(salt, salt=salt)).number for codec in (FP16, INT8) for salt in "ab"]
    assert len(set(numbers)) == 4


def test_an_extent_is_taken_with_all_that_hangs_on_what_it_holds() -> None:
    home = Home()
    blocks = home.compute(INT4, PROMPT[:40])  # ten blocks: two extents and half of one
    assert blocks == list(range(10))
    home.cache.pool_of(FP16).allocate(2)
    # The free extent, and the one idle for longest: that of the tail, which was let go of first.
    assert home.known() == [0, 0, 32]
    home.cache.pool_of(FP16).allocate(1)
    home.check()
    assert home.known() == [0, 0, 16]


def test_pins_of_all_codecs_share_their_room_which_is_counted_in_extents() -> None:
    home = Home()
    home.compute(INT4, PROMPT[:20])  # five blocks in two extents
    home.compute(FP16, PROMPT[:4])
    assert home.prefix.of(INT4).pin(HOME, PROMPT[:16], "me", 60) == 16  # four blocks, one extent
    assert home.prefix.of(FP16).pin(HOME, PROMPT[:4], "me", 60) == 4
    assert home.prefix.pinned == 5
    with pytest.raises(UsageError, match="'me' cannot pin 5 blocks: 2 of the 2 that may be pinned are pinned already"):
        home.prefix.of(INT4).pin(HOME, PROMPT[:20], "me", 60)
    assert home.prefix.unpin("me") == 2
    assert home.prefix.of(INT4).pin(HOME, PROMPT[:20], "me", 60) == 20
    home.now = 61
    assert home.prefix.expire_pins() == 1
    assert home.prefix.pinned == 0
    assert home.prefix.of(FP16).pin(HOME, PROMPT[:4], "me", 60) == 4
    home.check()


def test_what_is_invalidated_is_forgotten_in_every_codec() -> None:
    home = Home()
    for codec in (FP16, INT8, INT4):
        home.compute(codec, PROMPT[:4])
    assert home.prefix.invalidate(namespace=HOME) == 3
    assert home.known() == [0, 0, 0]
    assert home.cache.extents.used == 0


def test_a_codec_that_is_not_served_is_named() -> None:
    cache = UnbackedCache(KVGeometry(layers=1, kv_heads=1, head_dim=8), 2, INT8)
    with pytest.raises(UsageError, match="this pool serves fp16, int8 and no int4: open it for int4"):
        PrefixCaches(cache.pools).of(INT4)
    alone = PrefixCache(cache.pool_of(INT8))
    assert alone.of(INT8) is alone
    with pytest.raises(UsageError, match="this prefix cache knows int8 blocks, not fp16 ones: use PrefixCaches"):
        alone.of(FP16)

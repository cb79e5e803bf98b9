"""Keys that are turned to other positions, against keys rotated there from the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache
from hostcache.codec import INT4, INT8, Codec
from hostcache.errors import BlockStateError, UsageError
from npu.decoder import Decoder, Floats
from npu.key_balance import KeyBalance
from npu.rerotation import Rerotation
from npu.rope import Rope, RopeScaling
from npu.source import open_model
from tests.npu.tiny import TinyLlama, write_tiny_llama

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16)

ROPES = {
    "plain": Rope(10000.0),
    "linear": Rope(10000.0, RopeScaling.LINEAR, 2.5),
    "yarn": Rope(10000.0, RopeScaling.YARN, 4.0, original_context=64, attention=1.1386),
    "factors": Rope(500000.0, factors=(1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)),
}

Keys = NDArray[np.float64]


def rotated(keys: Keys, rope: Rope, positions: NDArray[np.int64], *, interleaved: bool) -> Keys:
    """Keys `[..., tokens, head_dim]` at their positions, by complex numbers: one for each pair."""
    d = keys.shape[-1]
    turns = rope.attention * np.exp(1j * positions[:, np.newaxis] * rope.frequencies(d))
    first, second = (keys[..., ::2], keys[..., 1::2]) if interleaved else (keys[..., : d // 2], keys[..., d // 2 :])
    turned = (first + 1j * second) * turns
    parts = np.stack([turned.real, turned.imag], -1 if interleaved else -2)
    return parts.reshape(keys.shape)


def lengths_of_pairs(keys: Keys, *, interleaved: bool) -> Keys:
    """Of each element, the length of the pair it belongs to."""
    d = keys.shape[-1]
    if interleaved:
        return np.repeat(np.hypot(keys[..., ::2], keys[..., 1::2]), 2, axis=-1)
    return np.tile(np.hypot(keys[..., : d // 2], keys[..., d // 2 :]), 2)


class World:
    """A block of keys at positions 100 to 115, written as an engine writes them, and blocks to turn it into."""

    def __init__(self, rope: Rope, *, interleaved: bool, tokens: int = 16) -> None:
        self.rope, self.interleaved, self.tokens = rope, interleaved, tokens
        self.cache = PagedKVCache.create(GEOMETRY, 4 * GEOMETRY.block_bytes)
        self.source, self.target, self.other = (self.cache.pool.allocate(1)[0] for _ in range(3))
        rng = np.random.default_rng(7)
        self.keys = rng.standard_normal((GEOMETRY.layers, GEOMETRY.kv_heads, tokens, GEOMETRY.head_dim)) * 8
        self.values = rng.standard_normal((GEOMETRY.layers, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim))
        slots = self.source * 16 + np.arange(tokens)
        for layer in range(GEOMETRY.layers):
            keys = self.at(100)[layer].swapaxes(0, 1).astype(np.float32)
            self.cache.write(layer, slots, np.ascontiguousarray(keys), self.values[layer].astype(np.float32))
        self.rerotation = Rerotation(self.cache, rope, interleaved=interleaved)

    def at(self, first: int) -> Keys:
        """The keys, rotated at positions from `first` on."""
        return rotated(self.keys, self.rope, first + np.arange(self.tokens), interleaved=self.interleaved)

    def block(self, block: int) -> NDArray[np.float16]:
        """`[layer, k|v, kv_head, token, head_dim]`."""
        shape = (GEOMETRY.layers, 2, GEOMETRY.kv_heads, 16, GEOMETRY.head_dim)
        return self.cache.view(block).copy().view(np.float16).reshape(shape)

    def bound(self, roundings: int) -> Keys:
        """What fp16 may cost: a pair of length r has elements of r at most, and rounding one changes it by 2^-11 of
        itself, or by 2^-25 if it is tiny. A turn keeps lengths, so errors of a pair add up; of two elements at once
        they are a vector of r * 2^-11. Float32's own 2^-22 or so is beside that."""
        lengths = lengths_of_pairs(self.at(0), interleaved=self.interleaved)
        return roundings * (lengths * (2.0**-11 + 2.0**-21) + 2.0**-24)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("by", [-100, -16, 1, 250, 0])
def test_a_turned_key_is_the_key_rotated_there(name: str, by: int, *, interleaved: bool) -> None:
    world = World(ROPES[name], interleaved=interleaved)
    world.rerotation.turn(world.source, world.target, by)
    found = world.block(world.target)[:, 0].astype(np.float64)
    assert (np.abs(found - world.at(100 + by)) <= world.bound(2)).all()  # the key was rounded, and so was the result
    np.testing.assert_array_equal(world.block(world.target)[:, 1], world.block(world.source)[:, 1])
    if by:
        assert np.abs(world.at(100 + by) - world.at(100)).max() > 10 * world.bound(2).max()  # it is not where it was
    else:
        np.testing.assert_array_equal(world.block(world.target), world.block(world.source))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_two_turns_are_one_by_their_sum(name: str, *, interleaved: bool) -> None:
    world = World(ROPES[name], interleaved=interleaved)
    world.rerotation.turn(world.source, world.target, -37)
    world.rerotation.turn(world.target, world.target, -50)
    world.rerotation.turn(world.source, world.other, -87)
    twice, once = (world.block(block)[:, 0].astype(np.float64) for block in (world.target, world.other))
    assert (np.abs(twice - world.at(13)) <= world.bound(3)).all()
    assert (np.abs(twice - once) <= world.bound(3)).all()  # two roundings on the one way, one on the other


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_keys_that_a_model_computes_turn_as_it_rotates_them(family: str, tmp_path: Path) -> None:
    """Layer 0's keys depend on token and position alone: at 300 they are those at 60, turned by 240."""
    tiny = TinyLlama(family, rope_factor=4.0, rope_attention=1.2, rope_factors=True)
    with open_model(write_tiny_llama(tmp_path / "tiny.gguf", tiny)) as source:
        decoder = Decoder.load(source, activations="fp32", max_rows=16, cache_dir=tmp_path)
    cache = PagedKVCache.create(decoder.geometry, 4 * decoder.geometry.block_bytes)
    (early, late, turned) = (cache.pool.allocate(1)[0] for _ in range(3))

    def compute(block: int, position: int) -> None:
        def attend(layer: int, q: Floats, keys: Floats, values: Floats, out: Floats) -> None:
            cache.write(layer, block * 16 + np.arange(16), keys, values)
            out[...] = 0

        positions = np.arange(position, position + 16, dtype=np.int32)
        decoder.forward(np.arange(16, dtype=np.int32) + 40, positions, np.zeros(0, np.int64), attend)

    compute(early, 60)
    compute(late, 300)
    rope = decoder.config.rope
    Rerotation(cache, rope, interleaved=decoder.config.family.interleaved).turn(early, turned, 240)
    (found, _), (expected, _), (unturned, _) = (cache.read(0, [block], 16) for block in (turned, late, early))
    longest = lengths_of_pairs(expected.astype(np.float64), interleaved=decoder.config.family.interleaved).max()
    # The key was rounded before it was turned and afterwards, and so was what it is compared with.
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=0, atol=3 * 2.0**-11 * longest)
    assert np.abs(unturned.astype(float) - expected).max() > 0.2 * longest


def test_slots_that_nobody_wrote_are_left_alone() -> None:
    world = World(ROPES["plain"], interleaved=False, tokens=5)
    start = world.source * GEOMETRY.block_bytes
    shape = (GEOMETRY.layers, 2, GEOMETRY.kv_heads, 16, GEOMETRY.head_dim)
    block = world.cache.buffer[start : start + GEOMETRY.block_bytes].view(np.float16).reshape(shape)
    block[..., 5:, :] = np.nan
    world.rerotation.turn(world.source, world.target, 3)
    assert world.cache.tokens_written(world.target) == 5
    assert np.isfinite(world.block(world.target)[..., :5, :]).all()
    np.testing.assert_array_equal(world.block(world.target)[..., 5:, :], world.block(world.source)[..., 5:, :])


def test_who_holds_the_target_learns_that_it_was_rewritten() -> None:
    world = World(ROPES["plain"], interleaved=False)
    before = world.cache.rewrites.copy()
    world.rerotation.turn(world.source, world.target, 3)
    changed = np.flatnonzero(world.cache.rewrites != before)
    assert changed.tolist() == [world.target]


def test_a_block_that_others_see_is_not_turned_in_place() -> None:
    world = World(ROPES["plain"], interleaved=False)
    before = world.block(world.source)
    world.cache.pool.acquire(world.source)
    with pytest.raises(BlockStateError, match=f"block {world.source} cannot be overwritten"):
        world.rerotation.turn(world.source, world.source, -16)
    with pytest.raises(UsageError, match="there is no block 9 among 4"):
        world.rerotation.turn(9, world.target, -16)
    np.testing.assert_array_equal(world.block(world.source), before)


def balance_of(seed: int) -> KeyBalance:
    """Constants as they might be measured: channels of different sizes, mixed a little."""
    rng = np.random.default_rng(seed)
    shape = (GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    mix = np.eye(shape[2]) + 0.05 * rng.standard_normal((*shape, shape[2]))
    return KeyBalance(
        rng.standard_normal(shape).astype(np.float32),
        mix.astype(np.float32),
        np.linalg.inv(mix).swapaxes(2, 3).astype(np.float32),
        np.triu(0.1 * rng.standard_normal((*shape, shape[2])), 1).astype(np.float32),
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [16, 5])
@pytest.mark.parametrize(("codec", "bound"), [(INT8, 0.02), (INT4, 0.25)], ids=["int8", "int4"])
def test_quantised_keys_are_turned_and_quantised_again(codec: Codec, bound: float, tokens: int, in_place: bool) -> None:
    """Twice the codec's error: of keys of deviation 1 and what is taken from them, deviation 1 as well, int4 makes
    0.1 of their root mean square (Max, 1960), int8 a tenth of that."""
    cache = PagedKVCache.create(GEOMETRY, 16 * GEOMETRY.block_bytes, INT4)
    source, target, foreign = (cache.pool_of(codec).allocate(1)[0] for _ in range(3))
    rope, balance = ROPES["linear"], balance_of(3)
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((GEOMETRY.layers, GEOMETRY.kv_heads, tokens, GEOMETRY.head_dim))
    codes = np.full(tokens, codec.code, np.uint8)
    for layer in range(GEOMETRY.layers):
        at = rotated(keys[layer], rope, 100 + np.arange(tokens), interleaved=True).swapaxes(0, 1)
        stored = np.ascontiguousarray(at, np.float32)
        if codec is INT4:
            stored = balance.keys(layer, codes, stored)
        values = rng.standard_normal(stored.shape).astype(np.float32)
        cache.write(layer, source * 16 + np.arange(tokens), stored, values, codes)
    values_before = [cache.read(layer, [source], tokens, codec)[1].tobytes() for layer in range(GEOMETRY.layers)]
    foreign_before = cache.view(foreign, codec).tobytes()

    destination = source if in_place else target
    Rerotation(cache, rope, interleaved=True, balance=balance).turn(source, destination, -40, codec)

    assert cache.tokens_written(destination) == tokens
    assert cache.view(foreign, codec).tobytes() == foreign_before
    for layer in range(GEOMETRY.layers):
        halves, kept = cache.read(layer, [destination], tokens, codec)
        assert kept.tobytes() == values_before[layer]
        found = halves.astype(np.float32)
        if codec is INT4:
            found = balance.restored(layer, found)
        expected = rotated(keys[layer], rope, 60 + np.arange(tokens), interleaved=True).swapaxes(0, 1)
        assert np.abs(found - expected).mean() < bound


def test_a_quantised_block_that_is_kept_is_not_turned() -> None:
    cache = PagedKVCache.create(GEOMETRY, 16 * GEOMETRY.block_bytes, INT8)
    pool = cache.pool_of(INT8)
    source, target = pool.allocate(2)
    pool.acquire(target)
    before = cache.buffer.tobytes()
    with pytest.raises(BlockStateError, match=f"block {target} cannot be overwritten"):
        Rerotation(cache, ROPES["plain"], interleaved=False).turn(source, target, 1, INT8)
    assert cache.buffer.tobytes() == before

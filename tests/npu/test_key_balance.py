"""Constants that change how int4 stores keys, and nothing of what queries make of them."""

from __future__ import annotations

import itertools
import logging
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache._kv import lib
from npu.decoder import Decoder, Floats
from npu.key_balance import KeyBalance
from npu.key_cache import KeyCache
from npu.key_moments import FIRST_TOKEN_WEIGHT, SHRINKAGE, KeyMoments
from npu.key_statistics import load_key_balance
from npu.source import open_model
from npu.text import tokenizer_of
from tests.npu.tiny import TinyLlama, write_tiny_llama

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 6, 24
INT4_ROWS = np.array([2, 2, 0, 1, 2], np.uint8)


def text_of(seed: int, tokens: int = 300) -> tuple[Floats, Floats]:
    """Keys and queries `[layers, tokens, heads, d]` with outliers in some channels, as models have them."""
    rng = np.random.default_rng(seed)
    channels = np.exp(rng.standard_normal(DIM) * 1.5)
    keys = rng.standard_normal((LAYERS, tokens, KV_HEADS, DIM)) * channels + 3 * channels
    queries = rng.standard_normal((LAYERS, tokens, HEADS, DIM)) * np.exp(rng.standard_normal(DIM))
    return keys.astype(np.float32), queries.astype(np.float32)


def balanced(keys: Floats, queries: Floats, *cuts: int) -> KeyBalance:
    """The constants of a text that comes in pieces, which end at the cuts."""
    layers, _, kv_heads, dim = keys.shape
    moments = KeyMoments(layers, kv_heads, dim)
    for layer in range(layers):
        moments.add_first(layer, keys[layer, 0])
        for start, stop in itertools.pairwise((1, *cuts, keys.shape[1])):
            moments.add(layer, keys[layer, start:stop], queries[layer, start:stop])
    return moments.balance()


@pytest.fixture(scope="module")
def balance() -> KeyBalance:
    return balanced(*text_of(1))


def test_scores_are_the_same_but_for_a_constant_of_each_query(balance: KeyBalance) -> None:
    """Softmax does not see what is the same for all keys."""
    keys, queries = text_of(2, tokens=40)
    codes = np.full(40, 2, np.uint8)
    for layer in range(LAYERS):
        stored, asked = balance.keys(layer, codes, keys[layer]), balance.queries(layer, codes, queries[layer])
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            plain = queries[layer, :, head].astype(np.float64) @ keys[layer, :, kv].T.astype(np.float64)
            found = asked[:, head].astype(np.float64) @ stored[:, kv].T.astype(np.float64)
            constant = queries[layer, :, head].astype(np.float64) @ balance.offsets[layer, kv]
            np.testing.assert_allclose(found, plain - constant[:, None], rtol=0, atol=2e-5 * np.abs(plain).max())


def test_rows_of_other_codecs_stay_as_they_are(balance: KeyBalance) -> None:
    keys, queries = text_of(3, tokens=len(INT4_ROWS))
    for stored, given in (
        (balance.keys(1, INT4_ROWS, keys[1]), keys[1]),
        (balance.queries(1, INT4_ROWS, queries[1]), queries[1]),
    ):
        same = [a.tobytes() == b.tobytes() for a, b in zip(stored, given, strict=True)]
        assert same == (INT4_ROWS != 2).tolist()


def test_a_row_has_the_same_bits_alone_and_by_every_instruction_set(balance: KeyBalance) -> None:
    keys, _ = text_of(4, tokens=len(INT4_ROWS))
    together = balance.keys(0, INT4_ROWS, keys[0])
    assert lib.rp_kv_use_isa(b"plain") == 0
    for row in range(len(INT4_ROWS)):
        alone = balance.keys(0, INT4_ROWS[row : row + 1], keys[0, row : row + 1])
        assert alone.tobytes() == together[row].tobytes()
    lib.rp_kv_use_isa(b"auto")


def test_keys_come_back(balance: KeyBalance) -> None:
    keys, _ = text_of(5, tokens=9)
    back = balance.restored(1, balance.keys(1, np.full(9, 2, np.uint8), keys[1]))
    np.testing.assert_allclose(back, keys[1], rtol=0, atol=1e-4 * np.abs(keys[1]).max())


def test_moments_of_stored_keys_and_of_queries_are_the_same_diagonal(balance: KeyBalance) -> None:
    """What makes the error least; moments as the text of the constants has them, drawn to the unit matrix."""
    keys, queries = text_of(1)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            shift = balance.offsets[layer, head].astype(np.float64)
            matrix = balance.key_matrices[layer, head].astype(np.float64)
            others, first = keys[layer, 1:, head] - shift, keys[layer, 0, head] - shift
            of_keys = (1 - FIRST_TOKEN_WEIGHT) * others.T @ others / len(others)
            of_keys += FIRST_TOKEN_WEIGHT * np.outer(first, first)
            asked = queries[layer, 1:].reshape(-1, KV_HEADS, HEADS // KV_HEADS, DIM)[:, head].reshape(-1, DIM)
            of_queries = asked.T.astype(np.float64) @ asked / len(asked)
            of_keys += SHRINKAGE * np.trace(of_keys) / DIM * np.eye(DIM)
            of_queries += SHRINKAGE * np.trace(of_queries) / DIM * np.eye(DIM)
            inverse = np.linalg.inv(matrix)
            stored, met = matrix.T @ of_keys @ matrix, inverse @ of_queries @ inverse.T
            tolerance = 1e-4 * stored.max()
            np.testing.assert_allclose(stored, np.diag(np.diag(stored)), rtol=0, atol=tolerance)
            np.testing.assert_allclose(met, stored, rtol=0, atol=tolerance)


def test_a_text_may_come_in_pieces(balance: KeyBalance) -> None:
    """Of one token, none and the rest: sums of other orders differ in the last bits of float64 alone."""
    pieces = balanced(*text_of(1), 2, 2, 97)
    for name in ("offsets", "key_matrices", "query_matrices"):
        whole = getattr(balance, name)
        np.testing.assert_allclose(getattr(pieces, name), whole, rtol=0, atol=1e-5 * np.abs(whole).max())


def test_a_head_that_says_nothing_is_stored_as_it_is() -> None:
    nothing = np.zeros((1, 8, 1, 16), np.float32)
    balance = balanced(nothing, nothing)
    np.testing.assert_allclose(balance.key_matrices[0, 0] @ balance.key_matrices[0, 0].T, np.eye(16), atol=1e-6)


class Watched:
    """A model that counts how often it is asked."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.steps = decoder, 0
        self.fingerprint, self.numerics = decoder.fingerprint, decoder.numerics

    def forward(self, *arguments: object) -> NDArray[np.float32]:
        self.steps += 1
        return self.decoder.forward(*arguments)  # type: ignore[arg-type] # as they come

    def close(self) -> None:
        self.decoder.close()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_constants_are_measured_once_and_a_damaged_file_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(family=family))
    with open_model(path) as source:
        decoder = Watched(Decoder.load(source, cache_dir=tmp_path))
        tokenizer = tokenizer_of(source)

    def load() -> str:
        found = load_key_balance(decoder, decoder.decoder.config, tokenizer, max_rows=64, cache_dir=tmp_path)
        assert found is not None
        return found.digest

    first, steps = load(), decoder.steps
    assert steps == 512 // 64
    assert load() == first
    assert decoder.steps == steps
    (kept,) = (tmp_path / "keys").glob("*/*")
    assert kept.parent.stat().st_mode & 0o077 == 0

    whole = bytearray(kept.read_bytes())
    for damaged in (whole[: len(whole) // 2], b"", whole[:3000] + bytes(16) + whole[3016:]):
        kept.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load() == first
        assert str(kept) in caplog.text
    assert decoder.steps == 4 * steps


def test_constants_used_longest_ago_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = text_of(7)
    balance = balanced(keys, queries)
    nbytes = 4 * LAYERS * KV_HEADS * DIM * (1 + 2 * DIM) + 32  # 18816 and a digest
    cache, shape = KeyCache(tmp_path), (LAYERS, KV_HEADS, DIM)
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", str(2 * nbytes))
    for age, model in enumerate(("old", "older")):
        cache.keep(model, balance)
        (file,) = (entry.folder / "keys.bin" for entry in cache.room.entries() if entry.used > 1e9)
        os.utime(file, (1e9 - age, 1e9 - age))
    cache.keep("new", balance)
    found = {model: cache.find(model, shape) for model in ("old", "older", "new")}
    assert [model for model, kept in found.items() if kept is not None] == ["old", "new"]
    assert sum(entry.nbytes for entry in cache.room.entries()) == 2 * nbytes
    assert cache.find("new", (LAYERS, KV_HEADS, DIM - 8)) is None


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_leaves_matrices_whole(broken: float) -> None:
    """A head's moments are then unknown; those of the others are not."""
    keys, queries = text_of(6)
    sound = balanced(keys, queries)
    queries[0, 5, 0, 3] = broken  # the first query head reads the first KV head
    with np.errstate(invalid="ignore"):
        hurt = balanced(keys, queries)
    assert np.isfinite(hurt.key_matrices).all()
    np.testing.assert_array_equal(hurt.key_matrices[0, 1], sound.key_matrices[0, 1])
    np.testing.assert_array_equal(hurt.key_matrices[1], sound.key_matrices[1])


def test_queries_of_all_layers_are_not_held(tmp_path: Path) -> None:
    """Those of 512 tokens would be 128 KiB a layer here, and of a model with 2048 elements of queries 4 MiB."""

    def peak(layers: int) -> int:
        path = write_tiny_llama(tmp_path / f"{layers}.gguf", TinyLlama(layers=layers))
        with open_model(path) as source:
            decoder = Decoder.load(source, cache_dir=tmp_path)
            tokenizer = tokenizer_of(source)
        tracemalloc.start()
        load_key_balance(decoder, decoder.config, tokenizer, max_rows=64, cache_dir=tmp_path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(10) - peak(2) < 8 * 64 << 10


@pytest.mark.parametrize(("context", "measured"), [(1, False), (2, True)])
def test_one_token_tells_nothing(tmp_path: Path, context: int, measured: bool) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(context_length=context))
    with open_model(path) as source:
        decoder = Decoder.load(source, cache_dir=tmp_path)
        found = load_key_balance(decoder, decoder.config, tokenizer_of(source), max_rows=64, cache_dir=tmp_path)
    assert (found is not None) == measured


def test_broken_numbers_are_no_warning(tmp_path: Path) -> None:
    """The suite raises on warnings: that of an infinite key would be numpy's, in a line of its own on stderr."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(family="qwen2"))
    with open_model(path) as source:
        bias = source.tensors["blk.0.attn_k.bias"].offset
    content = bytearray(path.read_bytes())
    content[bias : bias + 4] = np.float32(np.inf).tobytes()
    path.write_bytes(content)
    with open_model(path) as source:
        decoder = Decoder.load(source, cache_dir=tmp_path)
        found = load_key_balance(decoder, decoder.config, tokenizer_of(source), max_rows=64, cache_dir=tmp_path)
    assert found is not None
    assert np.isfinite(found.key_matrices).all()

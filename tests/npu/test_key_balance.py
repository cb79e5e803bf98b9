"""Constants that change how int4 stores keys, and nothing of what queries make of them."""

from __future__ import annotations

import itertools
import logging
import os
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache._kv import lib
from hostcache.cache import PagedKVCache
from hostcache.codec import INT4
from hostcache.geometry import KVGeometry
from npu.decoder import Decoder, Floats
from npu.key_balance import KeyBalance
from npu.key_cache import KeyCache
from npu.key_moments import FIRST_TOKEN_WEIGHT, KEY_SHRINKAGE, QUERY_SHRINKAGE, KeyMoments
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


def test_stored_keys_are_white_and_errors_are_made_up_for_as_queries_have_it(balance: KeyBalance) -> None:
    """Moments as the text of the constants has them, drawn to the unit matrix. For an error e of a rotated element i,
    those behind it keep the error of scores, `d^T M d`, least where they change by `-e M_rr^-1 M_ri`."""
    keys, queries = text_of(1)
    eighth = np.array([[(-1.0) ** (i & j).bit_count() for j in range(8)] for i in range(8)]) / np.sqrt(8)
    rotation = np.kron(np.eye(DIM // 8), eighth)  # 8 is the largest power of two in 24
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            shift = balance.offsets[layer, head].astype(np.float64)
            matrix = balance.key_matrices[layer, head].astype(np.float64)
            others, first = keys[layer, 1:, head] - shift, keys[layer, 0, head] - shift
            of_keys = (1 - FIRST_TOKEN_WEIGHT) * others.T @ others / len(others)
            of_keys += FIRST_TOKEN_WEIGHT * np.outer(first, first)
            asked = queries[layer, 1:].reshape(-1, KV_HEADS, HEADS // KV_HEADS, DIM)[:, head].reshape(-1, DIM)
            of_queries = asked.T.astype(np.float64) @ asked / len(asked)
            of_keys += KEY_SHRINKAGE * np.trace(of_keys) / DIM * np.eye(DIM)
            of_queries += QUERY_SHRINKAGE * np.trace(of_queries) / DIM * np.eye(DIM)
            inverse = np.linalg.inv(matrix)
            stored, met = matrix.T @ of_keys @ matrix, inverse @ of_queries @ inverse.T
            np.testing.assert_allclose(stored, np.eye(DIM), rtol=0, atol=1e-4)
            np.testing.assert_allclose(met, np.diag(np.diag(met)), rtol=0, atol=1e-4 * met.max())
            moments, feedback = rotation @ met @ rotation, balance.feedback[layer, head]
            assert not np.tril(feedback).any()
            for i in range(DIM - 1):
                best = np.linalg.solve(moments[i + 1 :, i + 1 :], moments[i + 1 :, i])
                np.testing.assert_allclose(feedback[i, i + 1 :], -best, rtol=0, atol=1e-3)


def test_feedback_keeps_errors_from_scores(balance: KeyBalance) -> None:
    """Without it an element's error counts as much as the mean of the moments of queries, which are diagonal in what is
    stored; with it as much as their geometric mean, but for what shrinkage takes of that. The constants' own text."""
    keys, queries = (np.ascontiguousarray(part[:, 1:]) for part in text_of(1))
    count = keys.shape[1]
    codes = np.full(count, INT4.code, np.uint8)
    stored = balance.keys(0, codes, keys[0])
    asked = balance.queries(0, codes, queries[0]).reshape(count, KV_HEADS, -1, DIM).swapaxes(0, 1).astype(np.float64)
    geometry = KVGeometry(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM)
    errors = []
    for feedback in (None, balance.feedback[0]):
        with closing(PagedKVCache.create(geometry, 32 * geometry.block_bytes, INT4)) as cache:
            table = cache.table(INT4)
            table.append(count)
            cache.write(0, table.slots(0, count), stored, stored, codes, feedback=feedback)
            read = cache.read(0, table.blocks, count, INT4)[0].astype(np.float64)
        scores = np.einsum("hqgd,thd->hqgt", asked, read - stored)
        errors.append((scores**2).mean(axis=(1, 2, 3)))
    moments = (asked**2).mean(axis=(1, 2))
    least = np.exp(np.log(moments).mean(axis=1)) / moments.mean(axis=1)
    gain = errors[1] / errors[0]
    assert (least < gain).all()
    assert (gain < 2 * least).all()


def test_a_text_may_come_in_pieces(balance: KeyBalance) -> None:
    """Of one token, none and the rest: sums of other orders differ in the last bits of float64 alone."""
    pieces = balanced(*text_of(1), 2, 2, 97)
    for name in ("offsets", "key_matrices", "query_matrices", "feedback"):
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
    nbytes = 4 * LAYERS * KV_HEADS * DIM * (1 + 3 * DIM) + 32  # 28032 and a digest
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
    assert np.isfinite(hurt.feedback).all()
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

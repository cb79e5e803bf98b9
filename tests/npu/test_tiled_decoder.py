"""The decoder on tiles: against a float64 pass, and the same bits however it is computed."""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import UsageError
from npu import tiled_decoder
from npu._dense import ffi
from npu.decoder import Decoder
from npu.decoder_choice import load_decoder, tiles_of
from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.tiled_decoder import TiledDecoder
from tests.npu.reference import PlainSession, reference_logits
from tests.npu.tiny import TINY, TinyLlama, write_tiny_llama

MODELS = {
    "Q4_1, tied Q8_0": TINY,
    "Q4_0": replace(TINY, matrix_type="Q4_0", embedding_type="Q4_0"),
    "Q8_0, own head": replace(TINY, matrix_type="Q8_0", tied_head=False),
    "mixed types": replace(TINY, value_type="Q8_0", tied_head=False, embedding_type="Q4_1"),
    "one layer": replace(TINY, layers=1),
    "Qwen2": TinyLlama(family="qwen2", heads=6, head_dim=32),
    "Qwen3": TinyLlama(family="qwen3", head_dim=32, rope_factor=2.5, rope_attention=1.25),
    "half a tile": TinyLlama(family="qwen3", heads=4, kv_heads=1, head_dim=8),  # keys of 8
    "an epsilon that counts": replace(TINY, eps=0.5),
    "odd sizes": TinyLlama(layers=3, hidden=96, heads=6, kv_heads=3, head_dim=32, ffn=160, rope_theta=1e5, eps=1e-6),
}
IDS = [int(i) for i in np.random.default_rng(7).integers(0, TINY.vocab, 40)]


def load(path: Path, **options: int | str) -> TiledDecoder:
    return load_to(path.parent / "cache", path, **options)


def load_to(cache_dir: Path, path: Path, **options: int | str) -> TiledDecoder:
    with GGUFFile.open(path) as opened:
        config = ModelConfig.from_gguf(opened)
        plan = tiles_of(opened, config, "int8")
        assert plan is not None
        return TiledDecoder.load(opened, config, plan, cache_dir=cache_dir, **options)  # type: ignore[arg-type]


def runnable_isas() -> list[str]:
    """What this machine's kernel says of its instructions, beside what runs everywhere."""
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    wanted = {
        "avx2": {"avx2", "f16c", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "f16c", "fma"},
        "neon": {"asimddp"},
    }
    return ["plain", *(isa for isa, extensions in wanted.items() if extensions <= words)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def decoder(tiny: Path) -> Iterator[TiledDecoder]:
    loaded = load(tiny, max_rows=64)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("name", MODELS)
def test_int8_activations_cost_about_a_percent(tmp_path: Path, name: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", MODELS[name])
    expected = reference_logits(path, IDS)
    error = PlainSession(load(path)).step(IDS) - expected
    # As for the other decoder with int8 activations: a dozen products of 0.5 % each add up in quadrature.
    assert 1e-3 < np.sqrt((error**2).mean() / (expected**2).mean()) < 2e-2


def test_keys_and_values_have_inputs_of_15_bits(tiny: Path) -> None:
    """K and V of the first layer come of one product. Of 8 bits its error would be some 0.5 % of the values."""
    session = PlainSession(load(tiny))
    session.step(IDS)
    exact = _first_layer(tiny)
    for name, got in (("attn_k", session.k[0, : len(IDS)]), ("attn_v", session.v[0, : len(IDS)])):
        # Rotation keeps a pair's length: that much can be compared without rotating.
        lengths, expected = (np.linalg.norm(x.reshape(len(IDS), -1, 2), axis=-1) for x in (got, exact[name]))
        assert np.abs(lengths - expected).max() < 1e-4 * expected.max()


@pytest.mark.parametrize("name", MODELS)
def test_instruction_sets_agree_bit_for_bit(tmp_path: Path, name: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", MODELS[name])
    expected = PlainSession(load(path, isa="plain")).step(IDS)
    isas = runnable_isas()
    assert len(isas) > 1 or platform.machine() not in ("x86_64", "aarch64")
    for isa in isas[1:]:
        np.testing.assert_array_equal(PlainSession(load(path, isa=isa)).step(IDS), expected, err_msg=isa)


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 7, 7, 7, 7, 5], [16, 16, 8], [39, 1], [2, 1, 37]])
def test_rows_do_not_depend_on_how_they_are_grouped(decoder: TiledDecoder, chunks: list[int]) -> None:
    whole, cut = PlainSession(decoder), PlainSession(decoder)
    expected = whole.step(IDS)
    logits = np.concatenate([cut.step(IDS[sum(chunks[:i]) : sum(chunks[: i + 1])]) for i in range(len(chunks))])
    np.testing.assert_array_equal(cut.k, whole.k)
    np.testing.assert_array_equal(cut.v, whole.v)
    np.testing.assert_array_equal(logits, expected)


def test_threads_change_no_bit(tmp_path: Path) -> None:
    """Wide enough that two threads are worth waking: 40 rows by 256 by 512 weights."""
    path = write_tiny_llama(tmp_path / "wide.gguf", replace(TINY, hidden=256, ffn=512))
    one, three = (PlainSession(load(path, threads=threads)).step(IDS) for threads in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_only_the_wanted_rows_get_logits(decoder: TiledDecoder) -> None:
    every = PlainSession(decoder).step(IDS)
    np.testing.assert_array_equal(PlainSession(decoder).step(IDS, rows=[39, 3, 4]), every[[39, 3, 4]])
    silent, loud = PlainSession(decoder), PlainSession(decoder)
    assert silent.step(IDS, rows=[]).shape == (0, TINY.vocab)
    loud.step(IDS)
    np.testing.assert_array_equal(silent.k, loud.k)


def test_logits_belong_to_the_caller(decoder: TiledDecoder) -> None:
    session = PlainSession(decoder)
    first = session.step(IDS[:8])
    kept = first.copy()
    session.step(IDS[8:16])
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_1, tied Q8_0", "Q4_0"])  # with sums of inputs in every product, and without
def test_a_row_of_no_numbers_breaks_no_other(tmp_path: Path, name: str, value: float) -> None:
    """One element of one row's attention is no number: all of its logits say so, and nobody else's."""
    decoder = load(write_tiny_llama(tmp_path / "tiny.gguf", MODELS[name]))

    def logits(broken: int | None) -> NDArray[np.float32]:
        def attend(layer: int, *arrays: NDArray[np.float32]) -> None:
            arrays[-1][:] = 0.5
            if broken is not None and layer == 0:
                arrays[-1][broken, 1, 3] = value

        rows = np.arange(5)
        return decoder.forward(np.array(IDS[:5], np.int32), rows.astype(np.int32), rows, attend)

    sound, hurt = logits(None), logits(3)
    assert np.isnan(hurt[3]).all()
    np.testing.assert_array_equal(np.delete(hurt, 3, axis=0), np.delete(sound, 3, axis=0))
    decoder.close()


def test_large_and_small_inputs_are_numbers_still(decoder: TiledDecoder) -> None:
    """Peaks of the largest floats, of the least, and of none at all."""

    def attend(_: int, *arrays: NDArray[np.float32]) -> None:
        arrays[-1][0], arrays[-1][1], arrays[-1][2] = 1e30, 1e-40, 0

    rows = np.arange(3)
    assert np.isfinite(decoder.forward(np.array(IDS[:3], np.int32), rows.astype(np.int32), rows, attend)).all()


@pytest.mark.parametrize("kind", ["F16", "Q5_0", "Q4_K"])
def test_a_type_without_tiles_is_left_to_others(tmp_path: Path, kind: str) -> None:
    wide = replace(TINY, hidden=256, heads=16, ffn=256)  # Q4_K has blocks of 256
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", replace(wide, value_type=kind))) as opened:
        assert tiles_of(opened, ModelConfig.from_gguf(opened), "int8") is None
        decoder = load_decoder(opened, cache_dir=tmp_path)
    assert isinstance(decoder, Decoder)


def test_float_activations_are_left_to_others(tiny: Path) -> None:
    with GGUFFile.open(tiny) as opened:
        cache_dir = tiny.parent / "cache"
        assert isinstance(load_decoder(opened, activations="int8", cache_dir=cache_dir), TiledDecoder)
        assert isinstance(load_decoder(opened, activations="fp32", cache_dir=cache_dir), Decoder)


def test_steps_are_refused_before_anything_runs_and_after_the_end(tiny: Path) -> None:
    decoder = load(tiny, max_rows=2)
    rows = np.arange(3)
    with pytest.raises(UsageError, match="1 to 2 tokens, got 3"):
        decoder.forward(rows.astype(np.int32), rows.astype(np.int32), rows, lambda *_: pytest.fail("it ran"))
    decoder.close()
    decoder.close()
    with pytest.raises(UsageError, match="this decoder is closed: load the model again"):
        decoder.forward(rows[:1].astype(np.int32), rows[:1].astype(np.int32), rows[:1], lambda *_: None)


def test_bad_options_are_refused(tiny: Path) -> None:
    with pytest.raises(UsageError, match='isa "sse" does not run on this machine: use "auto"'):
        load(tiny, isa="sse")
    with pytest.raises(UsageError, match="threads must be at least 1, got 0"):
        load(tiny, threads=0)
    with pytest.raises(UsageError, match="max_rows must be at least 1, got -1"):
        load(tiny, max_rows=-1)


def test_buffers_that_cannot_be_had_are_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        ffi.errno = errno.ENOMEM
        return ffi.NULL

    monkeypatch.setattr(tiled_decoder, "lib", SimpleNamespace(rp_dense_open=refuse))
    with pytest.raises(UsageError, match=r"no room for 2 threads and steps of 300 tokens \(Cannot allocate memory\)"):
        load(tiny, threads=2, max_rows=300)


def test_helpers_leave_at_close(tiny: Path) -> None:
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    decoder = load(tiny, threads=3)
    helpers = set(tasks.iterdir()) - before
    assert len(helpers) == 2
    decoder.close()
    deadline = time.monotonic() + 5  # the kernel may list a joined thread for a moment longer
    while helpers & set(tasks.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not helpers & set(tasks.iterdir())


def test_tiles_are_written_once_and_identify_the_model(tiny: Path, tmp_path: Path) -> None:
    first = load(tiny)
    (entry,) = (tiny.parent / "cache" / "weights").glob("*tiles*")
    written = (entry / "weights.bin").stat().st_ino
    same = load(tiny, threads=2, isa="plain")
    assert (entry / "weights.bin").stat().st_ino == written
    assert (first.fingerprint, first.numerics) == (same.fingerprint, same.numerics)
    other = load(write_tiny_llama(tmp_path / "other.gguf", replace(TINY, seed=1)))
    assert other.fingerprint != first.fingerprint
    # 4-bit codes of 2 layers, a scale and an offset for 32 of them, and the head's 272 rows of 8 bits with a scale.
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    assert first.weights_bytes == matrices // 2 + matrices // 32 * 4 + 272 * 64 + 272 * 2 * 2


def test_the_tiles_outlive_the_cache(tiny: Path, tmp_path: Path) -> None:
    decoder = load_to(tmp_path, tiny)
    expected = PlainSession(decoder).step(IDS)
    (file,) = tmp_path.glob("weights/*/weights.bin")
    os.unlink(file)
    np.testing.assert_array_equal(PlainSession(decoder).step(IDS), expected)


def _first_layer(path: Path) -> dict[str, NDArray[np.float64]]:
    """The first layer's keys and values before they are rotated, in float64 from the file."""
    import gguf  # noqa: PLC0415 - only here
    from gguf.quants import dequantize  # noqa: PLC0415 - only here

    weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in gguf.GGUFReader(path).tensors}
    x = weights["token_embd.weight"][IDS]
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + TINY.eps) * weights["blk.0.attn_norm.weight"]
    return {name: h @ weights[f"blk.0.{name}.weight"].T for name in ("attn_k", "attn_v")}

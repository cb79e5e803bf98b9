"""The decoder on tiny random models against a float64 forward pass."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import UnsupportedModel, UsageError
from npu import decoder as decoder_module
from npu.decoder import Decoder
from npu.gguf import GGUFFile
from npu.segments import SegmentBinding, SegmentBuffers, Segments
from npu.weights import Activations
from tests.npu.reference import PlainSession, reference_logits
from tests.npu.tiny import TINY, TinyLlama, write_tiny_llama

MODELS = {
    "Q4_1, tied Q8_0": TINY,
    "Q4_0": replace(TINY, matrix_type="Q4_0", embedding_type="Q4_0"),
    "Q8_0, own head": replace(TINY, matrix_type="Q8_0", tied_head=False),
    "F16": replace(TINY, matrix_type="F16", embedding_type="F16"),
    "F32": replace(TINY, matrix_type="F32", embedding_type="F32"),
    "mixed forms": replace(TINY, value_type="Q8_0", tied_head=False, embedding_type="Q4_1"),
    "one layer": replace(TINY, layers=1),
    "Qwen2": TinyLlama(family="qwen2", heads=6, head_dim=32),
    "Qwen3": TinyLlama(family="qwen3", head_dim=32, rope_factor=2.5, rope_attention=1.25),
    "factors": replace(TINY, rope_factors=True),
    "odd sizes": TinyLlama(layers=3, hidden=96, heads=6, kv_heads=3, head_dim=32, ffn=160, rope_theta=1e5, eps=1e-6),
}
IDS = [int(i) for i in np.random.default_rng(7).integers(0, TINY.vocab, 40)]


def load(path: Path, activations: Activations, **options: int) -> Decoder:
    with GGUFFile.open(path) as opened:
        return Decoder.load(opened, activations=activations, cache_dir=path.parent / "cache", **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module", params=["fp32", "int8"])
def decoder(tiny: Path, request: pytest.FixtureRequest) -> Decoder:
    return load(tiny, request.param, max_rows=64)


@pytest.mark.parametrize("name", MODELS)
def test_float_activations_follow_the_float64_pass(tmp_path: Path, name: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", MODELS[name])
    expected = reference_logits(path, IDS)
    logits = PlainSession(load(path, "fp32")).step(IDS)
    # Some tens of float32 operations lie on the way of each value, each with a relative error of 2^-24 = 6e-8.
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_int8_activations_cost_about_a_percent(tmp_path: Path, name: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", MODELS[name])
    expected = reference_logits(path, IDS)
    error = PlainSession(load(path, "int8")).step(IDS) - expected
    relative = np.sqrt((error**2).mean() / (expected**2).mean())
    if name in ("F16", "F32"):
        assert relative < 1e-5  # dense weights are multiplied in float32
    else:
        # A normal block of 32 reaches 2.2 sigma, so a step of 2.2 sigma / 127 and an error of step / sqrt(12) = 0.5 %
        # of sigma for each product; a dozen of them on the way add in quadrature to less than 2 %.
        assert 1e-3 < relative < 2e-2


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 7, 7, 7, 7, 5], [16, 16, 8], [39, 1], [2, 1, 37]])
def test_rows_do_not_depend_on_how_they_are_grouped(decoder: Decoder, chunks: list[int]) -> None:
    whole, cut = PlainSession(decoder), PlainSession(decoder)
    expected = whole.step(IDS)
    logits = np.concatenate([cut.step(IDS[sum(chunks[:i]) : sum(chunks[: i + 1])]) for i in range(len(chunks))])
    if "int8" in decoder.numerics:
        np.testing.assert_array_equal(cut.k, whole.k)
        np.testing.assert_array_equal(cut.v, whole.v)
        np.testing.assert_array_equal(logits, expected)
    else:
        # MatMulNBits with float activations adds up in another order for one row than for several.
        assert np.abs(cut.k - whole.k).max() < 1e-5 * np.abs(whole.k).max()
        assert np.abs(cut.v - whole.v).max() < 1e-5 * np.abs(whole.v).max()
        assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


def test_float_rows_are_equal_for_any_count_above_one(tiny: Path) -> None:
    decoder = load(tiny, "fp32")
    whole, cut = PlainSession(decoder), PlainSession(decoder)
    whole.step(IDS)
    for start, stop in ((0, 2), (2, 5), (5, 21), (21, 40)):
        cut.step(IDS[start:stop])
    np.testing.assert_array_equal(cut.k, whole.k)
    np.testing.assert_array_equal(cut.v, whole.v)


def test_only_the_wanted_rows_get_logits(decoder: Decoder) -> None:
    every = PlainSession(decoder).step(IDS)
    some = PlainSession(decoder).step(IDS, rows=[39, 3, 4])
    # In the last segment these are three rows instead of forty; above one row that changes no bit.
    np.testing.assert_array_equal(some, every[[39, 3, 4]])


def test_a_step_without_logits_still_fills_the_cache(decoder: Decoder) -> None:
    silent, loud = PlainSession(decoder), PlainSession(decoder)
    logits = silent.step(IDS, rows=[])
    loud.step(IDS)
    assert logits.shape == (0, TINY.vocab)
    np.testing.assert_array_equal(silent.k, loud.k)
    np.testing.assert_array_equal(silent.v, loud.v)


def test_logits_belong_to_the_caller(decoder: Decoder) -> None:
    session = PlainSession(decoder)
    first = session.step(IDS[:8])
    kept = first.copy()
    session.step(IDS[8:16])
    np.testing.assert_array_equal(first, kept)
    assert first.flags.owndata
    assert first.flags.writeable


def test_attention_sees_contiguous_views_at_fixed_addresses(decoder: Decoder) -> None:
    seen: list[tuple[int, ...]] = []
    config = decoder.config

    def attend(layer: int, *arrays: NDArray[np.float32]) -> None:
        q, k, v, out = arrays
        assert q.shape == out.shape == (5, config.heads, config.head_dim)
        assert k.shape == v.shape == (5, config.kv_heads, config.head_dim)
        assert all(a.flags.c_contiguous and a.dtype == np.float32 for a in arrays)
        seen.append((layer, *(a.ctypes.data for a in arrays)))
        out[:] = 0

    for _ in range(2):
        decoder.forward(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32), np.zeros(0, np.int64), attend)
    assert [entry[0] for entry in seen] == [0, 1, 0, 1]
    assert len({entry[1:] for entry in seen}) == 1


def test_an_error_in_attention_leaves_the_decoder_usable(decoder: Decoder) -> None:
    def attend(layer: int, *_: NDArray[np.float32]) -> None:
        raise KeyboardInterrupt(layer)

    expected = PlainSession(decoder).step(IDS)
    with pytest.raises(KeyboardInterrupt):
        decoder.forward(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), np.zeros(0, np.int64), attend)
    np.testing.assert_array_equal(PlainSession(decoder).step(IDS), expected)


def test_bindings_of_the_latest_row_counts_are_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(SegmentBinding):
        def __init__(self, segments: Segments, buffers: SegmentBuffers, rows: int) -> None:
            made.append(rows)
            super().__init__(segments, buffers, rows)

    monkeypatch.setattr(decoder_module, "SegmentBinding", Counted)
    decoder = load(tiny, "int8")

    def run(*counts: int) -> list[int]:
        made.clear()
        for m in counts:
            np.testing.assert_array_equal(PlainSession(decoder).step(IDS[:m]), expected[:m])
        return made.copy()

    expected = PlainSession(decoder).step(IDS)
    assert run(*range(1, 33), *range(1, 33)) == list(range(1, 33))  # 32 are kept
    assert run(1, 33, 1, 2) == [33, 2]  # 33 took the place of 2, as 1 had just been used


def test_threads_change_no_bit(tiny: Path) -> None:
    one, two = (PlainSession(load(tiny, "int8", threads=threads)).step(IDS) for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_identity_tells_models_and_modes_apart(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", replace(TINY, seed=1))
    first, same, mode, model = (
        load(tiny, "int8"),
        load(tiny, "int8", threads=2),
        load(tiny, "fp32"),
        load(other, "int8"),
    )
    assert (first.fingerprint, first.numerics) == (same.fingerprint, same.numerics)
    assert first.fingerprint == mode.fingerprint
    assert first.numerics != mode.numerics
    assert first.fingerprint != model.fingerprint
    assert (first.geometry.layers, first.geometry.kv_heads, first.geometry.head_dim) == (2, 2, 16)


BAD_STEPS = {
    "no token": ([], [], [], "1 to 64 tokens, got 0"),
    "too many tokens": ([0] * 65, list(range(65)), [], "1 to 64 tokens, got 65"),
    "id of the vocabulary's size": ([0, TINY.vocab], [0, 1], [], f"token id {TINY.vocab} is not within 0 to"),
    "negative id": ([0, -1], [0, 1], [], "token id -1"),
    "position at the context length": ([0], [TINY.context_length], [], "position 512"),
    "negative position": ([0], [-1], [], "position -1"),
    "a position short": ([0, 1], [0], [], r"2 tokens need 2 positions, got shape \(1,\)"),
    "row behind the last": ([0, 1], [0, 1], [2], "logit row 2"),
    "negative row": ([0, 1], [0, 1], [-1], "logit row -1"),
    "more rows than tokens": ([0], [0], [0, 0], "2 logit rows are wanted of 1 tokens"),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_bad_steps_are_refused_before_anything_runs(decoder: Decoder, case: str) -> None:
    ids, positions, rows, words = BAD_STEPS[case]

    def attend(layer: int, *_: NDArray[np.float32]) -> None:
        pytest.fail(f"layer {layer} ran")

    with pytest.raises(UsageError, match=words):
        decoder.forward(np.array(ids, np.int32), np.array(positions, np.int32), np.array(rows, np.int64), attend)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "int4"}, "activations must be int8 or fp32, got 'int4'"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
    ],
)
def test_bad_options(tiny: Path, options: dict[str, int], words: str) -> None:
    with GGUFFile.open(tiny) as opened, pytest.raises(UsageError, match=words):
        Decoder.load(opened, **options)  # type: ignore[arg-type] # on purpose


def test_other_tensor_types_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", replace(TINY, value_type="MXFP4"))
    with pytest.raises(UnsupportedModel, match=r"'blk.0.attn_v.weight' is MXFP4; rockpage runs F32, F16, BF16, Q4_0"):
        load(path, "int8")


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_missing_extra_is_named(tiny: Path, tmp_path: Path, missing: str) -> None:
    script = f"""
import sys
sys.modules["{missing}"] = None  # import fails as if it were not installed
from pathlib import Path
from hostcache.errors import MissingExtra
from npu import decoder as decoder_module
from npu.decoder import Decoder
from npu.gguf import GGUFFile
from npu.segments import SegmentBinding, SegmentBuffers, Segments
try:
    Decoder.load(GGUFFile.open(sys.argv[1]), cache_dir=Path(sys.argv[2]))
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(f"needs {missing}: pip install 'rockpage[model]'")
    assert done.stderr == ""

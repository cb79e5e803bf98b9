"""Models of every quantised type, from file to logits, against a float64 pass over the reference's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu.blocks import FORMATS
from npu.decoder import Decoder
from npu.ggml import GGMLType
from npu.gguf import GGUFFile
from npu.memory_plan import resident_weights
from npu.tiles import TILED_TYPES
from npu.weights import Activations, PackedMatrix, WeightsPlan, form_of
from tests.npu.reference import PlainSession, reference_logits
from tests.npu.tiny import TinyLlama, write_tiny_llama

IDS = [int(i) for i in np.random.default_rng(7).integers(0, TinyLlama().vocab, 24)]

DOCS = Path(__file__).parents[2] / "docs" / "weights.md"
FORMATS_BY_NAME = {kind.name: kind for kind in FORMATS}
KINDS = [kind.name for kind in FORMATS] + ["BF16"]


def model_of(matrix: str, value: str | None = None) -> TinyLlama:
    """Wide enough for blocks of 256; the embedding, which is also the head, is of the matrices' type."""
    return TinyLlama(
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=256,
        matrix_type=matrix,
        embedding_type=matrix,
        value_type=value,
    )


def load(path: Path, activations: Activations) -> Decoder:
    with GGUFFile.open(path) as opened:
        return Decoder.load(opened, activations=activations, cache_dir=path.parent / "cache")


@pytest.mark.parametrize("model", [*KINDS, "Q4_K with Q6_K"])
def test_logits_are_those_of_the_files_weights(tmp_path: Path, model: str) -> None:
    matrix, _, value = model.partition(" with ")  # v and up of another block size than q, k and gate, as in real files
    path = write_tiny_llama(tmp_path / "tiny.gguf", model_of(matrix, value or None))
    expected = reference_logits(path, IDS)
    exact = PlainSession(load(path, "fp32")).step(IDS)
    # Some tens of float32 operations lie on the way of each value, each with a relative error of 2^-24 = 6e-8.
    assert np.abs(exact - expected).max() < 1e-5 * np.abs(expected).max()
    coarse = load(path, "int8")
    whole, one_by_one = PlainSession(coarse), PlainSession(coarse)
    logits = whole.step(IDS)
    relative = np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean())
    # 0.5 % of sigma for each product by int8 activations, a dozen of them in quadrature: less than 2 %.
    assert relative < (1e-5 if model == "BF16" else 2e-2)
    np.testing.assert_array_equal(np.concatenate([one_by_one.step([token]) for token in IDS]), logits)


@pytest.mark.parametrize("kind", [GGMLType.Q2_K, GGMLType.Q6_K], ids=lambda kind: kind.name)
def test_a_type_with_small_blocks_is_not_stored_dense(tmp_path: Path, kind: GGMLType) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", model_of(kind.name))
    weights = sum(rows * columns for (rows, columns), _ in _matrices(kind.name))
    # Codes of 4 or 8 bits, and for each 16 weights a float32 scale, and an offset if there are any.
    expected = {GGMLType.Q2_K: 8 + 4 + 4, GGMLType.Q6_K: 16 + 4}[kind] * weights // 16
    assert load(path, "int8").weights_bytes == pytest.approx(expected, rel=0.01)


def _matrices(matrix: str) -> list[tuple[tuple[int, ...], str]]:
    return [entry for entry in model_of(matrix).tensors().values() if len(entry[0]) == 2]


def test_the_documented_table_is_what_the_kernels_take() -> None:
    rows = [line.strip("| \n").split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    table = {name.strip(): cells for name, *cells in rows if name.strip() in FORMATS_BY_NAME}
    assert set(table) == set(FORMATS_BY_NAME)
    for name, (stored, int8, fp32, _) in table.items():
        kind = FORMATS_BY_NAME[name]
        assert float(stored) == round(kind.block_bytes * 8 / kind.block_elements + 1e-9, 1)
        assert float(int8) == resident_bits(kind, "int8")
        assert float(fp32) == resident_bits(kind, "fp32")


def resident_bits(kind: GGMLType, activations: Activations) -> float:
    """Bits of a weight in memory."""
    tiled = TILED_TYPES.get(kind)
    if activations == "int8" and tiled is not None:
        return tiled.bits + (1 + tiled.offset) * 16 / 32  # an fp16 scale, and maybe an offset, for each 32
    form, block = form_of(kind, activations)
    matrix = PackedMatrix(form, block, ("x",), (4,), 256, {})
    return 8 * resident_weights(WeightsPlan({("x",): (matrix,)}, nbytes=0), activations) / (4 * 256)

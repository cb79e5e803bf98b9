"""Converted models: each tensor as the reference quantises it, everything else as it was, and whole or not there."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as reference_dequantize
from gguf.quants import quantize as reference_quantize
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, MissingExtra, UnsupportedModel, UsageError
from npu.convert import Conversion, convert_model
from npu.decoder import Decoder
from npu.ggml import GGMLType
from npu.gguf import GGUFFile
from npu.gguf_header import MetaValue, TensorInfo
from npu.requantise import Weights, target_type
from tests.npu.folders import write_random_folder
from tests.npu.reference import PlainSession, reference_logits
from tests.npu.tiny import TinyLlama, write_tiny_llama

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
WEIGHTS: tuple[Weights, ...] = ("int4", "int8")
DENSE = TinyLlama(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, matrix_type="BF16", embedding_type="F16")


def convert(source: Path, weights: Weights, out: Path) -> Conversion:
    with GGUFFile.open(source) as opened:
        return convert_model(opened, opened.metadata, weights, out)


def tensors_of(path: Path) -> dict[str, tuple[str, NDArray[np.float32]]]:
    """Type and values of each tensor, by the reference's reader."""
    return {
        t.name: (t.tensor_type.name, reference_dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize(
    ("kind", "name", "shape", "int4", "int8"),
    [
        # 8.5 bits in Q8_0, 5 in Q4_1; embedding and head keep 8.
        ("F32", "blk.0.ffn_up.weight", (8, 64), "Q4_1", "Q8_0"),
        ("F16", "blk.0.ffn_up.weight", (8, 64), "Q4_1", "Q8_0"),
        ("BF16", "token_embd.weight", (8, 64), "Q8_0", "Q8_0"),
        ("F32", "output.weight", (8, 64), "Q8_0", "Q8_0"),
        # What has no more bits than is asked for would only lose: 8.5, 6.6, 6, 5.5, 4.5 bits.
        ("Q8_0", "blk.0.ffn_up.weight", (8, 64), "Q4_1", "Q8_0"),
        ("Q6_K", "blk.0.ffn_up.weight", (8, 256), "Q4_1", "Q6_K"),
        ("Q5_1", "blk.0.ffn_up.weight", (8, 64), "Q4_1", "Q5_1"),
        ("Q5_K", "blk.0.ffn_up.weight", (8, 256), "Q4_1", "Q5_K"),
        ("Q4_K", "blk.0.ffn_up.weight", (8, 256), "Q4_K", "Q4_K"),
        ("Q4_1", "blk.0.ffn_up.weight", (8, 64), "Q4_1", "Q4_1"),
        ("Q6_K", "token_embd.weight", (8, 256), "Q6_K", "Q6_K"),
        # Rows that are no whole blocks stay; vectors become F32.
        ("F16", "blk.0.ffn_up.weight", (8, 48), "F16", "F16"),
        ("BF16", "blk.0.attn_norm.weight", (64,), "F32", "F32"),
        ("F32", "blk.0.attn_q.bias", (64,), "F32", "F32"),
    ],
)
def test_each_tensor_is_brought_to_a_type_it_gains_from(
    kind: str, name: str, shape: tuple[int, ...], int4: str, int8: str
) -> None:
    stored = GGMLType[kind]
    info = TensorInfo(name, shape, stored, 0, stored.bytes_of(int(np.prod(shape))))
    assert tuple(target_type(name, info, weights).name for weights in WEIGHTS) == (int4, int8)


def test_a_type_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor 'x' is IQ3_S; rockpage converts from F32, .*, IQ4_NL: start"):
        target_type("x", TensorInfo("x", (1, 256), GGMLType.IQ3_S, 0, 110), "int8")


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_the_output_holds_what_the_reference_makes_of_the_source(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu.requantise._CHUNK_ELEMENTS", 3000)  # 11 rows at a time, and then the rest
    # Norms of heads have 80 bytes, which GGUF pads to 96.
    model = replace(DENSE, family="qwen3", heads=8, kv_heads=8, head_dim=20, tied_head=False)
    source = write_tiny_llama(tmp_path / "source.gguf", model)
    out = tmp_path / "out.gguf"
    done = convert(source, weights, out)
    matrix = {"int4": "Q4_1", "int8": "Q8_0"}[weights]
    before, after = tensors_of(source), tensors_of(out)
    assert list(after) == list(before)
    errors: dict[str, list[float]] = {"F32": [0, 1], "Q4_1": [0, 0], "Q8_0": [0, 0]}
    for name, (kind, values) in after.items():
        wanted = before[name][1]
        expected = "F32" if wanted.ndim == 1 else "Q8_0" if name in ("token_embd.weight", "output.weight") else matrix
        assert kind == expected, name
        reference_type = gguf.GGMLQuantizationType[kind]
        stored = reference_dequantize(reference_quantize(wanted, reference_type), reference_type)
        np.testing.assert_array_equal(values, stored, err_msg=name)
        errors[kind][0] += float(((values - wanted).astype(np.float64) ** 2).sum())
        errors[kind][1] += float((wanted.astype(np.float64) ** 2).sum())
    assert done.nbytes == out.stat().st_size
    assert {part.type.name for part in done.parts} == {"F32", "Q8_0", matrix}
    for part in done.parts:
        error, total = errors[part.type.name]
        assert part.loss.relative == pytest.approx(np.sqrt(error / total), rel=1e-6)
    # Uniform rounding by steps of (max - min) / 15, or of max / 127: 2 * 2.2 sigma / 15 / sqrt(12) = 8.5 %, and 0.5 %.
    assert {part.type.name: part.loss.relative for part in done.parts}["Q8_0"] < 0.0065
    assert max(part.loss.relative for part in done.parts) < 0.09


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.03), ("int4", 0.35)])
def test_the_output_scores_like_the_source(tmp_path: Path, weights: Weights, bound: float) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", DENSE)
    convert(source, weights, tmp_path / "out.gguf")
    ids = [int(i) for i in np.random.default_rng(3).integers(0, DENSE.vocab, 24)]
    expected = reference_logits(source, ids)
    with GGUFFile.open(tmp_path / "out.gguf") as opened:
        decoder = Decoder.load(opened, activations="fp32", cache_dir=tmp_path / "cache")
    logits = PlainSession(decoder).step(ids)
    np.testing.assert_allclose(logits, reference_logits(tmp_path / "out.gguf", ids), atol=1e-5 * abs(expected).max())
    # Each product errs by the weights' 0.5 or 8.5 %; a dozen of them on the way add in quadrature: 3.5 times that.
    assert np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()) < bound


def test_a_model_that_is_small_already_is_copied(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf")  # Q4_1 and Q8_0
    done = convert(source, "int4", tmp_path / "out.gguf")
    assert [part.loss.relative for part in done.parts] == [0.0, 0.0, 0.0]
    assert all(part.copied for part in done.parts)
    with GGUFFile.open(source) as a, GGUFFile.open(tmp_path / "out.gguf") as b:
        assert {name: a.data(name).tobytes() for name in a.tensors} == {
            name: b.data(name).tobytes() for name in b.tensors
        }
        assert b.metadata == {**a.metadata, "general.quantization_version": 2}  # ours never said


def test_metadata_is_carried_over_in_the_types_that_readers_insist_on(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", DENSE)
    more: dict[str, MetaValue] = {
        "a.large": 1 << 40,
        "a.negative": -5,
        "a.beyond": 1e300,
        "a.float": 0.5,
        "a.infinite": float("inf"),
        "a.flags": [True, False],
        "a.floats": [0.5, -1.25],
        "a.floats_beyond": [0.5, -1e300],
        "a.large_list": [1, 1 << 31],
        "a.wide_list": [-1, 1 << 31],
        "a.largest": (1 << 64) - 1,
        "a.empty": [],
        "a.text": "zwölf",
        "general.alignment": 64,
    }
    with GGUFFile.open(source) as opened:
        metadata = {**opened.metadata, **more}
        convert_model(opened, metadata, "int4", tmp_path / "out.gguf")
    with GGUFFile.open(tmp_path / "out.gguf") as opened:
        expected = {key: value for key, value in metadata.items() if key not in ("a.empty", "general.alignment")}
        assert opened.metadata == {**expected, "general.file_type": 3, "general.quantization_version": 2}
    types = {
        key: [kind.name for kind in field.types] for key, field in gguf.GGUFReader(tmp_path / "out.gguf").fields.items()
    }
    original = {key: [kind.name for kind in field.types] for key, field in gguf.GGUFReader(source).fields.items()}
    assert {key: types[key] for key in original if not key.startswith("GGUF.")} == {
        key: kinds for key, kinds in original.items() if not key.startswith("GGUF.")
    }
    assert {key: types[key][-1] for key in more if key in types} == {
        "a.large": "INT64",
        "a.negative": "INT32",
        "a.beyond": "FLOAT64",
        "a.float": "FLOAT32",
        "a.infinite": "FLOAT32",
        "a.flags": "BOOL",
        "a.floats": "FLOAT32",
        "a.floats_beyond": "FLOAT64",
        "a.large_list": "UINT32",
        "a.wide_list": "INT64",
        "a.largest": "UINT64",
        "a.text": "STRING",
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38], ids=["nan", "infinite", "beyond the scales"])
def test_weights_that_no_scale_can_hold_are_refused(tmp_path: Path, value: float) -> None:
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    weights = np.ones((4, 64), np.float32)
    weights[2, 5] = value
    writer.add_tensor("blk.0.ffn_up.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        BadModelFile, match=r"'blk\.0\.ffn_up\.weight' has weights that are infinite, not numbers, or too"
    ):
        convert(tmp_path / "source.gguf", "int8", tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == ["source.gguf"]


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf")
    content = source.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        convert(source, "int4", source)
    assert source.read_bytes() == content


def test_a_disk_that_is_too_small_is_refused_before_the_work(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", DENSE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # less than the output's some 1.3 MB
    try:
        with pytest.raises(UsageError, match=r"out.gguf would have \d{7} bytes: .*; make room or write it elsewhere"):
            convert(source, "int8", tmp_path / "out.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["source.gguf"]


def test_without_gguf_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"writing GGUF needs gguf: pip install 'rockpage\[model\]'"):
        convert(source, "int4", tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == ["source.gguf"]


# --- in processes of their own ------------------------------------------------------------------------------------

_PROBE = """
import json, sys
import gguf, gguf.quants
from npu.convert import convert_model
from npu.source import open_model
from tests.footprint import Footprint
with open_model(sys.argv[1]) as source:
    before = Footprint.of_this_process()
    convert_model(source, source.metadata, sys.argv[3], sys.argv[2])
    print(json.dumps([before.resident, Footprint.of_this_process().peak]))
"""


def growth_of(source: Path, weights: str) -> int:
    """Bytes by which a process grows at most while it converts."""
    command = [sys.executable, "-c", _PROBE, str(source), str(source.with_name("out.gguf")), weights]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    before, peak = json.loads(done.stdout)
    return int(peak - before)


IN_THE_WORKS = 10 * MIB
"""40 bytes for each of the 2^18 weights that are quantised at a time."""

SLACK = 8 * MIB
"""What allocators keep, and the kernel, which counts the peak in batches, does not see at once."""


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_memory_is_bounded_however_large_a_tensor_is(tmp_path: Path, weights: str) -> None:
    source = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    tensor = np.random.default_rng(0).standard_normal((8192, 2048), np.float32)  # 64 MiB, as of a large vocabulary
    for name in ("token_embd", "blk.0.ffn_up"):
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert IN_THE_WORKS / 2 < growth_of(source, weights) < IN_THE_WORKS + SLACK


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_memory_of_a_sharded_folder_is_bounded_by_one_layer(tmp_path: Path, weights: str) -> None:
    """A llama's, whose q and k are reordered in a copy of 2 MiB."""
    model = TinyLlama(layers=4, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096)
    folder = write_random_folder(tmp_path / "folder", model, shards=2)
    layer = 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096)  # fp16
    assert layer == 32 * MIB
    assert IN_THE_WORKS / 2 < growth_of(folder, weights) < IN_THE_WORKS + 2 * MIB + SLACK < layer


_KILLED = """
import sys, time
from npu import convert
from npu.gguf import GGUFFile
real = convert.requantise
def slow(source, name, target, loss):
    if name == "output_norm.weight":  # the last one
        print("almost done", flush=True)
        time.sleep(60)
    return real(source, name, target, loss)
convert.requantise = slow
with GGUFFile.open(sys.argv[1]) as source:
    convert.convert_model(source, source.metadata, "int8", sys.argv[2])
"""


def test_a_killed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", DENSE)
    command = [sys.executable, "-c", _KILLED, str(source), str(tmp_path / "out.gguf")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "almost done\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["source.gguf"]

"""Model folders: what transformers writes is understood, what does not fit is refused by its own name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hostcache.errors import BadModelFile, ModelError, UnsupportedModel, UsageError
from npu.convert import convert_model
from npu.decoder import Decoder
from npu.ggml import GGMLType
from npu.gguf import GGUFFile
from npu.huggingface import HuggingFaceFolder
from npu.huggingface_names import gguf_name, huggingface_name
from npu.model import ModelConfig
from npu.rope import RopeScaling, yarn_attention
from npu.source import open_model
from tests.npu.oracle import RandomModel, judge, save_folder
from tests.npu.reference import PlainSession

IDS = list(range(0, 200, 7))
SMALL = RandomModel("qwen2", 16, hidden=32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untied model of each family, as transformers saves it; not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    models = {name: RandomModel(name, 16, hidden=32) for name in ("llama", "qwen2", "qwen3")}
    return {name: save_folder(model.build(), root / name) for name, model in models.items()}


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of qwen2's folder, to be changed."""
    return shutil.copytree(saved["qwen2"], tmp_path / "model")


def edit(folder: Path, **changes: object) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def read(folder: Path) -> ModelConfig:
    with HuggingFaceFolder.open(folder) as source:
        return ModelConfig.from_gguf(source)


def test_dimensions(folder: Path) -> None:
    config = read(folder)
    assert (config.family.name, config.layers, config.hidden, config.ffn) == ("qwen2", 2, 32, 192)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab, config.context_length, config.eps, config.tied_head) == (260, 512, 1e-6, False)


def test_what_is_left_out_has_transformers_defaults(folder: Path, saved: dict[str, Path], tmp_path: Path) -> None:
    edit(folder, head_dim=None, rope_parameters=None)
    edit(folder, hidden_act=None, layer_types=None, use_sliding_window=None, tie_word_embeddings=None)
    edit(folder, num_attention_heads=2, num_key_value_heads=2)  # 32 / 2 is 16
    with pytest.raises(BadModelFile, match=r"q_proj.weight' is \[64, 32\], the header calls for \[32, 32\]"):
        read(folder)
    qwen3 = shutil.copytree(saved["qwen3"], tmp_path / "qwen3")
    edit(qwen3, head_dim=None)
    with pytest.raises(BadModelFile, match=r"q_proj.weight' is \[64, 32\], the header calls for \[512, 32\]"):
        read(qwen3)


def test_older_folders_name_the_rotation_otherwise(folder: Path) -> None:
    edit(folder, rope_parameters=None, rope_theta=1000000, rope_scaling={"type": "linear", "factor": 2})
    rope = read(folder).rope
    assert (rope.theta, rope.scaling, rope.factor) == (1000000.0, RopeScaling.LINEAR, 2.0)


def test_yarn_stretches_the_context(folder: Path) -> None:
    """As Qwen2.5's instructions add it, beside the positions the model was trained for."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit(folder, rope_parameters=None, rope_scaling=yarn)
    config = read(folder)
    assert config.context_length == 2048
    assert config.rope.attention == pytest.approx(yarn_attention(4.0), rel=1e-12)


def test_yarn_with_an_attention_of_its_own(folder: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    edit(folder, rope_parameters={**yarn, "attention_factor": 0.7})
    assert read(folder).rope.attention == pytest.approx(0.7, rel=1e-12)
    edit(folder, rope_parameters={**yarn, "mscale": 2.0, "mscale_all_dim": 0.5})
    expected = (0.1 * 2 * np.log(4) + 1) / (0.1 * 0.5 * np.log(4) + 1)
    assert read(folder).rope.attention == pytest.approx(expected, rel=1e-12)


def test_a_tied_head_may_be_stored_twice(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    config = read(folder)
    assert config.tied_head
    assert config.head_tensor == "token_embd.weight"


def test_an_untied_head_must_be_there(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(BadModelFile, match=r"tensor 'lm_head.weight' is missing"):
        read(folder)
    edit(folder, tie_word_embeddings=None)  # then the tensors tell
    assert read(folder).tied_head


def test_stored_frequencies_are_left_alone(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    assert read(folder).layers == 2


@pytest.mark.parametrize(("name", "kind"), [("bfloat16", GGMLType.BF16), ("float16", GGMLType.F16)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_half_precision_weights_are_exact(tmp_path: Path, family: str, name: str, kind: GGMLType) -> None:
    import torch  # noqa: PLC0415 - see tests/npu/oracle.py

    dtype = getattr(torch, name)
    model = RandomModel(family, 16, hidden=32).build()
    with torch.no_grad():
        for weight in model.parameters():  # not by `model.to`, which would round the rotary frequencies too
            weight.copy_(weight.to(dtype))
    expected = judge(model, IDS)
    save_folder(model.to(dtype), tmp_path / "model")
    with open_model(tmp_path / "model") as source:
        assert {info.type for info in source.tensors.values()} == {kind}
        decoder = Decoder.load(source, activations="fp32", cache_dir=tmp_path)
    np.testing.assert_allclose(PlainSession(decoder).step(IDS), expected, rtol=0, atol=1e-4)


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = SMALL.build()
    whole, parts = save_folder(model, tmp_path / "whole"), save_folder(model, tmp_path / "parts", max_shard_size="40KB")
    assert len(list(parts.glob("model-*.safetensors"))) > 2
    with open_model(whole) as one, open_model(parts) as several:
        assert {name: info.shape for name, info in one.tensors.items()} == {
            name: info.shape for name, info in several.tensors.items()
        }
        for name in one.tensors:
            assert one.data(name).tobytes() == several.data(name).tobytes()
        several.release_pages()
        kept = several.data("token_embd.weight")
    assert kept.tobytes() == model.model.embed_tokens.weight.detach().numpy().tobytes()
    with pytest.raises(UsageError, match="was closed"):
        several.data("token_embd.weight")


def test_llamas_rows_come_in_ggufs_order(saved: dict[str, Path]) -> None:
    stored = load_file(saved["llama"] / "model.safetensors")
    with open_model(saved["llama"]) as source:
        for gguf, own, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
            rows = source.data(f"blk.1.{gguf}.weight").view(np.float32).reshape(-1, 32)
            expected = stored[f"model.layers.1.self_attn.{own}.weight"]
            for row in range(16 * heads):  # neighbours 2i and 2i + 1 of a head are its rows i and i + 8
                head, pair, half = row // 16, row % 16 // 2, row % 2
                np.testing.assert_array_equal(rows[row], expected[head * 16 + half * 8 + pair])
        values = source.data("blk.1.attn_v.weight").view(np.float32).reshape(-1, 32)
    np.testing.assert_array_equal(values, stored["model.layers.1.self_attn.v_proj.weight"])


def test_the_configuration_is_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    def load() -> Decoder:
        with open_model(folder) as source:
            return Decoder.load(source, activations="fp32", cache_dir=tmp_path / "cache")

    first, same = load(), load()
    edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    other = load()
    assert (first.fingerprint, first.numerics) == (same.fingerprint, same.numerics)
    assert first.fingerprint != other.fingerprint
    assert first.numerics != other.numerics  # the rotation is in both


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED: dict[str, tuple[dict[str, object], type[ModelError], str]] = {
    "model type": ({"model_type": "mamba"}, UnsupportedModel, "model type 'mamba'.*rockpage runs llama, qwen2, qwen3"),
    "mixture": ({"model_type": "qwen2_moe"}, UnsupportedModel, "model type 'qwen2_moe'"),
    "no model type": ({"model_type": None}, BadModelFile, "key 'model_type' is missing"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantised for another runtime"),
    "window that is not used": (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128},
        BadModelFile,
        r"layer_types' is \['full_attention', 'sliding_attention'\]: use_sliding_window and sliding_window say",
    ),
    "window of a third kind": (
        {"layer_types": ["full_attention", "chunked_attention"]},
        UnsupportedModel,
        "layers of type 'chunked_attention'.*full_attention and sliding_attention",
    ),
    "window of too few layers": (
        {"layer_types": ["full_attention"]},
        BadModelFile,
        r"layer_types' is \['full_attention'\]: it must be a list of 2 of type str",
    ),
    "window of a llama": (
        {"model_type": "llama", "layer_types": None, "use_sliding_window": True},
        UnsupportedModel,
        "sliding windows in a Llama",
    ),
    "window of no tokens": ({"sliding_window": 0}, BadModelFile, "sliding_window' is 0: it must be a positive integer"),
    "layers without end": ({"num_hidden_layers": 4097}, BadModelFile, "num_hidden_layers' is 4097.*4096 at most"),
    "rope type": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        UnsupportedModel,
        "type 'dynamic'.*default, linear, llama3, yarn",
    ),
    "part of the head": ({"partial_rotary_factor": 0.5}, UnsupportedModel, "part of each head .0.5"),
    "yarn in fractions": ({"rope_parameters": {**YARN, "truncate": False}}, UnsupportedModel, "without truncation"),
    "rope is a list": ({"rope_parameters": [1]}, BadModelFile, r"rope_parameters' is \[1\]: it must be an object"),
    "linear without factor": ({"rope_parameters": {"rope_type": "linear"}}, BadModelFile, "key 'factor' is missing"),
    "llama3 without low": (
        {"rope_parameters": {**LLAMA3, "low_freq_factor": None}},
        BadModelFile,
        "key 'low_freq_factor' is missing",
    ),
    "llama3 upside down": (
        {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}},
        BadModelFile,
        "high_freq_factor' is 4.0: low_freq_factor is 4.0",
    ),
    "llama3 beyond float32": ({"rope_parameters": {**LLAMA3, "factor": 1e300}}, BadModelFile, "rope_freqs.weight"),
    "no layers": ({"num_hidden_layers": 0}, BadModelFile, "num_hidden_layers' is 0: it must be a positive integer"),
    "layers by the billion": ({"num_hidden_layers": 10**400}, BadModelFile, "num_hidden_layers' is 1000"),
    "boolean": ({"hidden_size": True}, BadModelFile, "hidden_size' is True"),
    "a list of heads": (
        {"num_key_value_heads": [2, 4]},
        UnsupportedModel,
        "num_key_value_heads' that differs by layer",
    ),
    "groups": ({"num_key_value_heads": 3}, BadModelFile, "4 heads are not a multiple"),
    "NaN": ({"rms_norm_eps": float("nan")}, BadModelFile, "rms_norm_eps' is nan"),
    "tied is text": ({"tie_word_embeddings": "no"}, BadModelFile, "tie_word_embeddings' is 'no'"),
    "odd head": ({"head_dim": 15}, BadModelFile, "key_length' is 15"),
    "endless head": ({"head_dim": 2**31}, BadModelFile, "head_dim' is 2147483648: it must be .* 4096 at most"),
    "a layer too many": (
        {"num_hidden_layers": 3, "layer_types": None},
        BadModelFile,
        "tensor 'model.layers.2.input_layernorm.weight' is missing",
    ),
    "a layer too few": (
        {"num_hidden_layers": 1, "layer_types": None},
        UnsupportedModel,
        "tensor 'model.layers.1.*' is not part of the qwen2 models",
    ),
    "wider": ({"hidden_size": 64}, BadModelFile, r"'model.embed_tokens.weight' is \[260, 32\].*\[260, 64\]"),
    "biases of another family": (
        {"model_type": "llama", "tie_word_embeddings": False},
        UnsupportedModel,
        "tensor 'model.layers.0.self_attn.k_proj.bias' is not part of the llama models",
    ),
    "norms of another family": (
        {"model_type": "qwen3"},
        BadModelFile,
        "'model.layers.0.self_attn.q_norm.weight' is missing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_do_not_fit_are_refused(folder: Path, case: str) -> None:
    changes, kind, words = REFUSED[case]
    edit(folder, **changes)
    with pytest.raises(kind, match=words) as caught:
        read(folder)
    assert str(caught.value).startswith(str(folder))
    assert type(caught.value) is kind


WINDOWED: dict[str, tuple[dict[str, object], tuple[int, int]]] = {
    "listed": (
        {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 128},
        (128, 0),
    ),
    "behind the first": ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 128}, (0, 128)),
    "behind more than there are": ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 128}, (0, 0)),
    "behind transformers' 28": ({"use_sliding_window": True, "max_window_layers": None, "sliding_window": 128}, (0, 0)),
    "not used": ({"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 128}, (0, 0)),
    "the whole context": ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}, (0, 0)),
    "transformers' 4096": (
        {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192, "sliding_window": None},
        (4096, 4096),
    ),
}


@pytest.mark.parametrize("case", WINDOWED)
def test_layers_have_the_windows_that_transformers_gives_them(folder: Path, case: str) -> None:
    changes, windows = WINDOWED[case]
    edit(folder, **{"layer_types": None, **changes})
    assert read(folder).windows == windows


def test_all_layers_of_a_mistral_have_its_window(saved: dict[str, Path], tmp_path: Path) -> None:
    """Its tensors are a llama's. A key that is missing is transformers' 4096, null is none."""
    folder = shutil.copytree(saved["llama"], tmp_path / "mistral")
    edit(folder, model_type="mistral", sliding_window=100)
    config = read(folder)
    assert (config.family.name, config.windows) == ("llama", (100, 100))
    edit(folder, sliding_window=None, max_position_embeddings=8192)
    assert read(folder).windows == (4096, 4096)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "sliding_window": None}))
    assert read(folder).windows == (0, 0)


def test_a_converted_model_keeps_its_windows(folder: Path, tmp_path: Path) -> None:
    edit(folder, layer_types=None, use_sliding_window=True, max_window_layers=1, sliding_window=128)
    with HuggingFaceFolder.open(folder) as source:
        convert_model(source, source.metadata, "int8", tmp_path / "model.gguf")
    with GGUFFile.open(tmp_path / "model.gguf") as converted:
        assert ModelConfig.from_gguf(converted).windows == (0, 128)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "[" * 100_000, '{"a": "\udcff"}', '{"a": ' + "9" * 5000 + "}"])
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(BadModelFile, match=r"config.json"):
        read(folder)


def test_a_folder_without_a_model_says_what_it_lacks(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds no config.json: give a .gguf file or a Hugging Face folder"):
        open_model(folder)
    with pytest.raises(UsageError, match="cannot open model file"):
        open_model(folder / "elsewhere")


def test_a_damaged_shard_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadModelFile, match=r"model.safetensors: .*damaged or cut short"):
        read(folder)


INDEXES: dict[str, tuple[object, str]] = {
    "no map": ({}, "'weight_map' must give the name of a file in the same folder"),
    "a list": ({"weight_map": []}, "'weight_map' must give"),
    "elsewhere": ({"weight_map": {"a": "../model.safetensors"}}, "'weight_map' must give"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "'weight_map' must give"),
    "the folder above": ({"weight_map": {"a": ".."}}, "'weight_map' must give"),
    "not text": ({"weight_map": {"a": 1}}, "'weight_map' must give"),
    "a tensor that is not there": (
        {"weight_map": {"model.norm.weight": "one.safetensors", "ghost": "one.safetensors"}},
        "tensor 'ghost' is in model.safetensors.index.json but not in one.safetensors",
    ),
    "a tensor that is not listed": (
        {"weight_map": {"model.norm.weight": "one.safetensors"}},
        "tensor 'lm_head.weight' is in one.safetensors but not in model.safetensors.index.json",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_indexes_that_do_not_fit_are_refused(folder: Path, case: str) -> None:
    index, words = INDEXES[case]
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match=words):
        read(folder)


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(UsageError, match=r"cannot open model file .*gone.safetensors: No such file"):
        read(folder)


@pytest.mark.parametrize(
    ("own", "gguf"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.11.post_attention_layernorm.weight", "blk.11.ffn_norm.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
    ],
)
def test_names_translate_both_ways(own: str, gguf: str) -> None:
    assert gguf_name(own) == gguf
    assert huggingface_name(gguf) == own


@pytest.mark.parametrize("name", ["model.layers.01.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight", "x"])
def test_unknown_names_stay_as_they_are(name: str) -> None:
    """So that two tensors never become one, and a refusal shows the name that is in the file."""
    assert gguf_name(name) == name
    assert huggingface_name(name) == name

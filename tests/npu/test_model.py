"""ModelConfig: what a header says, and every way in which it may not fit the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hostcache.errors import BadModelFile, ModelError, UnsupportedModel
from hostcache.geometry import KVGeometry
from npu.architectures import ARCHITECTURES
from npu.gguf import GGUFFile, MetaValue
from npu.model import ModelConfig
from npu.rope import Rope, RopeScaling
from tests.npu.tiny import TINY, write_tiny_llama


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[GGUFFile]:
    """An open tiny model; tests edit its header in memory."""
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")) as opened:
        yield opened


def test_dimensions_come_from_the_header(tiny: GGUFFile) -> None:
    config = ModelConfig.from_gguf(tiny)
    assert config == ModelConfig(
        family=ARCHITECTURES["llama"],
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=3 + 256 + 13,
        context_length=512,
        rope=Rope(10000.0),
        eps=float(np.float32(1e-5)),
        tied_head=True,
        windows=(0, 0),
    )
    assert config.geometry == KVGeometry(layers=2, kv_heads=2, head_dim=16)
    assert config.head_tensor == "token_embd.weight"


def test_the_demo_models_dimensions(demo_model: Path) -> None:
    with GGUFFile.open(demo_model) as opened:
        config = ModelConfig.from_gguf(opened)
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.ffn, config.vocab) == (64, 1536, 49152)
    assert (config.context_length, config.rope, config.tied_head) == (8192, Rope(100000.0), True)
    assert config.geometry.bytes_per_token == 30 * 2 * 3 * 64 * 2


def test_an_own_head_is_noticed(tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", replace(TINY, tied_head=False))) as opened:
        config = ModelConfig.from_gguf(opened)
    assert not config.tied_head
    assert config.head_tensor == "output.weight"


def test_optional_keys_have_the_formats_defaults(tiny: GGUFFile) -> None:
    full = ModelConfig.from_gguf(tiny)
    # heads * key_length is the hidden width here, as where the key is left out.
    for key in (
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    ):
        del tiny.metadata[f"llama.{key}"]
    assert ModelConfig.from_gguf(tiny) == full


REFUSED: dict[str, tuple[dict[str, MetaValue], type[ModelError], str]] = {
    "architecture": ({"general.architecture": "mamba"}, UnsupportedModel, "'mamba'.*rockpage runs llama"),
    "experts": ({"llama.expert_count": 8}, UnsupportedModel, "mixture of 8 experts"),
    "rope scaling": ({"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "type 'longrope'.*none, linear, yarn"),
    "yarn without mixing": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5},
        UnsupportedModel,
        "yarn_ext_factor 0.5",
    ),
    "yarn of another family": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
        UnsupportedModel,
        "yarn_log_multiplier 0.1",
    ),
    "yarn of base 1": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.freq_base": 1.0},
        BadModelFile,
        "freq_base' is 1.0: yarn",
    ),
    "yarn of no factor": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 5e-324},  # infinity, of which none is taken
        BadModelFile,
        "freq_base' is 10000.0.*overflow",
    ),
    "angles overflow": ({"llama.rope.scaling.factor": 1e-300}, BadModelFile, "freq_base' is 10000.0.*overflow"),
    "attention overflows": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1e39},  # beyond float32
        BadModelFile,
        "freq_base' is 10000.0.*overflow",
    ),
    "frequencies overflow": ({"llama.rope.scaling.factor": 5e-324}, BadModelFile, "freq_base' is 10000.0.*overflow"),
    "negative factor": ({"llama.rope.scaling.factor": -2.0}, BadModelFile, "scaling.factor' is -2.0"),
    "window of no layers": (
        {"llama.attention.sliding_window": 511},
        UnsupportedModel,
        r"sliding window of 511 tokens without a list of the layers.*sliding_window_pattern.*rockpage convert",
    ),
    "window by a period": (
        {"llama.attention.sliding_window": 511, "llama.attention.sliding_window_pattern": 2},
        UnsupportedModel,
        "sliding window of 511 tokens without a list",
    ),
    "window of too few layers": (
        {"llama.attention.sliding_window": 511, "llama.attention.sliding_window_pattern": [True]},
        BadModelFile,
        r"sliding_window_pattern' is \[True\]: it must be a list of 2 of type bool",
    ),
    "window by numbers": (
        {"llama.attention.sliding_window": 511, "llama.attention.sliding_window_pattern": [1, 0]},
        BadModelFile,
        r"sliding_window_pattern' is \[1, 0\]: it must be a list of 2 of type bool",
    ),
    "negative window": ({"llama.attention.sliding_window": -1}, BadModelFile, "sliding_window' is -1"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, UnsupportedModel, "rotation of 8 of 16"),
    "other value width": ({"llama.attention.value_length": 8}, UnsupportedModel, "values of 8 beside keys of 16"),
    "heads by layer": ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedModel, "head_count_kv' that differs"),
    "no layers": ({"llama.block_count": 0}, BadModelFile, "block_count' is 0: it must be a positive integer"),
    "text for a number": ({"llama.embedding_length": "64"}, BadModelFile, "embedding_length' is '64'"),
    "boolean for a number": ({"llama.block_count": True}, BadModelFile, "block_count' is True"),
    "negative": ({"llama.context_length": -1}, BadModelFile, "context_length' is -1"),
    "number for text": ({"general.architecture": 7}, BadModelFile, "general.architecture' is 7"),
    "infinite eps": ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, BadModelFile, "epsilon' is inf"),
    "NaN theta": ({"llama.rope.freq_base": float("nan")}, BadModelFile, "freq_base' is nan"),
    "heads beyond hidden": (
        {"llama.attention.head_count": 128, "llama.attention.head_count_kv": 128, "llama.attention.key_length": 0},
        BadModelFile,
        "key_length' is 0",
    ),
    "endless head": ({"llama.attention.key_length": 2**31}, BadModelFile, "key_length' is 2147483648.* 4096 at most"),
    "odd head": ({"llama.attention.key_length": 15}, BadModelFile, "key_length' is 15"),
    "groups do not divide": ({"llama.attention.head_count_kv": 3}, BadModelFile, "4 heads are not a multiple"),
    "a layer too many": ({"llama.block_count": 3}, BadModelFile, "tensor 'blk.2.attn_norm.weight' is missing"),
    "2^31 layers": ({"llama.block_count": 2**31}, BadModelFile, "block_count' is 2147483648.*4096 at most"),
    "more layers than tensors": ({"llama.block_count": 3}, BadModelFile, "tensor 'blk.2.attn_norm.weight' is missing"),
    "a layer too few": ({"llama.block_count": 1}, UnsupportedModel, "'blk.1.attn_norm.weight' is not part of"),
    "wider": ({"llama.embedding_length": 96}, BadModelFile, r"'token_embd.weight' is \[272, 64\].*\[272, 96\]"),
    "vocabulary": ({"llama.vocab_size": 300}, BadModelFile, "tokenizer has 272 tokens but the model 300"),
    "ffn": ({"llama.feed_forward_length": 64}, BadModelFile, r"ffn_gate.weight' is \[96, 64\].*\[64, 64\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_headers_that_do_not_fit_are_refused(tiny: GGUFFile, case: str) -> None:
    changes, kind, words = REFUSED[case]
    tiny.metadata.update(changes)
    with pytest.raises(kind, match=words) as caught:
        ModelConfig.from_gguf(tiny)
    assert str(caught.value).startswith(f"{tiny.path}: ")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.feed_forward_length",
        "llama.context_length",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_keys_are_named(tiny: GGUFFile, key: str) -> None:
    del tiny.metadata[key]
    with pytest.raises(BadModelFile, match=f"key '{key}' is missing"):
        ModelConfig.from_gguf(tiny)


def test_every_tensor_is_needed(tiny: GGUFFile) -> None:
    for name in list(tiny.tensors):
        info = tiny.tensors.pop(name)
        with pytest.raises(BadModelFile, match=f"'{name}' is missing|'llama.vocab_size' is missing"):
            ModelConfig.from_gguf(tiny)
        tiny.tensors[name] = info
    ModelConfig.from_gguf(tiny)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_that_would_be_ignored_is_refused(tiny: GGUFFile, name: str) -> None:
    tiny.tensors[name] = tiny.tensors["output_norm.weight"]
    with pytest.raises(UnsupportedModel, match=name):
        ModelConfig.from_gguf(tiny)


def rope_of(tiny: GGUFFile, **scaling: MetaValue) -> Rope:
    tiny.metadata.update({f"llama.rope.{key.replace('__', '.')}": value for key, value in scaling.items()})
    return ModelConfig.from_gguf(tiny).rope


def test_a_factor_without_a_type_is_linear(tiny: GGUFFile) -> None:
    assert rope_of(tiny, scaling__factor=4.0) == Rope(10000.0, RopeScaling.LINEAR, 4.0)


def test_the_factors_older_name_is_known(tiny: GGUFFile) -> None:
    assert rope_of(tiny, scale_linear=2.0) == Rope(10000.0, RopeScaling.LINEAR, 2.0)


def test_type_none_overrides_a_factor(tiny: GGUFFile) -> None:
    assert rope_of(tiny, scaling__type="none", scaling__factor=4.0) == Rope(10000.0)


def test_yarn_takes_its_usual_parameters(tiny: GGUFFile) -> None:
    rope = rope_of(tiny, scaling__type="yarn", scaling__factor=4.0)
    # The original context is the model's where nothing is said.
    attention = 0.1 * math.log(4) + 1
    assert rope == Rope(10000.0, RopeScaling.YARN, 4.0, original_context=512, attention=attention)
    more = rope_of(
        tiny,
        scaling__original_context_length=128,
        scaling__attn_factor=0.5,
        scaling__yarn_beta_fast=16.0,
        scaling__yarn_beta_slow=2.0,
    )
    assert (more.original_context, more.beta_fast, more.beta_slow) == (128, 16.0, 2.0)
    assert more.attention == pytest.approx(0.5 * attention)


def test_a_window_that_holds_the_context_hides_nothing(tiny: GGUFFile) -> None:
    tiny.metadata["llama.attention.sliding_window"] = 512
    assert ModelConfig.from_gguf(tiny).windows == (0, 0)


def test_the_layers_of_a_window_are_those_that_the_file_lists(tiny: GGUFFile) -> None:
    plain = ModelConfig.from_gguf(tiny)
    tiny.metadata |= {"llama.attention.sliding_window": 511, "llama.attention.sliding_window_pattern": [False, True]}
    config = ModelConfig.from_gguf(tiny)
    assert config.windows == (0, 511)
    assert config.positions_identity == plain.positions_identity + "/windows-0-511"


def test_frequency_factors_must_be_one_positive_number_for_each_pair(tiny: GGUFFile) -> None:
    tiny.tensors["rope_freqs.weight"] = tiny.tensors["output_norm.weight"]  # 64 numbers, the head has 8 pairs
    with pytest.raises(BadModelFile, match=r"rope_freqs.weight' is \[64\] F32; 8 positive numbers"):
        ModelConfig.from_gguf(tiny)

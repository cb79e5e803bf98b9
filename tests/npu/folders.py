"""Hugging Face folders for tests that do without transformers: what it would save of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.npu.tiny import TinyLlama

__all__ = ["write_folder", "write_random_folder"]

_IN_LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


def write_folder(
    path: Path, model: TinyLlama, gguf_file: Path, *, eos_ids: Sequence[int] = (), shards: int = 1
) -> Path:
    """Write the weights of a GGUF file in float32, with its dimensions and its tokenizer.

    Args:
        path: the folder, to be made.
        model: dimensions, the rotation not scaled.
        gguf_file: from `write_tiny_llama`.
        eos_ids: what generation_config.json names; no such file if empty.
        shards: files of the weights.
    """
    reader = gguf.GGUFReader(gguf_file)
    weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    if model.family == "llama":
        for name, values in weights.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                weights[name] = _to_halves(values, model.head_dim)
    names = _huggingface_names(model)
    _write_model(path, model, {names[name]: values for name, values in weights.items()}, shards)
    keys: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    tokens: list[str] = keys["tokenizer.ggml.tokens"]
    control = [token for token, kind in enumerate(keys["tokenizer.ggml.token_type"]) if kind == gguf.TokenType.CONTROL]
    bos, eos = (tokens[keys[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    _write_json(path / "tokenizer.json", _tokenizer(tokens, control, keys["tokenizer.ggml.merges"]))
    named = {"bos_token": bos, "eos_token": eos, "chat_template": keys["tokenizer.chat_template"]}
    _write_json(path / "tokenizer_config.json", named)
    if eos_ids:
        _write_json(path / "generation_config.json", {"eos_token_id": list(eos_ids)})
    return path


def write_random_folder(path: Path, model: TinyLlama, *, shards: int = 1) -> Path:
    """Write random weights in float16 and their dimensions, and no tokenizer; tensors of one shape are equal."""
    rng = np.random.default_rng(0)
    by_shape = {
        shape: rng.standard_normal(shape, np.float32).astype(np.float16) for shape, _ in model.tensors().values()
    }
    names = _huggingface_names(model)
    _write_model(path, model, {names[name]: by_shape[shape] for name, (shape, _) in model.tensors().items()}, shards)
    return path


def _write_model(path: Path, model: TinyLlama, weights: Mapping[str, NDArray[Any]], shards: int) -> None:
    path.mkdir()
    config = {
        "model_type": model.family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied_head,
    }
    _write_json(path / "config.json", config)
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors")
        return
    where = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: values for name, values in weights.items() if where[name] == file}, path / file)
    _write_json(path / "model.safetensors.index.json", {"weight_map": where})


def _huggingface_names(model: TinyLlama) -> dict[str, str]:
    """By GGUF's names what transformers calls the tensors that any family has, from the gguf package's table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.family.upper()], model.layers)
    stems = ["model.embed_tokens", "model.norm", "lm_head"]
    stems += [f"model.layers.{layer}.{name}" for layer in range(model.layers) for name in _IN_LAYER]
    return {f"{table.get_name(stem)}.{kind}": f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")}


def _to_halves(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows 2i and 2i + 1 of a head, which turn together, become its rows i and i + head_dim / 2."""
    within = [2 * pair + half for half in (0, 1) for pair in range(head_dim // 2)]
    return rows[[head + row for head in range(0, len(rows), head_dim) for row in within]]


def _tokenizer(tokens: list[str], control: list[int], merges: list[str]) -> dict[str, Any]:
    """SmolLM2's steps: digits apart, then byte-level BPE."""
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "added_tokens": [{"id": token, "content": tokens[token], **flags} for token in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, words]},
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {text: token for token, text in enumerate(tokens)}, "merges": merges},
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))

"""Hugging Face folders for tests that do without transformers: what it would save of a model that a GGUF file holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

__all__ = ["write_folder", "write_shards"]

_IN_LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


def write_folder(path: Path, model: Path, *, eos_ids: Sequence[int] = (), shards: int = 1) -> Path:
    """Write the weights of a tiny GGUF file in float32, its dimensions and its tokenizer.

    Args:
        path: the folder, to be made.
        model: from `write_tiny_llama`, its rotation not scaled.
        eos_ids: what generation_config.json names; no file if empty.
        shards: files of the weights.
    """
    reader = gguf.GGUFReader(model)
    keys: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    family = keys["general.architecture"]
    own = {name.removeprefix(f"{family}."): value for name, value in keys.items()}
    weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    named = {theirs: weights[ours] for theirs, ours in _names(family, own["block_count"]) if ours in weights}
    assert len(named) == len(weights)
    if family == "llama":
        for name, values in named.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                named[name] = _to_halves(values, own["attention.key_length"])
    config = {
        "model_type": family,
        "vocab_size": own["vocab_size"],
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["attention.key_length"],
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_theta": own["rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in named,
    }
    path.mkdir()
    write_shards(path, named, shards)
    tokens: list[str] = keys["tokenizer.ggml.tokens"]
    special = [token for token, kind in enumerate(keys["tokenizer.ggml.token_type"]) if kind == gguf.TokenType.CONTROL]
    bos, eos = (tokens[keys[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    files = {
        "config.json": config,
        "tokenizer.json": _tokenizer(tokens, special, keys["tokenizer.ggml.merges"]),
        "tokenizer_config.json": {"bos_token": bos, "eos_token": eos, "chat_template": keys["tokenizer.chat_template"]},
        **({"generation_config.json": {"eos_token_id": list(eos_ids)}} if eos_ids else {}),
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def write_shards(path: Path, weights: dict[str, NDArray[Any]], shards: int) -> None:
    """Write model.safetensors, or several files and their index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return
    where = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: values for name, values in weights.items() if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _names(family: str, layers: int) -> list[tuple[str, str]]:
    """transformers' name and GGUF's of every tensor that any family has, by the gguf package's table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], layers)
    stems = ["model.embed_tokens", "model.norm", "lm_head"]
    stems += [f"model.layers.{layer}.{name}" for layer in range(layers) for name in _IN_LAYER]
    found = [(stem, table.get_name(stem)) for stem in stems]
    return [(f"{stem}.{kind}", f"{ours}.{kind}") for stem, ours in found if ours for kind in ("weight", "bias")]


def _to_halves(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows 2i and 2i + 1 of a head, which turn together, become its rows i and i + head_dim / 2."""
    order = [
        head + 2 * pair + half
        for head in range(0, len(rows), head_dim)
        for half in (0, 1)
        for pair in range(head_dim // 2)
    ]
    return rows[order]


def _tokenizer(tokens: list[str], special: list[int], merges: list[str]) -> dict[str, Any]:
    """SmolLM2's steps: digits apart, then byte-level BPE."""
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "added_tokens": [{"id": token, "content": tokens[token], **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, words]},
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {text: token for token, text in enumerate(tokens)}, "merges": merges},
    }

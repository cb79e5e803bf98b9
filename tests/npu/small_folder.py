"""Writes small random models of every family as Hugging Face folders, without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

__all__ = ["HEADS", "HEAD_DIM", "HIDDEN", "KV_HEADS", "LAYERS", "VOCAB", "write_small_folder"]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 3, 32, 4, 2, 16, 48, 60


def write_small_folder(path: Path, family: str, seed: int = 0) -> Path:
    """A model of `llama`, `qwen2` or `qwen3`, weights in fp16, head untied."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float16]:
        drawn: NDArray[np.float16] = (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float16)
        return drawn

    def vector(size: int, mean: float) -> NDArray[np.float16]:
        drawn: NDArray[np.float16] = (mean + 0.125 * rng.standard_normal(size)).astype(np.float16)
        return drawn

    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * np.float16(8),
        "model.norm.weight": vector(HIDDEN, 1),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            tensors[f"{block}.self_attn.{name}_proj.weight"] = matrix(width, HIDDEN)
            if family == "qwen2":
                tensors[f"{block}.self_attn.{name}_proj.bias"] = vector(width, 0)
            if family == "qwen3" and name != "v":
                tensors[f"{block}.self_attn.{name}_norm.weight"] = vector(HEAD_DIM, 1)
        tensors[f"{block}.self_attn.o_proj.weight"] = matrix(HIDDEN, q_width)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            tensors[f"{block}.mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{name}.weight"] = vector(HIDDEN, 1)
    config = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path

"""Random tiny models of every family, written by Hugging Face's transformers, which also judges their logits.

torch and transformers are imported when a model is built: importing them takes seconds and 300 MB, which is not for
tests of memory that happen to run in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from npu.ggml import GGMLType
from tests.npu.quantised import encode

__all__ = ["FAMILIES", "VOCAB", "RandomModel", "judge", "save_folder", "save_gguf"]

VOCAB = 260
"""Tokens, as many as the toy tokenizer has."""

CONTEXT = 512


@dataclass(frozen=True)
class RandomModel:
    """Dimensions of a model whose logits are of unit order.

    Attributes:
        family: `model_type`.
        window: keys of config.json that say which layers have one.
        rope: `rope_parameters`; the original context is short, so that every scaling shows within 100 tokens.
        tied: whether the head is the embedding.
        head_dim: elements of a head; `heads * head_dim` need not be `hidden`.
    """

    family: str
    head_dim: int
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 128
    ffn: int = 192
    layers: int = 2
    vocab: int = VOCAB
    tied: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The model, with the same random weights every time."""
        import torch  # noqa: PLC0415 - see the module
        import transformers  # noqa: PLC0415 - see the module

        config = transformers.AutoConfig.for_model(
            self.family,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **self.rope},
            attn_implementation="eager",
            **self.window,
        )
        model: Any = transformers.AutoModelForCausalLM
        model = model.from_config(config, dtype=torch.float32).eval()
        random = torch.Generator().manual_seed(len(self.family) * self.head_dim)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                values = torch.randn(weight.shape, generator=random)
                weight.copy_(self._mean(name, weight.ndim) + self._deviation(name, tuple(weight.shape)) * values)
        return model

    def _mean(self, name: str, ndim: int) -> float:
        if ndim == 2 or name.endswith("bias"):
            return 0.0
        # Logits of a tied head are products with the embedding, whose elements are of unit order.
        return self.hidden**-0.5 if self.tied and name == "model.norm.weight" else 1.0

    def _deviation(self, name: str, shape: tuple[int, ...]) -> float:
        if name == "model.embed_tokens.weight":
            return 1.0
        if len(shape) == 1:
            return 0.5 if name.endswith("bias") else 0.125 * self._mean(name, 1)
        adds_to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        return float((shape[1] * (2 * self.layers if adds_to_stream else 1)) ** -0.5)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = {"original_max_position_embeddings": 64}

FAMILIES = {
    "llama-64-tied": RandomModel("llama", 64, tied=True),
    "llama-80-yarn": RandomModel("llama", 80, rope={"rope_type": "yarn", "factor": 4.0, **SHORT}),
    "llama-96-linear": RandomModel("llama", 96, kv_heads=1, rope={"rope_type": "linear", "factor": 2.5}),
    "llama-128-llama3": RandomModel("llama", 128, layers=3, rope={**LLAMA3, **SHORT, "rope_theta": 500000.0}),
    "qwen2-64-tied": RandomModel("qwen2", 64, tied=True, rope={"rope_theta": 1000000.0}),
    "qwen2-96-yarn": RandomModel(
        "qwen2", 96, kv_heads=4, rope={"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, **SHORT}
    ),
    "qwen3-128-tied": RandomModel("qwen3", 128, tied=True, rope={"rope_theta": 1000000.0}),
    "qwen3-80-yarn": RandomModel(
        "qwen3", 80, rope={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, **SHORT}
    ),
    "qwen3-64-llama3": RandomModel("qwen3", 64, heads=2, rope={**LLAMA3, **SHORT}),
    "mistral-64-window": RandomModel("mistral", 64, window={"sliding_window": 24}),
    "qwen2-64-window": RandomModel(
        "qwen2", 64, layers=3, window={"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}
    ),
    "qwen3-64-window": RandomModel(
        "qwen3",
        64,
        window={
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
"""Every family, head width, kind of head, grouping, rotation and kind of window at least once."""


def judge(model: Any, ids: list[int]) -> NDArray[np.float32]:
    """Logits `[tokens, vocab]` in float32."""
    import torch  # noqa: PLC0415 - see the module

    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def save_folder(model: Any, folder: Path, **options: Any) -> Path:
    """Write the model as transformers does; `options` go to `save_pretrained`."""
    model.save_pretrained(folder, **options)
    return folder


def save_gguf(random: RandomModel, model: Any, path: Path, matrix_type: str) -> Path:
    """Write a GGUF file, and give `model` the weights that the file's quants stand for, by the gguf package.

    Frequency factors are taken from transformers' own frequencies. Of the types that the package cannot quantise to,
    the file has random blocks.
    """
    import torch  # noqa: PLC0415 - see the module

    kind = gguf.GGMLQuantizationType[matrix_type]
    architecture = "llama" if random.family == "mistral" else random.family
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(random.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(random.hidden)
    writer.add_feed_forward_length(random.ffn)
    writer.add_head_count(random.heads)
    writer.add_head_count_kv(random.kv_heads)
    writer.add_key_length(random.head_dim)
    writer.add_value_length(random.head_dim)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(random.vocab)
    if window := getattr(model.config, "sliding_window", None):
        writer.add_sliding_window(window)
        types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * random.layers
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])
    rope = model.config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
        usual = 0.1 * np.log(rope["factor"]) + 1
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling / usual)
    if rope["rope_type"] == "llama3":
        trained = rope["rope_theta"] ** (-np.arange(0, random.head_dim, 2) / random.head_dim)
        factors = (trained / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], random.layers)
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        stored = values
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = _to_neighbours(values, random.head_dim)
        used = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        quants = encode(stored, GGMLType(used))
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight", ".bias"))), quants, raw_dtype=used)
        kept = dequantize(quants, used)
        if stored is not values:
            kept = _to_halves(kept, random.head_dim)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _to_neighbours(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Row i of a head and row i + head_dim / 2 become neighbours, one element at a time."""
    order = [
        head + half * head_dim // 2 + pair
        for head in range(0, len(rows), head_dim)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return rows[order]


def _to_halves(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Undo `_to_neighbours`."""
    order = [
        head + 2 * pair + half
        for head in range(0, len(rows), head_dim)
        for half in (0, 1)
        for pair in range(head_dim // 2)
    ]
    return rows[order]

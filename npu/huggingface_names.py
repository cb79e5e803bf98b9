"""What Hugging Face's `transformers` and GGUF call the tensors of a model."""

from __future__ import annotations

import re

__all__ = ["gguf_name", "huggingface_name", "is_derived"]

_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.(.+)\.(weight|bias)")
_BLOCK = re.compile(r"blk\.([0-9]+)\.(.+)\.(weight|bias)")
_INV_FREQ = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")

_BACK_OUTSIDE_LAYERS = {gguf: own for own, gguf in _OUTSIDE_LAYERS.items()}
_BACK_IN_LAYER = {gguf: own for own, gguf in _IN_LAYER.items()}


def gguf_name(name: str) -> str:
    """The name a tensor has in GGUF; an unknown one stays as it is."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _IN_LAYER:
        return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return _OUTSIDE_LAYERS.get(name, name)


def huggingface_name(name: str) -> str:
    """The name a GGUF tensor has in a folder; an unknown one stays as it is."""
    if (match := _BLOCK.fullmatch(name)) and match[2] in _BACK_IN_LAYER:
        return f"model.layers.{match[1]}.{_BACK_IN_LAYER[match[2]]}.{match[3]}"
    return _BACK_OUTSIDE_LAYERS.get(name, name)


def is_derived(name: str) -> bool:
    """Whether a tensor only stores what the configuration says: older folders hold the rotary frequencies."""
    return _INV_FREQ.fullmatch(name) is not None

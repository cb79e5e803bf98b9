"""Writes tiny random GGUF files of each family that load in milliseconds: real format, real tokenizer, no meaning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from npu.ggml import GGMLType
from tests.npu.quantised import encode

__all__ = ["TINY", "TinyLlama", "write_tiny_llama"]

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGES = ["Ġ t", "h e", "i n", "e r", "a n", "r e", "o n", "Ġ a", "Ġt he", "e n", "a t", "o r", "e s"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """Dimensions and storage of a tiny model; `hidden`, `heads * head_dim` and `ffn` are multiples of 32."""

    family: str = "llama"
    """Or "qwen2", with biases of q, k and v; or "qwen3", with norms of q and k."""
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    context_length: int = 512
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    """Of linear scaling."""
    rope_attention: float = 1.0
    """Of cos and sin, beside a scaling."""
    rope_factors: bool = False
    """Whether each pair's frequency has a divisor of its own."""
    window: int = 0
    """Tokens that rows of `sliding` layers see; 0: all."""
    sliding: tuple[bool, ...] = ()
    """Which layers have that window; empty: every one."""
    eps: float = 1e-5
    matrix_type: str = "Q4_1"
    embedding_type: str = "Q8_0"
    value_type: str | None = None
    """Type of attn_v and ffn_up when it differs, so that q|k|v and gate|up cannot be joined."""
    tied_head: bool = True
    seed: int = 0

    @property
    def vocab(self) -> int:
        """Tokens of the byte-level vocabulary that every tiny model carries."""
        return len(_SPECIAL) + 256 + len(_MERGES)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape (rows first) and type of every tensor."""
        matrix, value = self.matrix_type, self.value_type or self.matrix_type
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"q": q, "k": kv, "v": kv}
        out: dict[str, tuple[tuple[int, ...], str]] = {
            "token_embd.weight": ((self.vocab, self.hidden), self.embedding_type)
        }
        for layer in range(self.layers):
            block: dict[str, tuple[tuple[int, ...], str]] = {
                "attn_norm": ((self.hidden,), "F32"),
                "attn_q": ((q, self.hidden), matrix),
                "attn_k": ((kv, self.hidden), matrix),
                "attn_v": ((kv, self.hidden), value),
                "attn_output": ((self.hidden, q), matrix),
                "ffn_norm": ((self.hidden,), "F32"),
                "ffn_gate": ((self.ffn, self.hidden), matrix),
                "ffn_up": ((self.ffn, self.hidden), value),
                "ffn_down": ((self.hidden, self.ffn), matrix),
            }
            if self.family == "qwen3":
                block |= {f"attn_{name}_norm": ((self.head_dim,), "F32") for name in "qk"}
            out |= {f"blk.{layer}.{name}.weight": entry for name, entry in block.items()}
            if self.family == "qwen2":
                out |= {f"blk.{layer}.attn_{name}.bias": ((width,), "F32") for name, width in widths.items()}
        out["output_norm.weight"] = ((self.hidden,), "F32")
        if self.rope_factors:
            out["rope_freqs.weight"] = ((self.head_dim // 2,), "F32")
        if not self.tied_head:
            out["output.weight"] = ((self.vocab, self.hidden), self.embedding_type)
        return out


TINY = TinyLlama()
"""The usual tiny model: Q4_1 matrices and a tied Q8_0 embedding, as in the demo model."""


def write_tiny_llama(path: Path, model: TinyLlama = TINY) -> Path:
    """Write `model` with random weights to `path`; the same model gives the same bytes.

    Every quantised matrix has one block of zeros (scale 0), as real models do.
    """
    writer = gguf.GGUFWriter(path, model.family)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    if model.rope_factor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope_factor)
        writer.add_rope_scaling_attn_factors(model.rope_attention)
    if model.window:
        writer.add_sliding_window(model.window)
        writer.add_sliding_window_pattern(model.sliding or [True] * model.layers)
    writer.add_layer_norm_rms_eps(model.eps)
    writer.add_vocab_size(model.vocab)
    _add_tokenizer(writer)
    rng = np.random.default_rng(model.seed)
    for name, (shape, type_name) in model.tensors().items():
        values = rng.standard_normal(shape, np.float32)
        if name.endswith(".bias"):
            values *= 0.5
        elif len(shape) == 1:  # a norm, or factors of frequencies
            values *= 0.125
            values += 1
        else:
            values /= np.sqrt(np.float32(shape[1])) if name != "token_embd.weight" else 1
            values[0, :32] = 0
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, encode(values, GGMLType(kind)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = [*_SPECIAL, *_byte_characters(), *(merge.replace(" ", "") for merge in _MERGES)]
    types = [gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(_SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next code point from 256 on."""
    spare = iter(range(256, 512))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]

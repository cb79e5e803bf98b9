"""The families of models that rockpage runs: the one table that readers, graphs and `rockpage models` go by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A family of decoders: RMSNorm, grouped-query attention, RoPE on whole heads, SwiGLU, and what sets it apart.

    Attributes:
        name: `general.architecture` of a GGUF file and `model_type` of a Hugging Face folder; a folder's `mistral` is a
            `llama`.
        models: names people know it by.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: each head of queries and keys is normed before it is rotated.
        interleaved: in GGUF, element 2i of a head turns with 2i + 1; if not, element i with i + head_dim / 2.
    """

    name: str
    models: tuple[str, ...]
    qkv_bias: bool
    qk_norm: bool
    interleaved: bool


ARCHITECTURES = {
    family.name: family
    for family in (
        Architecture(
            "llama", ("Llama", "SmolLM2", "TinyLlama", "Mistral"), qkv_bias=False, qk_norm=False, interleaved=True
        ),
        Architecture("qwen2", ("Qwen2", "Qwen2.5"), qkv_bias=True, qk_norm=False, interleaved=False),
        Architecture("qwen3", ("Qwen3",), qkv_bias=False, qk_norm=True, interleaved=False),
    )
}
"""The families that rockpage runs, by name; what is not listed is refused."""

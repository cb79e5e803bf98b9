"""Translates a Hugging Face config.json into GGUF's keys, as llama.cpp's converter does.

What GGUF has no key for and would change an answer is refused by name. The rest (ids of tokens, dtypes, training) is
none of a decoder's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .architectures import ARCHITECTURES, Architecture
from .gguf_header import MetaValue
from .keys import Keys
from .model_windows import windows_in_gguf
from .rope import MOST_HEAD_DIM, llama3_factors, yarn_attention

__all__ = ["ROPE_TYPES", "HuggingFaceConfig"]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Values of `rope_type` that rockpage runs."""

_MOST_POSITIONS = 2**31  # they are int32
_MODEL_TYPES = {name: name for name in ARCHITECTURES} | {"mistral": "llama"}  # by what GGUF calls them
_QWEN3_HEAD_DIM = 128  # Qwen3Config's default; the older families share the width among their heads


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A config.json in GGUF's terms.

    Attributes:
        family: the kind of decoder.
        metadata: by GGUF's keys; nothing of the tokenizer.
        head_dim: elements of a head.
        rope_factors: GGUF's `rope_freqs.weight`, float32 `[head_dim / 2]`; None if the frequencies have no factors.
        tied_head: whether the output head is the embedding; None if the file does not say.
    """

    family: Architecture
    metadata: dict[str, MetaValue]
    head_dim: int
    rope_factors: NDArray[np.float32] | None
    tied_head: bool | None

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, object]) -> HuggingFaceConfig:
        """Translate what a config.json says.

        Args:
            path: names the file in messages.
            config: its content.

        Raises:
            BadModelFile: a key is missing, or its value cannot be.
            UnsupportedModel: another model type, or a variant that rockpage does not run.
        """
        keys = Keys(path, config)
        model_type = keys.text("model_type")
        if model_type not in _MODEL_TYPES:
            keys.refuse(f"model type '{model_type}'", f"rockpage runs {', '.join(_MODEL_TYPES)}")
        name = _MODEL_TYPES[model_type]
        _refuse_variants(keys, config)
        hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
        usual_head_dim = _QWEN3_HEAD_DIM if name == "qwen3" else hidden // heads
        head_dim = keys.integer("head_dim", usual_head_dim, most=MOST_HEAD_DIM)
        rope = _RopeKeys(path, config)
        own: dict[str, MetaValue] = {
            "block_count": keys.integer("num_hidden_layers"),
            "embedding_length": hidden,
            "feed_forward_length": keys.integer("intermediate_size"),
            "vocab_size": keys.integer("vocab_size"),
            "context_length": rope.context_length,
            "attention.head_count": heads,
            "attention.head_count_kv": keys.integer("num_key_value_heads", heads),
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": keys.number("rms_norm_eps"),
            "rope.dimension_count": head_dim,
        }
        own |= windows_in_gguf(keys, config) | rope.metadata()
        return cls(
            family=ARCHITECTURES[name],
            metadata={"general.architecture": name} | {f"{name}.{key}": value for key, value in own.items()},
            head_dim=head_dim,
            rope_factors=rope.factors(head_dim),
            tied_head=None if config.get("tie_word_embeddings") is None else keys.flag("tie_word_embeddings", True),
        )


class _RopeKeys:
    """The rotation: `rope_parameters` since transformers 5, `rope_scaling` beside `rope_theta` before."""

    def __init__(self, path: Path, config: Mapping[str, object]) -> None:
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, dict):
            Keys(path, config).contradict("rope_parameters", given, "it must be an object")
        beside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        inside = {key: value for key, value in given.items() if value is not None}
        self.keys = Keys(path, {key: config.get(key) for key in beside} | inside)
        self.type = self.keys.text("rope_type", self.keys.text("type", "default"))
        if self.type not in ROPE_TYPES:
            self.keys.refuse(f"RoPE scaling of type '{self.type}'", f"rockpage runs {', '.join(ROPE_TYPES)}")
        if (part := self.keys.number("partial_rotary_factor", 1.0)) != 1:
            self.keys.refuse(f"rotation of a part of each head ({part})", "rockpage rotates whole heads")
        self.theta = self.keys.number("rope_theta", 10000.0)
        positions = Keys(path, config).integer("max_position_embeddings")
        self.original_context = self.keys.integer("original_max_position_embeddings", positions)
        self.context_length = positions
        if self.type == "yarn":  # Qwen's instructions add it and leave the positions as they were
            stretched = min(self.keys.number("factor") * self.original_context, _MOST_POSITIONS)
            self.context_length = max(positions, int(stretched))

    def metadata(self) -> dict[str, MetaValue]:
        """GGUF's `rope.*` keys."""
        own: dict[str, MetaValue] = {"rope.freq_base": self.theta}
        if self.type in ("default", "llama3"):
            return own
        factor = self.keys.number("factor")
        own |= {"rope.scaling.type": self.type, "rope.scaling.factor": factor}
        if self.type == "linear":
            return own
        if not self.keys.flag("truncate", True):
            self.keys.refuse("yarn without truncation", "use a model whose yarn rounds to whole dimensions")
        # GGUF's attn_factor comes on top of the usual attention, transformers' attention_factor in its place.
        attention = self.keys.number("attention_factor", self._usual_attention(factor))
        return own | {
            "rope.scaling.original_context_length": self.original_context,
            "rope.scaling.attn_factor": attention / yarn_attention(factor),
            "rope.scaling.yarn_beta_fast": self.keys.number("beta_fast", 32.0),
            "rope.scaling.yarn_beta_slow": self.keys.number("beta_slow", 1.0),
        }

    def factors(self, head_dim: int) -> NDArray[np.float32] | None:
        """Llama 3's smoothing as divisors of the frequencies, in GGUF's float32."""
        if self.type != "llama3":
            return None
        low, high = self.keys.number("low_freq_factor"), self.keys.number("high_freq_factor")
        if not low < high:
            self.keys.contradict("high_freq_factor", high, f"low_freq_factor is {low}")
        factor, context = self.keys.number("factor"), self.original_context
        with np.errstate(all="ignore"):  # ModelConfig refuses factors that are not finite
            factors = llama3_factors(self.theta, head_dim, factor=factor, low=low, high=high, original_context=context)
            return factors.astype(np.float32)

    def _usual_attention(self, factor: float) -> float:
        scale, scale_all = self.keys.number("mscale", 0.0), self.keys.number("mscale_all_dim", 0.0)
        if scale and scale_all:
            return yarn_attention(factor, scale) / yarn_attention(factor, scale_all)
        return yarn_attention(factor)


def _refuse_variants(keys: Keys, config: Mapping[str, object]) -> None:
    if (activation := keys.text("hidden_act", "silu")) != "silu":
        keys.refuse(f"hidden_act '{activation}'", "rockpage runs silu")
    if config.get("quantization_config"):
        keys.refuse("weights quantised for another runtime (quantization_config)", "use the model it was made from")

"""What a model is: its dimensions, read from GGUF metadata and held against its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from hostcache.errors import BadModelFile, UnsupportedModel
from hostcache.geometry import KVGeometry

from .gguf import GGUFFile

__all__ = ["ARCHITECTURES", "ModelConfig"]

ARCHITECTURES = ("llama",)
"""Values of `general.architecture` that rockpage runs (Llama, SmolLM2, TinyLlama, ...)."""


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a Llama-type decoder: RMSNorm, grouped-query attention, RoPE on whole heads, SwiGLU.

    Attributes:
        architecture: `general.architecture` of the file.
        layers: decoder blocks.
        hidden: width of the residual stream.
        heads: query heads per layer.
        kv_heads: key/value heads per layer; `heads` is a multiple.
        head_dim: elements per head, even.
        ffn: width of the gated MLP.
        vocab: token ids are `0 <= id < vocab`.
        context_length: positions the model was trained for.
        rope_theta: base of the rotary frequencies.
        eps: epsilon of every RMSNorm.
        tied_head: the output head is the token embedding.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    rope_theta: float
    eps: float
    tied_head: bool

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelConfig:
        """Read the dimensions and check that exactly the tensors they call for are there.

        Args:
            gguf: an open file; only its header is read.

        Raises:
            BadModelFile: a key or tensor is missing, or a value or shape contradicts the header.
            UnsupportedModel: another architecture, or a variant that would be computed wrongly.
        """
        header = _Keys(gguf)
        architecture = header.text("general.architecture")
        if architecture not in ARCHITECTURES:
            header.refuse(f"architecture '{architecture}'", f"rockpage runs {', '.join(ARCHITECTURES)}")
        _refuse_variants(header, architecture)
        hidden = header.integer(f"{architecture}.embedding_length")
        heads = header.integer(f"{architecture}.attention.head_count")
        config = cls(
            architecture=architecture,
            layers=header.integer(f"{architecture}.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=header.integer(f"{architecture}.attention.head_count_kv", heads),
            head_dim=header.integer(f"{architecture}.attention.key_length", hidden // heads),
            ffn=header.integer(f"{architecture}.feed_forward_length"),
            vocab=header.integer(f"{architecture}.vocab_size", _embedding_rows(gguf)),
            context_length=header.integer(f"{architecture}.context_length"),
            rope_theta=header.number(f"{architecture}.rope.freq_base", 10000.0),
            eps=header.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
            tied_head="output.weight" not in gguf.tensors,
        )
        config._check_heads(header)
        config._check_tensors(gguf)
        return config

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the model's KV cache."""
        return KVGeometry(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)

    @property
    def head_tensor(self) -> str:
        """Name of the tensor that turns hidden states into logits."""
        return "token_embd.weight" if self.tied_head else "output.weight"

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor of the model with its shape, rows first: a matrix maps its columns to its rows."""
        yield "token_embd.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", (self.hidden,)
            yield f"blk.{layer}.attn_q.weight", (self.heads * self.head_dim, self.hidden)
            yield f"blk.{layer}.attn_k.weight", (self.kv_heads * self.head_dim, self.hidden)
            yield f"blk.{layer}.attn_v.weight", (self.kv_heads * self.head_dim, self.hidden)
            yield f"blk.{layer}.attn_output.weight", (self.hidden, self.heads * self.head_dim)
            yield f"blk.{layer}.ffn_norm.weight", (self.hidden,)
            yield f"blk.{layer}.ffn_gate.weight", (self.ffn, self.hidden)
            yield f"blk.{layer}.ffn_up.weight", (self.ffn, self.hidden)
            yield f"blk.{layer}.ffn_down.weight", (self.hidden, self.ffn)
        yield "output_norm.weight", (self.hidden,)
        if not self.tied_head:
            yield "output.weight", (self.vocab, self.hidden)

    def _check_heads(self, header: _Keys) -> None:
        if self.heads % self.kv_heads:
            header.contradict("attention.head_count_kv", self.kv_heads, f"{self.heads} heads are not a multiple of it")
        if self.head_dim % 2:
            header.contradict("attention.key_length", self.head_dim, "rotary embedding turns pairs of elements")
        rotated = header.integer(f"{self.architecture}.rope.dimension_count", self.head_dim)
        if rotated != self.head_dim:
            header.refuse(f"rotation of {rotated} of {self.head_dim} elements", "rockpage rotates whole heads")
        value_dim = header.integer(f"{self.architecture}.attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            header.refuse(f"values of {value_dim} beside keys of {self.head_dim} elements", "rockpage wants equal ones")

    def _check_tensors(self, gguf: GGUFFile) -> None:
        tokens = gguf.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != self.vocab:
            raise BadModelFile(
                f"{gguf.path}: the tokenizer has {len(tokens)} tokens but the model {self.vocab}; fetch the file again",
                path=str(gguf.path),
                tokens=len(tokens),
                vocab=self.vocab,
            )
        unused = dict(gguf.tensors)
        for name, shape in self.tensor_shapes():
            info = unused.pop(name, None)
            if info is None:
                raise BadModelFile(
                    f"{gguf.path}: tensor '{name}' is missing; fetch the file again", path=str(gguf.path), tensor=name
                )
            if info.shape != shape:
                raise BadModelFile(
                    f"{gguf.path}: tensor '{name}' is {list(info.shape)}, the header calls for {list(shape)};"
                    " fetch the file again",
                    path=str(gguf.path),
                    tensor=name,
                    shape=info.shape,
                    expected=shape,
                )
        # A bias or a frequency table that is left out would not fail: it would answer wrongly.
        for name in unused:
            raise UnsupportedModel(
                f"{gguf.path}: tensor '{name}' is not part of the {self.architecture} models rockpage runs;"
                " use a plain variant of the model",
                path=str(gguf.path),
                tensor=name,
            )


def _embedding_rows(gguf: GGUFFile) -> int | None:
    info = gguf.tensors.get("token_embd.weight")
    return info.shape[0] if info else None


def _refuse_variants(header: _Keys, architecture: str) -> None:
    metadata = header.gguf.metadata
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", metadata.get(f"{architecture}.rope.scale_linear", 1.0))
    if "rope_freqs.weight" in header.gguf.tensors:
        header.refuse("RoPE frequency factors (rope_freqs.weight)", "use a model without them")
    if scaling != "none" or factor != 1.0:
        header.refuse(f"RoPE scaling (type {scaling!r}, factor {factor})", "use a model without it")
    experts = metadata.get(f"{architecture}.expert_count", 0)
    if experts:
        header.refuse(f"a mixture of {experts} experts", "use a dense model")
    window = metadata.get(f"{architecture}.attention.sliding_window", 0)
    if window:
        header.refuse(f"a sliding window of {window} tokens", "use a model with full attention")


class _Keys:
    """Typed access to metadata; each mistake becomes an error that names file, key and value."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf

    def text(self, key: str) -> str:
        value = self._value(key, None)
        if not isinstance(value, str):
            self.contradict(key, value, "it must be a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, list):
            self.refuse(f"'{key}' that differs by layer", "use a model with equal layers")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.contradict(key, value, "it must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        # `not 0 < x < inf` is also true of NaN.
        if not isinstance(value, float) or not 0 < value < float("inf"):
            self.contradict(key, value, "it must be a positive number")
        return value

    def contradict(self, key: str, value: object, reason: str) -> NoReturn:
        path = str(self.gguf.path)
        raise BadModelFile(
            f"{path}: '{key}' is {value!r}: {reason}; fetch the file again", path=path, key=key, value=value
        )

    def refuse(self, what: str, way_out: str) -> NoReturn:
        path = str(self.gguf.path)
        raise UnsupportedModel(f"{path}: the model has {what}, which is not supported: {way_out}", path=path, what=what)

    def _value(self, key: str, default: object) -> object:
        value = self.gguf.metadata.get(key, default)
        if value is None:
            raise BadModelFile(
                f"{self.gguf.path}: metadata key '{key}' is missing; fetch the file again",
                path=str(self.gguf.path),
                key=key,
            )
        return value

"""What a model is: its family and its dimensions, read from GGUF metadata and held against its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hostcache.errors import BadModelFile, UnsupportedModel, UsageError
from hostcache.geometry import KVGeometry

from .architectures import ARCHITECTURES, Architecture
from .gguf_rope import read_rope
from .keys import Keys
from .model_windows import MOST_LAYERS, read_windows
from .rope import MOST_HEAD_DIM, Rope
from .source import ModelSource

__all__ = ["ModelConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a model.

    Attributes:
        family: what kind of decoder it is.
        layers: decoder blocks.
        hidden: width of the residual stream.
        heads: query heads per layer.
        kv_heads: key/value heads per layer; `heads` is a multiple.
        head_dim: elements per head, even.
        ffn: width of the gated MLP.
        vocab: token ids are `0 <= id < vocab`.
        context_length: positions the model was made for.
        rope: the rotation of queries and keys.
        eps: epsilon of every RMSNorm.
        tied_head: the output head is the token embedding.
        windows: of each layer, the newest tokens that a row sees, its own included; 0: the whole context.
    """

    family: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    rope: Rope
    eps: float
    tied_head: bool
    windows: tuple[int, ...]

    @classmethod
    def from_gguf(cls, source: ModelSource) -> ModelConfig:
        """Read the dimensions from GGUF's keys and check that exactly the tensors they call for are there.

        Args:
            source: an open model; no weight is read.

        Raises:
            BadModelFile: a key or tensor is missing, or a value or shape contradicts the header.
            UnsupportedModel: another architecture, or a variant that would be computed wrongly.
        """
        keys = Keys(source.path, source.metadata)
        name = keys.text("general.architecture")
        if name not in ARCHITECTURES:
            keys.refuse(f"architecture '{name}'", f"rockpage runs {', '.join(ARCHITECTURES)}")
        hidden = keys.integer(f"{name}.embedding_length")
        heads = keys.integer(f"{name}.attention.head_count")
        head_dim = keys.integer(f"{name}.attention.key_length", hidden // heads, most=MOST_HEAD_DIM)
        context_length = keys.integer(f"{name}.context_length")
        layers = keys.integer(f"{name}.block_count", most=MOST_LAYERS)
        if head_dim % 2:
            keys.contradict(f"{name}.attention.key_length", head_dim, "rotary embedding turns pairs of elements")
        config = cls(
            family=ARCHITECTURES[name],
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=keys.integer(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn=keys.integer(f"{name}.feed_forward_length"),
            vocab=keys.integer(f"{name}.vocab_size", _embedding_rows(source)),
            context_length=context_length,
            rope=read_rope(source, name, head_dim, context_length),
            eps=keys.number(f"{name}.attention.layer_norm_rms_epsilon"),
            tied_head="output.weight" not in source.tensors,
            windows=read_windows(keys, name, layers, context_length),
        )
        config._refuse_variants(keys)
        config._check_tensors(source)
        return config

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the model's KV cache."""
        return KVGeometry(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)

    @property
    def positions_identity(self) -> str:
        """Names what positions do to K and V: how they are rotated, and what windows hide."""
        rope = f"rope-{self.rope.identity(self.head_dim)}"
        return f"{rope}/windows-{'-'.join(map(str, self.windows))}" if any(self.windows) else rope

    def context(self, wanted: int | None) -> int:
        """The most tokens of a sequence: as many as wanted, or as the model was made for.

        Raises:
            UsageError: more are wanted, or none.
        """
        if wanted is not None and not 1 <= wanted <= self.context_length:
            raise UsageError(
                f"a context of {wanted} is not within 1..{self.context_length}, the model's", context=wanted
            )
        return self.context_length if wanted is None else wanted

    @property
    def head_tensor(self) -> str:
        """Name of the tensor that turns hidden states into logits."""
        return "token_embd.weight" if self.tied_head else "output.weight"

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor of the model with its shape, rows first: a matrix maps its columns to its rows."""
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (self.hidden,)
            for name, width in (("attn_q", q_width), ("attn_k", kv_width), ("attn_v", kv_width)):
                yield f"{block}.{name}.weight", (width, self.hidden)
                if self.family.qkv_bias:
                    yield f"{block}.{name}.bias", (width,)
            if self.family.qk_norm:
                yield f"{block}.attn_q_norm.weight", (self.head_dim,)
                yield f"{block}.attn_k_norm.weight", (self.head_dim,)
            yield f"{block}.attn_output.weight", (self.hidden, q_width)
            yield f"{block}.ffn_norm.weight", (self.hidden,)
            yield f"{block}.ffn_gate.weight", (self.ffn, self.hidden)
            yield f"{block}.ffn_up.weight", (self.ffn, self.hidden)
            yield f"{block}.ffn_down.weight", (self.hidden, self.ffn)
        yield "output_norm.weight", (self.hidden,)
        if not self.tied_head:
            yield "output.weight", (self.vocab, self.hidden)
        if self.rope.factors:
            yield "rope_freqs.weight", (self.head_dim // 2,)

    def _refuse_variants(self, keys: Keys) -> None:
        name = self.family.name
        if self.heads % self.kv_heads:
            reason = f"{self.heads} heads are not a multiple of it"
            keys.contradict(f"{name}.attention.head_count_kv", self.kv_heads, reason)
        rotated = keys.integer(f"{name}.rope.dimension_count", self.head_dim)
        if rotated != self.head_dim:
            keys.refuse(f"rotation of {rotated} of {self.head_dim} elements", "rockpage rotates whole heads")
        value_dim = keys.integer(f"{name}.attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            keys.refuse(f"values of {value_dim} beside keys of {self.head_dim} elements", "rockpage wants equal ones")
        if experts := keys.integer(f"{name}.expert_count", 0, least=0):
            keys.refuse(f"a mixture of {experts} experts", "use a dense model")

    def _check_tensors(self, source: ModelSource) -> None:
        path = str(source.path)
        tokens = source.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != self.vocab:
            raise BadModelFile(
                f"{path}: the tokenizer has {len(tokens)} tokens but the model {self.vocab}; fetch the file again",
                path=path,
                tokens=len(tokens),
                vocab=self.vocab,
            )
        unused = dict(source.tensors)
        for name, shape in self.tensor_shapes():
            info, own_name = unused.pop(name, None), source.own_name(name)
            if info is None:
                raise BadModelFile(
                    f"{path}: tensor '{own_name}' is missing; fetch the file again", path=path, tensor=own_name
                )
            if info.shape != shape:
                raise BadModelFile(
                    f"{path}: tensor '{own_name}' is {list(info.shape)}, the header calls for {list(shape)};"
                    " fetch the file again",
                    path=path,
                    tensor=own_name,
                    shape=info.shape,
                    expected=shape,
                )
        # A bias that is left out would not fail: it would answer wrongly.
        for name in unused:
            own_name = source.own_name(name)
            raise UnsupportedModel(
                f"{path}: tensor '{own_name}' is not part of the {self.family.name} models rockpage runs;"
                " use a plain variant of the model",
                path=path,
                tensor=own_name,
            )


def _embedding_rows(source: ModelSource) -> int | None:
    info = source.tensors.get("token_embd.weight")
    return info.shape[0] if info else None

"""A model's tiles and vectors as the C kernels see them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._dense import ffi
from .cache_room import open_in_use
from .ggml import dequantize
from .mapped_file import MappedFile
from .model import ModelConfig
from .source import ModelSource
from .tiles import TILED_TYPES, TiledMatrix, TilePlan

if TYPE_CHECKING:
    from hostcache._cffi import CData

__all__ = ["TiledWeights", "matrix_names"]

_MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""Fields of `rp_layer`, and what GGUF calls them."""


def matrix_names(config: ModelConfig) -> Iterator[str]:
    """The tensors that are multiplied by: the head's first, then those of each layer."""
    yield config.head_tensor
    for layer in range(config.layers):
        for tensor in _MATRICES.values():
            yield f"blk.{layer}.{tensor}.weight"


class TiledWeights:
    """Weights of a model; the matrices stay mapped as long as this object lives, the vectors are its own.

    Args:
        source: the open model; it may be closed afterwards.
        config: its dimensions.
        plan: where its matrices lie in the file.
        path: of the file.

    Attributes:
        model: `rp_model *`.
        layers: `rp_layer *` of each layer.
        nbytes: bytes of the tiles.
    """

    def __init__(self, source: ModelSource, config: ModelConfig, plan: TilePlan, path: Path) -> None:
        self._source = source
        self._plan = plan
        # What is mapped would take its room until we end even if it were removed from the cache.
        weakref.finalize(self, open_in_use(path).close)
        self._tiles = MappedFile(path).content()
        self._vectors: list[NDArray[np.float32]] = []
        self.nbytes = plan.nbytes
        self.model = ffi.new("rp_model *")
        for field in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "eps"):
            setattr(self.model, field, getattr(config, field))
        self.model.interleaved = config.family.interleaved
        self.model.norm = self._vector("output_norm.weight")
        self._place(self.model.head, plan.matrices[config.head_tensor])
        vectors = {"attention_norm": "attn_norm.weight", "ffn_norm": "ffn_norm.weight"}
        if config.family.qkv_bias:
            vectors |= {f"{name}_bias": f"attn_{name}.bias" for name in "qkv"}
        if config.family.qk_norm:
            vectors |= {f"{name}_norm": f"attn_{name}_norm.weight" for name in "qk"}
        self.layers = [self._layer(f"blk.{number}", vectors) for number in range(config.layers)]
        del self._source

    def _layer(self, block: str, vectors: dict[str, str]) -> CData:
        layer = ffi.new("rp_layer *")
        for field, tensor in vectors.items():
            setattr(layer, field, self._vector(f"{block}.{tensor}"))
        for field, tensor in _MATRICES.items():
            self._place(getattr(layer, field), self._plan.matrices[f"{block}.{tensor}.weight"])
        return layer

    def _vector(self, name: str) -> CData:
        """A norm's weight or a bias."""
        info = self._source.tensors[name]
        self._vectors.append(dequantize(info.type, self._source.data(name).reshape(1, -1))[0].copy())
        # A fault maps the pages around the one it wanted too: over all norms that came to a fifth of the file.
        self._source.release_pages()
        return ffi.from_buffer("float[]", self._vectors[-1])

    def _place(self, matrix: Any, tiled: TiledMatrix) -> None:  # noqa: ANN401 - an rp_matrix of C's
        """Point a matrix at its arrays."""
        kind = TILED_TYPES[tiled.type]
        matrix.rows, matrix.columns, matrix.bits, matrix.zero = tiled.rows, tiled.columns, kind.bits, kind.zero
        for role, offset in tiled.offsets.items():
            c_type = "uint8_t[]" if role == "codes" else "uint16_t[]"
            setattr(matrix, role, ffi.from_buffer(c_type, self._tiles[offset:]))

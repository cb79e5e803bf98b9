"""Writes a model of a real size with random weights: the 1.1 billion parameters that boards are planned for.

Nothing it says means anything, and nothing about its memory or its speed differs from a trained model's. The tokenizer
is the demo model's, so that prompts are text.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npu.architectures import ARCHITECTURES
from npu.convert import convert_model
from npu.ggml import GGMLType
from npu.gguf import GGUFFile
from npu.gguf_header import MetaValue, TensorInfo
from npu.mapped_file import MappedFile
from npu.model import ModelConfig
from npu.rope import Rope

__all__ = ["REFERENCE", "RandomModel", "write_random_model"]

REFERENCE = ModelConfig(
    family=ARCHITECTURES["qwen2"],
    layers=24,
    hidden=1536,
    heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8064,
    vocab=49_152,
    context_length=8192,
    rope=Rope(theta=1e6),
    eps=float(np.float32(1e-6)),  # as the file holds it
    tied_head=True,
    windows=(0,) * 24,
)
"""1.1 billion parameters: Qwen2.5-1.5B's shape with 24 of its 28 layers and the demo model's vocabulary."""

_BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", 32)])  # of Q8_0
_CODE_DEVIATION = 256 / np.sqrt(12)  # of a uniform byte


@dataclass(frozen=True)
class RandomModel:
    """A model source that makes each tensor when it is asked for: Q8_0 matrices, float32 vectors.

    Attributes:
        config: the dimensions.
        metadata: dimensions and tokenizer by GGUF's keys.
    """

    config: ModelConfig
    metadata: Mapping[str, MetaValue]
    path: Path = Path("random")
    files: Sequence[MappedFile] = ()

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor that `config` calls for; they lie in no file, so each has the offset 0."""
        return {name: _tensor(name, shape) for name, shape in self.config.tensor_shapes()}

    def own_name(self, tensor: str) -> str:
        """The same."""
        return tensor

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, the same whenever and in whatever order they are asked for."""
        info = self.tensors[name]
        random = np.random.default_rng(zlib.crc32(name.encode()))
        if info.type is GGMLType.F32:
            centre = 1 if "norm" in name else 0
            return (centre + 0.1 * random.standard_normal(info.shape, np.float32)).view(np.uint8)
        # Products keep the size of their input, so that 24 layers neither fade nor overflow.
        blocks = np.empty(info.nbytes // _BLOCK.itemsize, _BLOCK)
        blocks["scale"] = 1 / (_CODE_DEVIATION * np.sqrt(info.shape[1]))
        blocks["codes"] = np.frombuffer(random.bytes(blocks["codes"].size), np.uint8).reshape(-1, 32)
        return blocks.view(np.uint8)

    def release_pages(self) -> None:
        """Nothing is mapped."""


def write_random_model(path: Path, tokenizer_of: Path, config: ModelConfig = REFERENCE) -> None:
    """Write a model to `path`, a new file; memory is bounded by its largest tensor.

    Args:
        path: the file.
        tokenizer_of: a GGUF file whose tokenizer has `config.vocab` tokens.
        config: the dimensions; rotation neither stretched nor scaled.
    """
    name = config.family.name
    with GGUFFile.open(tokenizer_of) as gguf:
        tokenizer = {key: value for key, value in gguf.metadata.items() if key.startswith("tokenizer.")}
    metadata: dict[str, MetaValue] = {
        "general.architecture": name,
        f"{name}.block_count": config.layers,
        f"{name}.context_length": config.context_length,
        f"{name}.embedding_length": config.hidden,
        f"{name}.feed_forward_length": config.ffn,
        f"{name}.attention.head_count": config.heads,
        f"{name}.attention.head_count_kv": config.kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.eps,
        f"{name}.rope.freq_base": config.rope.theta,
        **tokenizer,
    }
    convert_model(RandomModel(config, metadata), metadata, "int8", path)


def _tensor(name: str, shape: tuple[int, ...]) -> TensorInfo:
    if len(shape) == 1:
        return TensorInfo(name, shape, GGMLType.F32, 0, 4 * shape[0])
    return TensorInfo(name, shape, GGMLType.Q8_0, 0, GGMLType.Q8_0.bytes_of(shape[0] * shape[1]))

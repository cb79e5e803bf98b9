"""Opens a model as Hugging Face's `transformers` saves it: a folder with config.json and safetensors.

    config.json                     dimensions and variants
    model.safetensors               the weights, or, if they are several files,
    model.safetensors.index.json    which of them holds which tensor

Names and values are translated into GGUF's when the folder is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UsageError

from .folder_files import read_object
from .ggml import GGMLType
from .gguf_header import MetaValue, TensorInfo
from .gguf_rope import FACTORS
from .huggingface_config import HuggingFaceConfig
from .huggingface_names import gguf_name, huggingface_name, is_derived
from .mapped_file import MappedFile
from .safetensors_file import SafetensorsFile

__all__ = ["HuggingFaceFolder"]

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ROTATED = re.compile(r"blk\.[0-9]+\.attn_[qk]\.weight")


class HuggingFaceFolder:
    """An open model folder, which speaks GGUF's names.

    Attributes:
        path: as given to `open`.
        files: config.json and the files of the weights.
        metadata: dimensions and variants by GGUF's keys; nothing of the tokenizer.
        tensors: by GGUF's names; `offset` counts within the file that holds the tensor.
    """

    def __init__(
        self, path: Path, config: HuggingFaceConfig, config_file: MappedFile, shards: list[SafetensorsFile]
    ) -> None:
        self.path = path
        self.files = (config_file, *(shard.file for shard in shards))
        self.metadata: Mapping[str, MetaValue] = config.metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._config = config
        self._stored: dict[str, tuple[SafetensorsFile, str]] = {}  # by GGUF's name: where, and under which name
        for shard in shards:
            for own_name, info in shard.tensors.items():
                name = gguf_name(own_name)
                # Some tied models store the embedding a second time, as the head.
                if not is_derived(own_name) and not (config.tied_head and name == "output.weight"):
                    self.tensors[name] = info
                    self._stored[name] = shard, own_name
        if config.tied_head is False and "output.weight" not in self.tensors:
            self._miss("output.weight")
        if (factors := config.rope_factors) is not None:
            self.tensors[FACTORS] = TensorInfo(FACTORS, factors.shape, GGMLType.F32, offset=0, nbytes=factors.nbytes)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HuggingFaceFolder:
        """Map the files of a folder and read what they say of themselves.

        Args:
            path: the folder.

        Raises:
            UsageError: there is no such folder, or it holds no model.
            BadModelFile: a file is damaged or cut short, or files contradict each other.
            UnsupportedModel: another model type, a variant, or a tensor type that rockpage does not run.
            MissingExtra: the `safetensors` library is not installed.
        """
        path = Path(path)
        content = read_object(path / _CONFIG)
        if content is None:
            raise UsageError(f"{path} holds no {_CONFIG}: give a .gguf file or a Hugging Face folder", path=str(path))
        config = HuggingFaceConfig.from_json(path / _CONFIG, content)
        return cls(path, config, MappedFile(path / _CONFIG), _open_shards(path))

    def own_name(self, tensor: str) -> str:
        """What the folder's files call a tensor."""
        return huggingface_name(tensor)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 `[nbytes]`, read-only.

        A view of a mapping, which stays valid after `close`; llama's q and k are copies, their rows in GGUF's order.

        Args:
            name: a key of `tensors`.

        Raises:
            BadModelFile: there is no such tensor.
            UsageError: the folder was closed.
        """
        if name not in self.tensors:
            self._miss(name)
        if name not in self._stored:  # the factors, which are not stored but computed
            return np.asarray(self._config.rope_factors).view(np.uint8)
        shard, own_name = self._stored[name]
        stored = shard.data(own_name)
        if self._config.family.interleaved and _ROTATED.fullmatch(name):
            return _interleave(stored, self.tensors[name].shape, self._config.head_dim)
        return stored

    def release_pages(self) -> None:
        """Take the files' pages out of this process's memory; touching a view brings its pages back."""
        for file in self.files:
            file.release_pages()

    def close(self) -> None:
        """Refuse further use; the mappings go with this object and the last view from `data`. Safe to call twice."""
        for file in self.files:
            file.close()

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _miss(self, name: str) -> NoReturn:
        own_name = self.own_name(name)
        raise BadModelFile(
            f"{self.path}: tensor '{own_name}' is missing; fetch the folder again", path=str(self.path), tensor=own_name
        )


def _interleave(stored: NDArray[np.uint8], shape: tuple[int, ...], head_dim: int) -> NDArray[np.uint8]:
    """Reorder the rows of each head from halves, as Hugging Face stores them, to GGUF's pairs of neighbours.

    Args:
        stored: uint8, the rows one behind the other.
        shape: of the tensor; rows that are not whole heads stay as they are, for `ModelConfig` to refuse.
        head_dim: elements of a head, each a row.
    """
    if not shape or shape[0] % head_dim or head_dim % 2:
        return stored
    halves = stored.reshape(shape[0] // head_dim, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    """The files of the weights; each tensor is in one of them."""
    if (folder / _SINGLE).exists():
        return [SafetensorsFile(folder / _SINGLE)]
    path = folder / _INDEX
    index = read_object(path)
    if index is None:
        raise UsageError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: save the model as safetensors"
            " (save_pretrained of a current transformers)",
            path=str(folder),
        )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        raise BadModelFile(
            f"{path}: 'weight_map' must give the name of a file in the same folder for each tensor; fetch it again",
            path=str(path),
        )
    shards = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    mapped = set(weight_map.items())
    stored = {(tensor, name) for name, shard in shards.items() for tensor in shard.tensors}
    for tensor, name in sorted(mapped ^ stored):
        here, there = (path, folder / name) if (tensor, name) in mapped else (folder / name, path)
        raise BadModelFile(
            f"{folder}: tensor '{tensor}' is in {here.name} but not in {there.name}; fetch the folder again",
            path=str(folder),
            tensor=tensor,
        )
    return list(shards.values())


def _is_file_name(name: object) -> bool:
    """Whether an index names a file of its own folder, and not one elsewhere."""
    return isinstance(name, str) and name != ".." and Path(name).name == name

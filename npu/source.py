"""Where a model comes from: anything that can hand out its metadata and tensors the way a GGUF file does.

GGUF's names are the house's own: `llama.block_count`, `blk.0.attn_q.weight`. A source of another kind translates when
it is opened, so that nothing behind it has to know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .gguf import GGUFFile
from .gguf_header import MetaValue, TensorInfo
from .huggingface import HuggingFaceFolder
from .mapped_file import MappedFile

__all__ = ["ModelSource", "open_model"]


class ModelSource(Protocol):
    """An open model."""

    @property
    def path(self) -> Path:
        """Names the model in messages."""

    @property
    def files(self) -> Sequence[MappedFile]:
        """Every file that the model's dimensions and weights are read from."""

    @property
    def metadata(self) -> Mapping[str, MetaValue]:
        """Dimensions and variants, by GGUF's keys."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors, by GGUF's names; `offset` counts within the file that holds the tensor."""

    def own_name(self, tensor: str) -> str:
        """What the model's own files call a tensor."""

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, as `TensorInfo.type` reads them: uint8 `[nbytes]`.

        Views of a mapping stay valid after the source was closed. Asked twice, a source may give two copies.

        Raises:
            BadModelFile: there is no such tensor.
            UsageError: the source was closed.
        """

    def release_pages(self) -> None:
        """Take the files' pages out of this process's memory; touching a view brings its pages back."""


def open_model(path: str | os.PathLike[str]) -> GGUFFile | HuggingFaceFolder:
    """Open a GGUF file or a Hugging Face folder; the caller closes it, `with` does.

    Raises:
        UsageError: the path cannot be opened, or is neither.
        BadModelFile: a file is damaged or contradicts itself or another.
        UnsupportedModel: of a format's version, a model type, a variant or a tensor type that rockpage does not run.
        MissingExtra: a folder is given and the `safetensors` library is not installed.

    Example:
        >>> from npu.source import open_model
        >>> with open_model("model.gguf") as source:
        ...     print(source.metadata["general.architecture"], source.tensors["token_embd.weight"].shape)
        llama (49152, 576)
    """
    return HuggingFaceFolder.open(path) if Path(path).is_dir() else GGUFFile.open(path)

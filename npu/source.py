"""Where a model comes from: anything that can hand out its metadata and tensors the way a GGUF file does.

GGUF's names are the house's own: `llama.block_count`, `blk.0.attn_q.weight`. A source of another kind translates when
it is opened, so that nothing behind it has to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .gguf_header import MetaValue, TensorInfo
from .mapped_file import MappedFile

__all__ = ["ModelSource"]


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

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, as `TensorInfo.type` reads them: uint8 `[nbytes]`.

        Views of a mapping stay valid after the source was closed. Asked twice, a source may give two copies.

        Raises:
            BadModelFile: there is no such tensor.
            UsageError: the source was closed.
        """

    def release_pages(self) -> None:
        """Take the files' pages out of this process's memory; touching a view brings its pages back."""

"""What a model folder recommends for generation: data for whoever asks, applied to nothing by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostcache.errors import BadModelFile

from .folder_files import read_object

__all__ = ["SAMPLING_KEYS", "GenerationConfig", "eos_ids_of"]

SAMPLING_KEYS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
)
"""Keys of generation_config.json that say how to sample, by their names in Hugging Face transformers."""


@dataclass(frozen=True)
class GenerationConfig:
    """A folder's generation_config.json.

    Attributes:
        eos_ids: tokens that end an answer, in the file's order; empty when it names none.
        sampling: the author's recommendation, of `SAMPLING_KEYS` those that are there. It is for display, or for a
            caller who wants it: an engine that took it by itself would answer differently with every file.
    """

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float | int | bool] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> GenerationConfig:
        """Read the file; a folder without it recommends nothing.

        Raises:
            BadModelFile: it is not a JSON object, or a value is of another type.
        """
        path = Path(folder) / "generation_config.json"
        config = read_object(path) or {}
        sampling = {key: config[key] for key in SAMPLING_KEYS if config.get(key) is not None}
        for key, value in sampling.items():
            # The comparison is False of NaN, and exact for integers of any length.
            if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise BadModelFile(
                    f"{path} says {key} = {value!r:.60}, which is no finite number; fetch it again",
                    key=key,
                    value=value,
                )
        return cls(eos_ids_of(config, path), sampling)


def eos_ids_of(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """The `eos_token_id` of a configuration file: one id, several, or none.

    Raises:
        BadModelFile: it is something else.
    """
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise BadModelFile(
            f"{path} says eos_token_id = {value!r:.60}, neither a token id nor a list of them; fetch it again",
            eos_token_id=value,
        )
    return tuple(ids)

"""What a converted file says of its model: everything its source says, in GGUF's keys."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .gguf_header import MetaValue
from .gguf_tokenizer import tokenizer_metadata
from .hf_tokenizer import FolderTokenizer, special_texts_of_folder
from .huggingface import HuggingFaceFolder
from .source import ModelSource
from .text import template_of

__all__ = ["carried_metadata"]

_TEMPLATE_KEY = "tokenizer.chat_template"


def carried_metadata(source: ModelSource) -> Mapping[str, MetaValue]:
    """Dimensions, tokenizer and chat templates of an open model; a GGUF file's own metadata as they are.

    Raises:
        UnsupportedModel: a folder's tokenizer is one that GGUF has no words for.
        BadModelFile: a folder's files contradict each other.
    """
    if not isinstance(source, HuggingFaceFolder):
        return source.metadata
    template = template_of(source)
    return {
        **source.metadata,
        "general.name": os.fsencode(source.path.resolve().name).decode(errors="replace"),  # a name may be any bytes
        **tokenizer_metadata(FolderTokenizer.read(source.path), special_texts_of_folder(source.path)),
        **(_template_metadata(template.sources) if template is not None else {}),
    }


def _template_metadata(sources: Mapping[str, str]) -> dict[str, MetaValue]:
    """`tokenizer.chat_template` for the default one, and one key, and a place in a list, for each other by name."""
    named = {name: text for name, text in sources.items() if name != "default"}
    metadata: dict[str, MetaValue] = {_TEMPLATE_KEY: sources["default"]}
    if named:
        metadata[f"{_TEMPLATE_KEY}s"] = list(named)
    return metadata | {f"{_TEMPLATE_KEY}.{name}": text for name, text in named.items()}

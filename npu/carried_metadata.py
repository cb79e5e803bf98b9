"""What a converted file says of its model: everything its source says, in GGUF's keys."""

from __future__ import annotations

from collections.abc import Mapping

from .gguf_header import MetaValue
from .gguf_tokenizer import tokenizer_metadata
from .hf_tokenizer import FolderTokenizer, special_texts_of_folder
from .huggingface import HuggingFaceFolder
from .source import ModelSource

__all__ = ["carried_metadata"]


def carried_metadata(source: ModelSource) -> Mapping[str, MetaValue]:
    """Dimensions, tokenizer and chat templates of an open model; a GGUF file's own metadata as they are.

    Raises:
        UnsupportedModel: a folder's tokenizer is one that GGUF has no words for.
        BadModelFile: a folder's files contradict each other.
    """
    if not isinstance(source, HuggingFaceFolder):
        return source.metadata
    return {
        **source.metadata,
        "general.name": source.path.resolve().name,
        **tokenizer_metadata(FolderTokenizer.read(source.path), special_texts_of_folder(source.path)),
    }

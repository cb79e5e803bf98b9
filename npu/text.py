"""A model's tokenizer and chat template, from wherever its kind keeps them."""

from __future__ import annotations

from hostcache.errors import UnsupportedModel

from .chat import ChatTemplate
from .gguf import GGUFFile
from .huggingface import HuggingFaceFolder
from .tokenizer import Tokenizer

__all__ = ["template_of", "tokenizer_of"]


def tokenizer_of(source: GGUFFile | HuggingFaceFolder) -> Tokenizer:
    """The tokenizer of an open model: in a GGUF file's metadata, or in files of their own in a folder.

    Raises:
        UnsupportedModel: a kind of tokenizer that rockpage does not run.
        BadModelFile: it is damaged, or contradicts itself.
        MissingExtra: the `tokenizers` library is not installed.
    """
    if isinstance(source, HuggingFaceFolder):
        return Tokenizer.from_folder(source.path)
    return Tokenizer.from_metadata(source.metadata)


def template_of(source: GGUFFile | HuggingFaceFolder) -> ChatTemplate | None:
    """The chat template of an open model, None if it has none: it may still complete plain text.

    Raises:
        BadModelFile: it is damaged.
    """
    try:
        if isinstance(source, HuggingFaceFolder):
            return ChatTemplate.from_folder(source.path)
        return ChatTemplate.from_metadata(source.metadata)
    except UnsupportedModel:
        return None

"""A model's tokenizer and chat template, from wherever its kind keeps them."""

from __future__ import annotations

from .chat import ChatTemplate
from .gguf import GGUFFile
from .huggingface import HuggingFaceFolder
from .tokenizer import Tokenizer

__all__ = ["TEMPLATE_KEY", "template_of", "tokenizer_of"]

TEMPLATE_KEY = "tokenizer.chat_template"


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
    """The chat template of an open model, None if it has none.

    Raises:
        BadModelFile: it is damaged.
        MissingExtra: the `jinja2` library is not installed.
    """
    if TEMPLATE_KEY in source.metadata:
        return ChatTemplate.from_metadata(source.metadata)
    return None

"""Text to token ids and back, as the model file's own vocabulary and merges say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UnsupportedModel, UsageError

from .bpe import build_bpe, pre_tokenizer_named
from .vocabulary import Metadata, TokenKind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]


class Tokenizer:
    """Byte-level BPE. Holds no state between calls, so threads may share it.

    The merging is done by the `tokenizers` library. Tokens that are matched as a whole are found here: whether control
    tokens are parsed is a property of a call, while in the library it is a switch on the shared object.

    Attributes:
        vocab_size: ids are `0 <= id < vocab_size`.
        bos_id: the token that starts a sequence, or None.
        eos_ids: the tokens that end an answer; empty when the file names none.
        add_bos: whether `encode` puts `bos_id` first when not told.
    """

    def __init__(self, vocabulary: Vocabulary, bpe: tokenizers.Tokenizer, *, add_bos: bool) -> None:
        self._vocabulary = vocabulary
        self._bpe = bpe
        self._control = _LiteralSplitter(vocabulary.literals(TokenKind.CONTROL))
        self._user_defined = _LiteralSplitter(vocabulary.literals(TokenKind.USER_DEFINED))
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.add_bos = add_bos

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Tokenizer:
        """Build the tokenizer a GGUF file describes.

        Args:
            metadata: the file's metadata (`GGUFFile.metadata`).

        Raises:
            UnsupportedModel: not byte-level BPE, or a pre-tokenizer that is not known.
            BadModelFile: vocabulary, kinds, merges or special ids are missing or contradict each other.
            MissingExtra: the `tokenizers` library is not installed.
        """
        family = metadata.get("tokenizer.ggml.model")
        if family != "gpt2":
            raise UnsupportedModel(
                f"the model file's tokenizer is {family!r} (tokenizer.ggml.model);"
                " rockpage runs 'gpt2', byte-level BPE: use a model with that",
                model=family,
            )
        pre_tokenizer = pre_tokenizer_named(metadata.get("tokenizer.ggml.pre"))
        vocabulary = Vocabulary.from_metadata(metadata)
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos and vocabulary.bos_id is not None)
        if not isinstance(add_bos, bool) or (add_bos and vocabulary.bos_id is None):
            raise BadModelFile(
                f"the model file's 'tokenizer.ggml.add_bos_token' is {add_bos!r}, its bos_token_id {vocabulary.bos_id};"
                " fetch the file again",
                add_bos=add_bos,
                bos_id=vocabulary.bos_id,
            )
        bpe = build_bpe(vocabulary.mergeable(), vocabulary.merges, pre_tokenizer)
        # The library has its own copy of the merges; ours, 170 bytes each, would be kept for nothing.
        return cls(dataclasses.replace(vocabulary, merges=[]), bpe, add_bos=add_bos)

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> NDArray[np.int32]:
        """Turn text into token ids.

        A byte for which the vocabulary has no token is left out, as by llama.cpp and by the `tokenizers` library;
        SmolLM2, for one, has no token for U+0004 and five other control characters.

        Args:
            text: any valid Unicode.
            special: parse the text of control tokens such as `<|im_end|>` into their ids; otherwise it is plain text.
                Never set it for text that came from outside.
            bos: start with `bos_id`; None for what the model file says.

        Returns:
            int32 `[tokens]`.

        Raises:
            UsageError: the text holds a surrogate, or `bos` is asked of a model that has none.
        """
        _refuse_surrogates(text)
        ids: list[int] = []
        if self.add_bos if bos is None else bos:
            if self.bos_id is None:
                raise UsageError("bos=True, but the model file names no bos token; leave bos out", bos=bos)
            ids.append(self.bos_id)
        for plain, control in self.split_control(text) if special else ((text, None),):
            for words, user_defined in self._user_defined.split(plain):
                ids += self._bpe.encode(words, add_special_tokens=False).ids
                if user_defined is not None:
                    ids.append(user_defined)
            if control is not None:
                ids.append(control)
        return np.array(ids, dtype=np.int32)

    def split_control(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut text at its control tokens: pairs of plain text and the id that follows it, None behind the last."""
        return self._control.split(text)

    def decode(self, ids: Iterable[int] | NDArray[np.int32], *, special: bool = False) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: write control tokens out; otherwise they are left out.

        Raises:
            UsageError: an id is outside the vocabulary.
        """
        return b"".join(self.token_bytes(token, special=special) for token in ids).decode(errors="replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes a token stands for; a control token stands for its text, or for nothing when not `special`.

        Raises:
            UsageError: the id is outside the vocabulary.
        """
        return self._vocabulary.token_bytes(token, special=special)


class _LiteralSplitter:
    """Cuts text at tokens that are matched as a whole: the leftmost first, of several there the longest."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)  # `re` takes the first alternative that fits
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        position = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            yield text[position : match.start()], self._ids[match[0]]
            position = match.end()
        yield text[position:], None


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid Unicode: {text[error.start]!r} at character {error.start};"
            " decode the input as UTF-8 with errors='replace'",
            position=error.start,
        ) from error

"""Text to token ids and back, as the model's own vocabulary and merges say."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UnsupportedModel, UsageError

from .bpe import build_bpe, pre_tokenizer_named
from .hf_tokenizer import FolderTokenizer
from .spm import NO_PREFIX, Before, SpacePrefix, build_pieces, prefix_of_metadata, ranked_merges
from .vocabulary import SPACE_MARK, Metadata, Spelling, TokenKind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer", "refuse_surrogates"]

_BORDERS: dict[int, Before] = {TokenKind.CONTROL: Before.CONTROL, TokenKind.USER_DEFINED: Before.USER_DEFINED}


class Tokenizer:
    """BPE over bytes, or SentencePiece's over characters. Holds no state between calls, so threads may share it.

    The merging is done by the `tokenizers` library. Tokens that are matched as a whole are found here: whether control
    tokens are parsed is a property of a call, while in the library it is a switch on the shared object.

    Args:
        vocabulary: the tokens.
        bpe: merges plain text.
        add_bos: whether `encode` puts `bos_id` first when not told.
        prefix: the space that plain text gets.

    Attributes:
        vocab_size: ids are `0 <= id < vocab_size`.
        bos_id: the token that starts a sequence, or None.
        eos_ids: the tokens that end an answer: all that the model's files name, none when they name none. In a chat
            the template's own end of a turn comes on top (`npu.chat.turn_ends`).

            - GGUF: `eos_token_id`, `eot_token_id` and `eom_token_id` of `tokenizer.ggml`.
            - Folder: `eos_token_id` of generation_config.json or, if that names none, of config.json; and the
              tokenizer's own `eos_token`.
        add_bos: as given.

    Example:
        >>> from npu.source import open_model
        >>> from npu.text import tokenizer_of
        >>> with open_model("model.gguf") as source:
        ...     tokenizer = tokenizer_of(source)
        >>> [tokenizer.decode([token]) for token in tokenizer.encode("Alarm 315")]
        ['Al', 'arm', ' ', '3', '1', '5']
        >>> tokenizer.encode("<|im_end|>", special=True).tolist(), len(tokenizer.encode("<|im_end|>"))
        ([2], 7)
    """

    def __init__(
        self, vocabulary: Vocabulary, bpe: tokenizers.Tokenizer, *, add_bos: bool, prefix: SpacePrefix = NO_PREFIX
    ) -> None:
        # The library has its own copy of the merges; ours, 170 bytes each, would be kept for nothing.
        self._vocabulary = dataclasses.replace(vocabulary, merges=[])
        self._bpe = bpe
        self._prefix = prefix
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
            UnsupportedModel: neither byte-level nor SentencePiece BPE, or a pre-tokenizer that is not known.
            BadModelFile: vocabulary, kinds, merges or special ids are missing or contradict each other.
            MissingExtra: the `tokenizers` library is not installed.
        """
        family = metadata.get("tokenizer.ggml.model")
        if family == Spelling.SENTENCEPIECE.value:
            vocabulary = Vocabulary.from_metadata(metadata, Spelling.SENTENCEPIECE)
            bpe = build_pieces(vocabulary, ranked_merges(metadata, vocabulary))
            add_bos = _adds_bos(metadata, vocabulary, default=True)
            return cls(vocabulary, bpe, add_bos=add_bos, prefix=prefix_of_metadata(metadata))
        if family != Spelling.BYTE_LEVEL.value:
            raise UnsupportedModel(
                f"the model file's tokenizer is {family!r} (tokenizer.ggml.model); rockpage runs 'gpt2', byte-level"
                " BPE, and 'llama', SentencePiece BPE: use a model with one of these",
                model=family,
            )
        pre_tokenizer = pre_tokenizer_named(metadata.get("tokenizer.ggml.pre"))
        vocabulary = Vocabulary.from_metadata(metadata)
        bpe = build_bpe(vocabulary.mergeable(), vocabulary.merges, pre_tokenizer)
        return cls(vocabulary, bpe, add_bos=_adds_bos(metadata, vocabulary, default=pre_tokenizer.adds_bos))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Build the tokenizer of a Hugging Face model folder.

        Args:
            folder: holds tokenizer.json and, as far as they exist, tokenizer_config.json, special_tokens_map.json,
                config.json and generation_config.json.

        Raises:
            UnsupportedModel: there is no tokenizer.json, or it asks for a step that rockpage does not know.
            BadModelFile: a file is damaged, or the files contradict each other.
            MissingExtra: the `tokenizers` library is not installed.
        """
        source = FolderTokenizer.read(Path(folder))
        return cls(source.vocabulary, source.build(), add_bos=source.add_bos, prefix=source.steps.prefix)

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
        refuse_surrogates(text)
        ids = self.encode_pieces(self.split_control(text) if special else ((text, None),))
        if self.add_bos if bos is None else bos:
            if self.bos_id is None:
                raise UsageError("bos=True, but the model file names no bos token; leave bos out", bos=bos)
            ids.insert(0, self.bos_id)
        return np.array(ids, dtype=np.int32)

    def encode_pieces(self, pieces: Iterable[tuple[str, int | None]]) -> list[int]:
        """Encode a text that is already cut at its control tokens.

        Args:
            pieces: plain texts, each with the control token behind it or None. The first stands at the beginning of
                the text, every other behind a control token.
        """
        ids: list[int] = []
        before = Before.NOTHING
        for plain, control in pieces:
            ids += self._encode_plain(plain, before)
            if control is not None:
                ids.append(control)
            before = Before.CONTROL
        return ids

    def _encode_plain(self, text: str, before: Before) -> Iterator[int]:
        if self._prefix.joins_user_defined:
            # To SentencePiece its mark and a space are one.
            text, before = self._prefix.put(text.replace(SPACE_MARK, " "), before), Before.USER_DEFINED
        for words, user_defined in self._user_defined.split(text):
            yield from self._bpe.encode(self._prefix.put(words, before), add_special_tokens=False).ids
            if user_defined is not None:
                yield user_defined
            before = Before.USER_DEFINED

    def split_control(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut text at its control tokens: pairs of plain text and the id that follows it, None behind the last."""
        return self._control.split(text)

    def decode(self, ids: Iterable[int] | NDArray[np.int32], *, special: bool = False) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD.

        The inverse of `encode`: a space that `encode` would have put before plain text is taken away again.

        Args:
            ids: token ids.
            special: write control tokens out; otherwise they are left out.

        Raises:
            UsageError: an id is outside the vocabulary.
        """
        data = bytearray()
        before: Before | None = Before.NOTHING
        for token in ids:
            piece = self.token_bytes(token, special=special)
            kind = self._vocabulary.kinds[token]
            if before in self._prefix.behind and kind != TokenKind.CONTROL:
                piece = piece.removeprefix(b" ")
            data += piece
            before = _BORDERS.get(kind)
        return data.decode(errors="replace")

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


def _adds_bos(metadata: Metadata, vocabulary: Vocabulary, *, default: bool) -> bool:
    """What a GGUF file says about bos; where it is silent, what is usual for its family."""
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default and vocabulary.bos_id is not None)
    if not isinstance(add_bos, bool) or (add_bos and vocabulary.bos_id is None):
        raise BadModelFile(
            f"the model file's 'tokenizer.ggml.add_bos_token' is {add_bos!r}, its bos_token_id {vocabulary.bos_id};"
            " fetch the file again",
            add_bos=add_bos,
            bos_id=vocabulary.bos_id,
        )
    return add_bos


def refuse_surrogates(text: str) -> None:
    """Refuse text that UTF-8 cannot hold.

    Raises:
        UsageError: it holds a surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid Unicode: {text[error.start]!r} at character {error.start};"
            " decode the input as UTF-8 with errors='replace'",
            position=error.start,
        ) from error

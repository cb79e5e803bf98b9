"""The token list of a model file: texts, kinds and merges, held against each other before they are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NoReturn, TypeAlias

from hostcache.errors import BadModelFile, UsageError

from .gguf import MetaValue

__all__ = ["SPACE_MARK", "Metadata", "Spelling", "TokenKind", "Vocabulary", "is_byte_token", "list_of", "special_texts"]

Metadata: TypeAlias = Mapping[str, MetaValue]
"""The metadata of a GGUF file, key by key."""


SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space: U+2581, lower one eighth block."""


class Spelling(Enum):
    """How the texts of ordinary tokens are written."""

    BYTE_LEVEL = "gpt2"
    """In GPT-2's byte alphabet, one character for each byte."""
    SENTENCEPIECE = "llama"
    """As they are, but for `SPACE_MARK`; bytes have tokens of their own, written `<0x0A>`."""


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`; the numbers are those of `enum llama_token_type` in llama.h."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_HIDDEN = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL})
_MERGEABLE = frozenset({TokenKind.NORMAL, TokenKind.USER_DEFINED})


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable Latin-1 as itself, others from U+0100.

    Source: `bytes_to_unicode` of OpenAI's GPT-2 encoder, which every byte-level BPE has kept.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a BPE model; an id is an index into `tokens`.

    Attributes:
        tokens: texts; those of kind NORMAL are written as `spelling` says, user-defined ones of SentencePiece too.
        kinds: `TokenKind` numbers, one for each token.
        merges: pairs of token texts, the earliest to apply first; empty where scores take their place.
        bos_id: the token that starts a sequence, if the file names one.
        eos_ids: tokens that end an answer.
        spelling: how `tokens` are written.

    Raises:
        BadModelFile: two tokens are equal, a byte token is malformed, or a merge is not made of tokens.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[tuple[str, str]]
    bos_id: int | None
    eos_ids: frozenset[int]
    spelling: Spelling = Spelling.BYTE_LEVEL

    def __post_init__(self) -> None:
        self._check_tokens()
        self._check_merges()

    @classmethod
    def from_metadata(cls, metadata: Metadata, spelling: Spelling = Spelling.BYTE_LEVEL) -> Vocabulary:
        """Read and check the `tokenizer.ggml` keys of a file; `eos_ids` are its `eos`, `eot` and `eom`.

        Raises:
            BadModelFile: a key is missing or of another type, or tokens, kinds, merges and ids contradict each other.
        """
        tokens = list_of(str, metadata, "tokenizer.ggml.tokens")
        kinds = list_of(int, metadata, "tokenizer.ggml.token_type")
        if len(kinds) != len(tokens):
            _fail("tokenizer.ggml.token_type", f"{len(kinds)} kinds for {len(tokens)} tokens", kinds=len(kinds))
        unknown = set(kinds) - set(TokenKind)
        if unknown:
            _fail("tokenizer.ggml.token_type", f"{min(unknown)} is not a kind of token", kind=min(unknown))
        named = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
        has_merges = spelling is Spelling.BYTE_LEVEL
        return cls(
            tokens=tokens,
            kinds=kinds,
            merges=[_pair(merge) for merge in list_of(str, metadata, "tokenizer.ggml.merges")] if has_merges else [],
            bos_id=named.pop("bos"),
            eos_ids=frozenset(token for token in named.values() if token is not None),
            spelling=spelling,
        )

    def mergeable(self) -> dict[str, int]:
        """The tokens that text can be built into, by their text: all that are neither control nor filler."""
        return self.ids_of(*_MERGEABLE)

    def literals(self, kind: TokenKind) -> dict[str, int]:
        """The non-empty tokens of a kind that is matched as a whole (control, user-defined), by their text."""
        texts = ((self._plain(token), token) for token in self._of({kind}))
        return {text: token for text, token in texts if text}

    def ids_of(self, *kinds: TokenKind) -> dict[str, int]:
        """All tokens of some kinds, by their text as the vocabulary writes it."""
        return {self.tokens[token]: token for token in self._of(set(kinds))}

    def check_id(self, token: int) -> None:
        """Refuse an id outside the vocabulary.

        Raises:
            UsageError: it is.
        """
        if not 0 <= token < len(self.tokens):
            raise UsageError(
                f"token id {token} is outside the vocabulary of {len(self.tokens)}; ids start at 0",
                id=token,
                vocab_size=len(self.tokens),
            )

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes a token stands for.

        Args:
            token: the id.
            special: give the text of control tokens; otherwise they stand for nothing.

        Raises:
            UsageError: the id is outside the vocabulary.
        """
        self.check_id(token)
        text, kind = self.tokens[token], self.kinds[token]
        if kind in _HIDDEN:
            return text.encode() if special else b""
        if kind == TokenKind.BYTE:
            return bytes((_byte_value(text),))
        if kind == TokenKind.NORMAL and self.spelling is Spelling.BYTE_LEVEL:
            try:
                return bytes([_BYTE_OF[character] for character in text])
            except KeyError:  # a whole-text token that its converter filed under the normal ones
                pass
        return self._plain(token).encode()

    def _plain(self, token: int) -> str:
        text = self.tokens[token]
        if self.spelling is Spelling.SENTENCEPIECE and self.kinds[token] in _MERGEABLE:
            return text.replace(SPACE_MARK, " ")
        return text

    def _of(self, kinds: Set[TokenKind]) -> Iterator[int]:
        return (token for token, kind in enumerate(self.kinds) if kind in kinds)

    def _check_tokens(self) -> None:
        first: dict[str, int] = {}
        for token, text in enumerate(self.tokens):
            other = first.setdefault(text, token)
            if other != token:
                _fail("tokenizer.ggml.tokens", f"tokens {other} and {token} are both {text!r}", ids=(other, token))
        for token in self._of({TokenKind.BYTE}):
            _byte_value(self.tokens[token])

    def _check_merges(self) -> None:
        known = self.mergeable()
        for rank, (left, right) in enumerate(self.merges):
            for part in (left, right, left + right):
                if part not in known:
                    _fail(
                        "tokenizer.ggml.merges",
                        f"merge {rank} joins {left!r} and {right!r}, but {part!r} is not a token",
                        rank=rank,
                        part=part,
                    )


def special_texts(metadata: Metadata) -> dict[str, str]:
    """The texts of the special tokens a file names, by the names that chat templates use (`bos_token`, ...).

    Raises:
        BadModelFile: the token list is missing, or an id is outside it.
    """
    tokens = list_of(str, metadata, "tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(metadata, key, len(tokens)) for name, key in keys.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def list_of(kind: type[Any], metadata: Metadata, key: str) -> list[Any]:
    """Take a list of one type from a file's metadata.

    Raises:
        BadModelFile: it is missing, or something else.
    """
    values = metadata.get(key)
    if values is None:
        _fail(key, "it is missing")
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        _fail(key, f"it is not a list of {kind.__name__}")
    return values


def _token_id(metadata: Metadata, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token = metadata.get(key)
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < vocab_size:
        _fail(key, f"{token!r} is not one of {vocab_size} tokens", id=token)
    return token


def _pair(merge: str) -> tuple[str, str]:
    # The byte alphabet has no space, so the one that separates the parts is the only one.
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        _fail("tokenizer.ggml.merges", f"{merge!r} is not two tokens and a space", merge=merge)
    return left, right


def is_byte_token(text: str) -> bool:
    """Whether a token is written as SentencePiece writes those of bytes, `<0x0A>`."""
    return _BYTE_TOKEN.fullmatch(text) is not None


def _byte_value(text: str) -> int:
    if not is_byte_token(text):
        _fail("tokenizer.ggml.tokens", f"byte token {text!r} is not of the form <0x0A>", token=text)
    return int(text[3:5], 16)


def _fail(key: str, problem: str, **values: Any) -> NoReturn:  # noqa: ANN401 - values of any type are carried
    raise BadModelFile(f"the model file's '{key}' is bad: {problem}; fetch the file again", key=key, **values)

"""SentencePiece BPE: text without word borders, pieces joined by score, bytes where no piece fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from hostcache.errors import BadModelFile, UnsupportedModel

from .bpe import import_tokenizers
from .vocabulary import SPACE_MARK, Metadata, TokenKind, Vocabulary, list_of

if TYPE_CHECKING:
    import tokenizers

__all__ = ["NO_PREFIX", "Before", "SpacePrefix", "build_pieces", "prefix_of_metadata", "ranked_merges"]

_LONGEST_PIECE = 128
"""Characters; SentencePiece makes none longer than 16 unless told. Looking for merges takes the square of it."""


class Before(Enum):
    """What stands before a run of plain text."""

    NOTHING = auto()
    CONTROL = auto()
    USER_DEFINED = auto()


@dataclass(frozen=True)
class SpacePrefix:
    """The space put before plain text, so that a word is the same token at the start of a text as within it.

    Attributes:
        behind: where it is put.
        unless_space: not before text that begins with a space.
        joins_user_defined: a user-defined token is part of the text it stands in, and gets a space like any word at
            the start, as in SentencePiece; otherwise it is a border, as `behind` says.
    """

    behind: frozenset[Before]
    unless_space: bool = False
    joins_user_defined: bool = False

    def put(self, text: str, before: Before) -> str:
        """The text with the prefix, if it gets one there."""
        if not text or before not in self.behind or (self.unless_space and text[0] in (" ", SPACE_MARK)):
            return text
        return " " + text


NO_PREFIX = SpacePrefix(frozenset())
"""Text is taken as it is: nothing is put in front of it."""


def prefix_of_metadata(metadata: Metadata) -> SpacePrefix:
    """What a GGUF file says about the prefix: as SentencePiece, and behind each control token as llama.cpp.

    Raises:
        BadModelFile: the switch is not a truth value.
        UnsupportedModel: the file asks for text to be rewritten first.
    """
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise UnsupportedModel(
                f"the model file asks for text to be rewritten before it is cut (tokenizer.ggml.{key});"
                " rockpage runs SentencePiece without: use a Llama-type model",
                key=key,
            )
    wanted = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if not isinstance(wanted, bool):
        raise BadModelFile(
            f"the model file's 'tokenizer.ggml.add_space_prefix' is {wanted!r}, neither true nor false;"
            " fetch the file again",
            add_space_prefix=wanted,
        )
    behind = frozenset({Before.NOTHING, Before.CONTROL}) if wanted else frozenset[Before]()
    return SpacePrefix(behind, joins_user_defined=True)


def ranked_merges(metadata: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Say with merges what a GGUF file says with scores: of all neighbours, join first what scores highest.

    Every way to cut a piece in two pieces is a merge. Of two places where the same piece can be made, the left one
    comes first in SentencePiece as in the `tokenizers` library.

    Raises:
        BadModelFile: scores are missing, too few, no numbers, or a piece is longer than any.
        UnsupportedModel: two pieces have the same score, which leaves open what to join first, and are not runs of
            one character.
    """
    key = "tokenizer.ggml.scores"
    scores = list_of(float, metadata, key)
    if len(scores) != len(vocabulary.tokens) or any(math.isnan(score) for score in scores):
        raise BadModelFile(
            f"the model file's '{key}' are {len(scores)} for {len(vocabulary.tokens)} tokens, or not all numbers;"
            " fetch the file again",
            scores=len(scores),
        )
    pieces = vocabulary.ids_of(TokenKind.NORMAL)
    longest = max(pieces, key=len, default="")
    if len(longest) > _LONGEST_PIECE:
        raise BadModelFile(
            f"the model file's token {pieces[longest]} has {len(longest)} characters, more than {_LONGEST_PIECE};"
            " fetch the file again",
            id=pieces[longest],
        )
    merges: list[tuple[str, str]] = []
    by_score = sorted(pieces, key=lambda piece: -scores[pieces[piece]])
    for _, equal in itertools.groupby(by_score, key=lambda piece: scores[pieces[piece]]):
        joined = {piece: cuts for piece in equal if (cuts := _cuts(piece, pieces))}
        if len(joined) > 1:
            merges += _merges_of_runs(list(joined))
        else:
            merges += itertools.chain(*joined.values())
    return merges


def _cuts(piece: str, pieces: Container[str]) -> list[tuple[str, str]]:
    """Every way to cut a piece in two pieces."""
    cuts = ((piece[:end], piece[end:]) for end in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in pieces and right in pieces]


def _merges_of_runs(equal: list[str]) -> list[tuple[str, str]]:
    """Merges for pieces of one score, which are runs of one character, as Llama 2's runs of spaces are.

    Of equal scores SentencePiece joins what stands furthest left. So the first run grows by one character at a time,
    until it ends or there is no longer piece, and only then the next one begins: merges say so with the longer first.

    Raises:
        UnsupportedModel: they are not all the runs from two characters on.
    """
    runs = sorted(equal, key=len)
    if runs != [runs[0][0] * length for length in range(2, len(runs) + 2)]:
        other, piece = equal[:2]
        raise UnsupportedModel(
            f"the model file's tokens {other!r} and {piece!r} have the same score, so that it is not told which"
            " to make first; convert the model again from its tokenizer.model",
            pieces=(other, piece),
        )
    return [(run[:-1], run[-1]) for run in reversed(runs)]


def build_pieces(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Build the part that turns plain text into ids, the prefix already before it; it knows no control tokens.

    Args:
        vocabulary: tokens spelled as SentencePiece does.
        merges: pairs of tokens, first to apply first.

    Raises:
        UnsupportedModel: there is neither a token for each byte nor one for what is unknown.
        MissingExtra: the `tokenizers` library is not installed.
    """
    byte_tokens = vocabulary.ids_of(TokenKind.BYTE)
    unknown = vocabulary.ids_of(TokenKind.UNKNOWN)
    if len(byte_tokens) < 256 and not unknown:
        raise UnsupportedModel(
            f"the model has {len(byte_tokens)} of 256 byte tokens and no token for what is unknown:"
            " not every text could be encoded; use another model",
            bytes=len(byte_tokens),
        )
    library = import_tokenizers()
    bpe: tokenizers.Tokenizer = library.Tokenizer(
        library.models.BPE(
            vocab=byte_tokens | unknown | vocabulary.mergeable(),
            merges=merges,
            byte_fallback=True,
            unk_token=next(iter(unknown), None),
            fuse_unk=True,
        )
    )
    bpe.normalizer = library.normalizers.Replace(" ", SPACE_MARK)
    return bpe

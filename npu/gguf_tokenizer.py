"""Says in GGUF's keys what a Hugging Face folder says of its tokenizer, or refuses where GGUF has no words for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

from hostcache.errors import UnsupportedModel

from .bpe import PRE_TOKENIZERS, PreTokenizer
from .gguf_header import MetaValue
from .hf_tokenizer import FolderTokenizer
from .spm import NO_PREFIX, Before, SpacePrefix, prefix_of_metadata, ranked_merges
from .vocabulary import Spelling, TokenKind, Vocabulary

__all__ = ["tokenizer_metadata"]

_ENDS = ("eos", "eot", "eom")  # the keys of tokens that end an answer; which of several is which makes no difference
_SPECIAL_KEYS = {"unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(tokenizer: FolderTokenizer, special_texts: Mapping[str, str]) -> dict[str, MetaValue]:
    """The `tokenizer.ggml` keys of a folder's tokenizer.

    Args:
        tokenizer: as read from the folder.
        special_texts: of its special tokens, by the names that chat templates use.

    Returns:
        A dictionary that `Tokenizer.from_metadata` makes the same tokenizer of.

    Raises:
        UnsupportedModel: GGUF cannot say what the folder says: a way to cut text, to put spaces, or to join tokens
            that it has no key for, or more than three tokens that end an answer.
    """
    vocabulary = tokenizer.vocabulary
    metadata: dict[str, MetaValue] = {
        "tokenizer.ggml.model": vocabulary.spelling.value,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in vocabulary.kinds],
        "tokenizer.ggml.add_bos_token": tokenizer.add_bos,
    }
    if vocabulary.spelling is Spelling.BYTE_LEVEL:
        metadata |= _byte_level(tokenizer)
    else:
        metadata |= _sentencepiece(tokenizer, metadata)
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    named = _named_ends(vocabulary, ids.get(special_texts.get("eos_token", "")))
    named |= {key: ids[special_texts[name]] for name, key in _SPECIAL_KEYS.items() if special_texts.get(name) in ids}
    if vocabulary.bos_id is not None:
        named["bos"] = vocabulary.bos_id
    return metadata | {f"tokenizer.ggml.{key}_token_id": token for key, token in named.items()}


def _byte_level(tokenizer: FolderTokenizer) -> dict[str, MetaValue]:
    def ways(pre: PreTokenizer) -> PreTokenizer:
        return replace(pre, adds_bos=False)  # which the file says apart

    wanted = ways(tokenizer.steps.words)
    name = next((name for name, pre in PRE_TOKENIZERS.items() if ways(pre) == wanted), None)
    if name is None or tokenizer.steps.prefix != NO_PREFIX:
        _refuse(f"cuts text as none of {', '.join(PRE_TOKENIZERS)} does")
    return {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in tokenizer.vocabulary.merges],
    }


def _sentencepiece(tokenizer: FolderTokenizer, metadata: Mapping[str, MetaValue]) -> dict[str, MetaValue]:
    vocabulary, prefix = tokenizer.vocabulary, tokenizer.steps.prefix
    for add_space_prefix in (True, False):
        found: dict[str, MetaValue] = {"tokenizer.ggml.add_space_prefix": add_space_prefix}
        if _same_prefix(prefix_of_metadata(found), prefix, vocabulary):
            break
    else:
        _refuse("puts spaces before text in a way of its own")
    found["tokenizer.ggml.scores"] = _scores(vocabulary)
    merges = ranked_merges({**metadata, **found}, vocabulary)
    # Ways to make one token may come in another order: SentencePiece, and GGUF after it, goes from left to right.
    if sorted(merges) != sorted(vocabulary.merges) or _made(merges) != _made(vocabulary.merges):
        _refuse("joins tokens in an order that no score for each can say")
    return found


def _same_prefix(a: SpacePrefix, b: SpacePrefix, vocabulary: Vocabulary) -> bool:
    """Whether two prefixes do the same to any text of this vocabulary."""

    def seen(prefix: SpacePrefix) -> SpacePrefix:
        if TokenKind.USER_DEFINED not in vocabulary.kinds:  # then it does not matter what is done behind such a token
            prefix = replace(prefix, behind=prefix.behind - {Before.USER_DEFINED}, joins_user_defined=False)
        return prefix if prefix.behind else NO_PREFIX

    return seen(a) == seen(b)


def _scores(vocabulary: Vocabulary) -> list[float]:
    """A score for each token, falling in the order in which merges make them: what is made first scores highest."""
    made: dict[str, float] = {}
    for left, right in vocabulary.merges:
        made.setdefault(left + right, float(-len(made)))
    last = float(-len(made))
    return [made.get(text, last) for text in vocabulary.tokens]


def _made(merges: Iterable[tuple[str, str]]) -> list[str]:
    """What merges make, in their order."""
    return [left + right for left, right in merges]


def _named_ends(vocabulary: Vocabulary, eos: int | None) -> dict[str, int]:
    """Keys for the tokens that end an answer; the tokenizer's own is `eos`."""
    ends = sorted(vocabulary.eos_ids, key=lambda token: (token != eos, token))
    if len(ends) > len(_ENDS):
        _refuse(f"names {len(ends)} tokens that end an answer, where GGUF has {len(_ENDS)} keys")
    return dict(zip(_ENDS, ends, strict=False))


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModel(
        f"the folder's tokenizer {what}, which GGUF cannot say; run the folder as it is, or use another model",
        what=what,
    )

"""Tokenizers as model files describe them, by lists that mostly fit each other; and texts and ids to put through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

from npu.bpe import PRE_TOKENIZERS
from npu.detokenizer import Detokenizer
from npu.gguf_header import MetaValue
from npu.tokenizer import Tokenizer
from npu.vocabulary import SPACE_MARK, TokenKind
from tests.fuzz.guard import refusals
from tests.fuzz.values import FLOATS, INTEGERS, TEXTS

__all__ = ["TokenizerCase", "tokenizer_cases", "use_tokenizer"]


@dataclass(frozen=True)
class TokenizerCase:
    """A file's metadata, what to encode, and what to decode."""

    metadata: Mapping[str, MetaValue]
    text: str
    ids: list[int]


def use_tokenizer(case: TokenizerCase) -> None:
    """Build the tokenizer and use it every way; each may be refused by itself."""
    with refusals():
        tokenizer = Tokenizer.from_metadata(case.metadata)
        for special in (False, True):
            with refusals():
                tokenizer.decode(tokenizer.encode(case.text, special=special), special=special)
            with refusals():
                tokenizer.decode(case.ids, special=special)
        detokenizer = Detokenizer(tokenizer)
        for token in (*case.ids, *range(tokenizer.vocab_size)):
            with refusals():
                detokenizer.push(token)
        detokenizer.flush()


_LETTERS = ["a", "b", "Ġ", "Ċ", SPACE_MARK, "é", " ", "\x00", "\u0345", "<", "\U0001f642"]
_PIECES = st.text(st.sampled_from(_LETTERS), min_size=1, max_size=3)
_GGUF_TEXTS = TEXTS.filter(lambda text: text.isprintable() or text.isascii()).map(
    lambda text: text.encode(errors="replace").decode()  # GGUF's texts are UTF-8
)
_TOKENS = st.lists(_PIECES | _GGUF_TEXTS, max_size=8)
_KINDS = st.sampled_from([*map(int, TokenKind), 1, 1, 1, 1])
_SCORES = st.sampled_from([-1.0, -2.0, -3.0, -4.0, -5.0]) | FLOATS
_FAMILIES = st.sampled_from(["gpt2", "gpt2", "llama", "llama", "bert"])
_PRES = st.sampled_from([*PRE_TOKENIZERS, "default"])
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_ODD = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, _GGUF_TEXTS, _TOKENS, st.lists(INTEGERS, max_size=3))
_KEYS = st.sampled_from(
    [
        *("model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "add_space_prefix"),
        *("bos_token_id", "eos_token_id", "eot_token_id", "precompiled_charsmap", "remove_extra_whitespaces"),
    ]
)
_IDS = st.lists(st.integers(0, 12) | INTEGERS, max_size=5)
_ONE_IN_FOUR = st.sampled_from([True, False, False, False])


@st.composite
def tokenizer_cases(draw: st.DrawFn) -> TokenizerCase:
    """Tokens, what joins them, and now and then a key with a value of any type."""
    tokens = list(dict.fromkeys([*draw(_TOKENS), *_LETTERS[:4], "ab"]))
    if draw(_ONE_IN_FOUR):
        tokens += draw(_TOKENS)  # perhaps twice
    kinds = [draw(_KINDS) for _ in tokens]
    if draw(_ONE_IN_FOUR):
        tokens, kinds = tokens + _BYTES, kinds + [int(TokenKind.BYTE)] * 256
    inside = st.integers(0, len(tokens) - 1)
    ggml: dict[str, object] = {
        "model": draw(_FAMILIES),
        "pre": draw(_PRES),
        "tokens": tokens,
        "token_type": kinds,
        "merges": draw(st.sampled_from([[], ["a b"], ["a b", "ab a"], ["Ġ a", "a b"]])),
        "scores": [draw(_SCORES) for _ in tokens[:20]] + [0.0] * len(tokens[20:]),
        "bos_token_id": draw(inside),
        "eos_token_id": draw(inside),
    }
    if draw(_ONE_IN_FOUR):
        ggml[draw(_KEYS)] = draw(_ODD)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}
    return TokenizerCase(metadata, draw(TEXTS) + "".join(draw(_TOKENS)), draw(_IDS))  # type: ignore[arg-type] # values of any type

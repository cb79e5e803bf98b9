"""Metadata of a byte-level tokenizer small enough to work out by hand: token `BYTE_0 + b` is byte b."""

from __future__ import annotations

from collections.abc import Sequence

from npu.gguf import MetaValue
from npu.tokenizer import Tokenizer
from npu.vocabulary import Metadata

__all__ = ["BYTE_0", "byte_ids", "spell", "toy", "toy_metadata"]

CONTROL = ("<|begin|>", "<|end|>", "<|end|>!", "<|user|>")
"""Control tokens 0 to 3; the third begins with the second."""

BYTE_0 = len(CONTROL)
"""Id of the token for byte 0."""

# GPT-2's alphabet (the fixed table of its encoder.py): bytes that print as Latin-1 are themselves, the 68 others follow
# from U+0100 on in order.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTERS = [chr(byte) if byte in _PRINTABLE else chr(256 + _OTHERS.index(byte)) for byte in range(256)]


def spell(text: str) -> str:
    """Text in the byte alphabet, as vocabularies and merges write it."""
    return "".join(_CHARACTERS[byte] for byte in text.encode())


def byte_ids(data: str | bytes) -> list[int]:
    """The tokens of bytes (or of the UTF-8 of a text) that no merge touches."""
    return [BYTE_0 + byte for byte in (data.encode() if isinstance(data, str) else data)]


def toy_metadata(
    pre: str = "gpt-2",
    *,
    merges: Sequence[tuple[str, str]] = (),
    words: Sequence[str] = (),
    user_defined: Sequence[str] = (),
    **overrides: MetaValue | None,
) -> Metadata:
    """A file's metadata: control tokens, the bytes, what `merges` make, `words` without merges, user-defined tokens.

    Args:
        pre: `tokenizer.ggml.pre`.
        merges: pairs of plain texts.
        words: normal tokens that no merge leads to.
        user_defined: tokens of kind 4.
        overrides: `tokenizer.ggml` keys to replace, None to leave out.
    """
    normal = [*_CHARACTERS, *(spell(left + right) for left, right in merges), *(spell(word) for word in words)]
    ggml: dict[str, MetaValue | None] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*CONTROL, *normal, *user_defined],
        "token_type": [3] * len(CONTROL) + [1] * len(normal) + [4] * len(user_defined),
        "merges": [f"{spell(left)} {spell(right)}" for left, right in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
        **overrides,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}


def toy(pre: str = "gpt-2", **options: object) -> Tokenizer:
    """The tokenizer of `toy_metadata`."""
    return Tokenizer.from_metadata(toy_metadata(pre, **options))  # type: ignore[arg-type] # handed on as they are

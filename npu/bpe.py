"""Byte-level BPE by the `tokenizers` library, and how each family of models cuts text into words before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

from hostcache.errors import MissingExtra, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "build_bpe", "import_tokenizers", "pre_tokenizer_named"]


@dataclass(frozen=True)
class PreTokenizer:
    """What a model's own tokenizer.json does around BPE.

    Attributes:
        split: regular expression (Oniguruma) whose matches are the words; None for the one of GPT-2, which the
            library has built in.
        single_digits: each digit is a word of its own, before `split` is applied.
        whole_words: a word that is a token is taken as it is, whatever the merges would make of it.
        nfc: text is brought into Unicode normal form C first.
        adds_bos: a sequence starts with `bos` where the file does not say (`tokenizer.ggml.add_bos_token`).
    """

    split: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


def _words_with_digits(digits: str) -> str:
    """The expression of OpenAI's cl100k_base, which Llama 3 and Qwen2 took over; they differ in runs of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions, in either case
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # letters, with one character such as a space before them
        rf"|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation, and the line ends behind it
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"  # white space, but for its last character when a word follows
        r"|\s+"
    )


# meta-llama/Meta-Llama-3-8B, tokenizer.json: Split before ByteLevel; ignore_merges; a post-processor adds bos.
_LLAMA_3 = PreTokenizer(split=_words_with_digits(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)

PRE_TOKENIZERS = {
    # openai-community/gpt2, tokenizer.json: ByteLevel.
    "gpt-2": PreTokenizer(),
    # HuggingFaceTB/SmolLM2-135M-Instruct, tokenizer.json: Digits(individual_digits) before ByteLevel.
    "smollm": PreTokenizer(single_digits=True),
    # Llama 3 to 3.3, under the three names that llama.cpp's `llama_vocab::impl::load` takes for them.
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    # Llama 3's without bos, the name under which llama.cpp's converter writes SmolLM3.
    "smaug-bpe": replace(_LLAMA_3, adds_bos=False),
    # Qwen/Qwen2.5-0.5B-Instruct, tokenizer.json: NFC, then Split before ByteLevel. Qwen3 has the same.
    "qwen2": PreTokenizer(split=_words_with_digits(r"\p{N}"), nfc=True),
}
"""What rockpage knows, by the name a GGUF file gives in `tokenizer.ggml.pre`; each with the file it was taken from."""


def import_tokenizers() -> ModuleType:
    """The `tokenizers` library.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import tokenizers  # noqa: PLC0415 - an optional extra, wanted only where a tokenizer is built
    except ImportError as error:
        raise MissingExtra("the tokenizer needs 'tokenizers': pip install 'rockpage[model]'", extra="model") from error
    return tokenizers


def pre_tokenizer_named(name: object) -> PreTokenizer:
    """Look up the value of `tokenizer.ggml.pre`; None when the file has no such key.

    Raises:
        UnsupportedModel: the name is not in the table: a near one would tokenise almost everything right.
    """
    known = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if known is None:
        what = "no pre-tokenizer" if name is None else f"pre-tokenizer {name!r}"
        raise UnsupportedModel(
            f"the model file names {what} (tokenizer.ggml.pre); rockpage has {', '.join(PRE_TOKENIZERS)}:"
            " use a model with one of these",
            pre=name,
        )
    return known


def build_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer) -> tokenizers.Tokenizer:
    """Build the part that turns plain text into ids; it knows no control tokens.

    Args:
        vocab: ids by text, in GPT-2's byte alphabet.
        merges: pairs of tokens, first to apply first. Both parts and what they join to must be in `vocab`: the
            library panics on some that are not.
        pre: how text is cut into words.

    Raises:
        MissingExtra: the `tokenizers` library is not installed.
    """
    library = import_tokenizers()
    # The constructor takes half the time of parsing a tokenizer.json made for the purpose.
    bpe: tokenizers.Tokenizer = library.Tokenizer(
        library.models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    )
    steps: list[tokenizers.pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(library.pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(library.pre_tokenizers.Split(library.Regex(pre.split), behavior="isolated"))
    steps.append(library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    bpe.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    if pre.nfc:
        bpe.normalizer = library.normalizers.NFC()
    return bpe

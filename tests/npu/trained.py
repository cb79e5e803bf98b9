"""Small tokenizers trained on the spot by the reference libraries, and their files as models bring them."""

from __future__ import annotations

import functools
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from npu.vocabulary import Metadata, list_of

__all__ = [
    "BYTE_LEVEL",
    "CONTROL",
    "PIECES_AS_A_WHOLE",
    "USER_DEFINED",
    "byte_level",
    "gguf_of",
    "gguf_of_pieces",
    "llama_2",
    "of_gguf",
    "random_texts",
    "save_folder",
    "sentencepiece_model",
    "with_runs_of_spaces",
]

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens of the byte-level tokenizers, ids 0 to 2."""

USER_DEFINED = ("<tool_call>", "</tool_call>")
"""Their tokens that are matched as a whole and are text; behind the trained ones."""

PIECES_AS_A_WHOLE = ("<tool>", "\u2581" * 4)
"""The SentencePiece model's user-defined pieces."""

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SENTENCES = (
    "The spindle's bearing runs hot; we'll check its grease at 07:45, won't we?",
    "Alarm 315: coolant pressure below 2.5 bar (expected 4.0 bar).",
    "Die Fräse läuft mit 12000 Umdrehungen, das Öl ist über 80 °C heiß.",
    "La température dépasse la limite. Où est l'opérateur ? Ça ira.",
    "Температура подшипника 95 градусов, остановите станок.",
    "主轴轴承温度过高。请检查润滑油。",
    "軸受の温度が高すぎます。油を確認してください。",
    "def f(x):\n    return x ** 2  # square\n\n\tif x == 10: print('ten')\n",
    "I'LL PAY THEM'RE 100% SURE; it's 3 o'clock   and  we'd go.",
    "🙂🙃 ok 👍🏽 done … “quoted” — dash",
)


@functools.cache
def corpus() -> list[str]:
    """Sentences in several languages, and their words in other orders."""
    draw = random.Random(315)
    words = " ".join(_SENTENCES).split(" ")
    return [*_SENTENCES * 20, *(" ".join(draw.choices(words, k=12)) for _ in range(400))]


def random_texts(count: int, seed: int = 5) -> list[str]:
    """Texts that mix words, digits, white space, combining characters and any code point."""
    draw = random.Random(seed)
    parts: list[Any] = [
        lambda: draw.choice(draw.choice(_SENTENCES).split(" ")),
        lambda: draw.choice((" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", " \n ")),
        lambda: str(draw.randrange(10 ** draw.randrange(1, 8))),
        lambda: draw.choice(("'s", "'LL", "'Ve", "e\u0301", "\u0323a\u0302", "가", "가", "ﬁ", "½", "٣", "\u2581")),
        lambda: chr(draw.randrange(0x20, 0x250)),
        lambda: chr(draw.choice((draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)))),
        lambda: draw.choice(("...", "!!", "<|", "|>", "<0x0A>", "\u200d", "\ufeff", "\x00", "#", " spindles")),
    ]
    return ["".join(draw.choice(parts)() for _ in range(draw.randrange(1, 24))) for _ in range(count)]


# Byte-level BPE, as the tokenizer.json of each family builds it


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


BYTE_LEVEL: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": _split(_LLAMA_3),
    "smaug-bpe": _split(_LLAMA_3),
    "qwen2": _split(_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")),
}
"""By the name a GGUF file gives."""


@functools.cache
def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A trained tokenizer of a family, with control and user-defined tokens; Llama 3's puts bos first."""
    whole_words = pre in ("llama-bpe", "smaug-bpe")
    trained = tokenizers.Tokenizer(models.BPE(ignore_merges=whole_words))
    trained.pre_tokenizer = BYTE_LEVEL[pre]
    trained.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        trained.normalizer = normalizers.NFC()
    trained.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=800,
            special_tokens=list(CONTROL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if whole_words:  # a token that no merge makes, as Llama 3 has some
        content = json.loads(trained.to_str())
        content["model"]["vocab"]["Ġspindles"] = trained.get_vocab_size()
        trained = tokenizers.Tokenizer.from_str(json.dumps(content))
    trained.add_tokens([AddedToken(text, special=False, normalized=False) for text in USER_DEFINED])
    if pre == "llama-bpe":
        trained.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return trained


def gguf_of(trained: tokenizers.Tokenizer, pre: str) -> Metadata:
    """What llama.cpp's converter writes of a byte-level tokenizer."""
    content = json.loads(trained.to_str())
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    kinds = {**dict.fromkeys(CONTROL, 3), **dict.fromkeys(USER_DEFINED, 4)}
    tokens = sorted(ids, key=ids.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(text, 1) for text in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
    }


def of_gguf(metadata: Metadata) -> tokenizers.Tokenizer:
    """A byte-level tokenizer for plain text with the vocabulary of a GGUF file, without its control tokens."""
    texts: list[str] = list_of(str, metadata, "tokenizer.ggml.tokens")
    kinds = list_of(int, metadata, "tokenizer.ggml.token_type")
    merges = (merge.split(" ") for merge in list_of(str, metadata, "tokenizer.ggml.merges"))
    vocab = {text: token for token, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind == 1}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in merges]))
    tokenizer.pre_tokenizer = BYTE_LEVEL[str(metadata["tokenizer.ggml.pre"])]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_folder(trained: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """Write a tokenizer as transformers lays out its files."""
    folder.mkdir(exist_ok=True)
    trained.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


# SentencePiece BPE


@functools.cache
def sentencepiece_model(*, prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    """Trained as Llama's was: bytes, no normalisation, digits apart; two user-defined pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        character_coverage=0.99,
        user_defined_symbols=list(PIECES_AS_A_WHOLE),
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@functools.cache
def with_runs_of_spaces() -> sentencepiece.SentencePieceProcessor:
    """The model with pieces of up to 16 spaces, all of the lowest score, as Llama 2's has them."""
    proto = _proto_of(sentencepiece_model())
    pieces = [piece for piece in proto.pieces if piece.piece.strip("\u2581")]
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    for spaces in random.Random(2).sample(range(1, 17), 16):
        proto.pieces.add(piece="\u2581" * spaces, score=-1e9, type=1)
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def gguf_of_pieces(model: sentencepiece.SentencePieceProcessor, *, prefix: bool = True) -> Metadata:
    """What llama.cpp's converter writes of a SentencePiece model."""
    pieces = _proto_of(model).pieces
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.token_type": [int(piece.type) for piece in pieces],  # llama.h numbers the kinds alike
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _proto_of(model: sentencepiece.SentencePieceProcessor) -> Any:
    return sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())


@functools.cache
def llama_2(form: str) -> tokenizers.Tokenizer:
    """A SentencePiece model in one of the forms in which tokenizer.json holds it.

    Args:
        form: "normalizer" as Llama 2's own; "metaspace-first", "metaspace-always" or "metaspace-never", as
            `transformers.LlamaTokenizer` writes since.
    """
    model = sentencepiece_model()
    pieces = {model.id_to_piece(token): token for token in range(model.vocab_size())}
    normal = {piece.piece: token for token, piece in enumerate(_proto_of(model).pieces) if piece.type == 1}
    cuts = [
        (-model.get_score(token), token, piece[:end], piece[end:])
        for piece, token in normal.items()
        for end in range(1, len(piece))
        if piece[:end] in normal and piece[end:] in normal
    ]
    merges = [(left, right) for *_, left, right in sorted(cuts)]
    with tempfile.TemporaryDirectory() as folder:
        llama = transformers.LlamaTokenizer(vocab=pieces, merges=merges, legacy=form == "metaspace-always")
        llama.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
        llama.save_pretrained(folder)
        content = json.loads((Path(folder) / "tokenizer.json").read_text())
    if form == "normalizer":
        content["pre_tokenizer"] = None
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        }
    elif form == "metaspace-never":
        content["pre_tokenizer"]["prepend_scheme"] = "never"
    return tokenizers.Tokenizer.from_str(json.dumps(content))

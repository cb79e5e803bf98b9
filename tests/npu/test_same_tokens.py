"""The same ids as the libraries that made the vocabulary, whichever file it comes from."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from npu.gguf import GGUFFile
from npu.tokenizer import Tokenizer
from tests.npu.trained import (
    BYTE_LEVEL,
    CONTROL,
    USER_DEFINED,
    byte_level,
    gguf_of,
    gguf_of_pieces,
    llama_2,
    of_gguf,
    random_texts,
    save_folder,
    sentencepiece_model,
    with_runs_of_spaces,
)

COUNTS = [500, pytest.param(5000, marks=pytest.mark.long)]
FORMS = ("normalizer", "metaspace-first", "metaspace-always", "metaspace-never")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_from_gguf_and_from_a_folder(pre: str, count: int, tmp_path: Path) -> None:
    reference = byte_level(pre)
    from_gguf = Tokenizer.from_metadata(gguf_of(reference, pre))
    from_folder = Tokenizer.from_folder(save_folder(reference, tmp_path))
    for text in random_texts(count):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert from_gguf.encode(text, bos=False).tolist() == expected
        assert from_folder.encode(text, bos=False).tolist() == expected
        assert from_folder.decode(expected) == reference.decode(expected)


@pytest.mark.parametrize("count", COUNTS)
def test_a_real_vocabulary(demo_model: Path, count: int) -> None:
    with GGUFFile.open(demo_model) as gguf:
        metadata = gguf.metadata
    reference, tokenizer = of_gguf(metadata), Tokenizer.from_metadata(metadata)
    for text in random_texts(count):
        expected = reference.encode(text).ids
        assert tokenizer.encode(text).tolist() == expected
        assert tokenizer.decode(expected) == reference.decode(expected)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_texts_with_control_and_user_defined_tokens(pre: str, tmp_path: Path) -> None:
    reference = byte_level(pre)
    from_gguf = Tokenizer.from_metadata(gguf_of(reference, pre))
    from_folder = Tokenizer.from_folder(save_folder(reference, tmp_path))
    for number, text in enumerate(random_texts(100)):
        marked = f" a{CONTROL[number % 3]}{text}{USER_DEFINED[number % 2]}{CONTROL[2]}\n"
        expected = reference.encode(marked).ids  # with bos, where the family has it
        assert from_gguf.encode(marked, special=True).tolist() == expected
        assert from_folder.encode(marked, special=True).tolist() == expected


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_from_gguf(prefix: bool, count: int) -> None:
    reference = sentencepiece_model(prefix=prefix)
    tokenizer = Tokenizer.from_metadata(gguf_of_pieces(reference, prefix=prefix))
    texts = random_texts(count)
    user_defined = [f"{text}<tool>{text}    {text}" for text in texts[:100]] + ["<tool>", " <tool> ", "    ", "   a"]
    for text in texts + user_defined:
        ids = tokenizer.encode(text, bos=False).tolist()
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("count", COUNTS)
def test_sentencepiece_with_runs_of_spaces_of_one_score(count: int) -> None:
    reference = with_runs_of_spaces()
    tokenizer = Tokenizer.from_metadata(gguf_of_pieces(reference))
    spaces = random.Random(7)
    for text in random_texts(count):
        spread = re.sub(r"\s", lambda _: " " * spaces.choice((1, 2, 3, 7, 18, 40)), text)
        for given in (text, spread):
            assert tokenizer.encode(given, bos=False).tolist() == reference.encode(given)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("form", FORMS)
def test_sentencepiece_from_a_folder(form: str, count: int, tmp_path: Path) -> None:
    reference = llama_2(form)
    tokenizer = Tokenizer.from_folder(save_folder(reference, tmp_path, bos_token="<s>", eos_token="</s>"))
    for text in random_texts(count):
        for marked in (text, f"<s>{text}</s> <tool>{text}"):
            expected = reference.encode(marked, add_special_tokens=False).ids
            assert tokenizer.encode(marked, special=True, bos=False).tolist() == expected


def test_random_texts_reach_what_tokenizers_differ_in() -> None:
    # Otherwise equality would say little: each family must cut some of the texts in a way of its own.
    texts = random_texts(200)
    cuts = {pre: [cut.pre_tokenize_str(text) for text in texts] for pre, cut in BYTE_LEVEL.items()}
    for pre, other in (("gpt-2", "smollm"), ("gpt-2", "llama-bpe"), ("llama-bpe", "qwen2"), ("smollm", "qwen2")):
        assert cuts[pre] != cuts[other]
    reference = sentencepiece_model()
    used = {reference.id_to_piece(token) for text in texts for token in reference.encode(text)}
    assert any(reference.is_byte(reference.piece_to_id(piece)) for piece in used)
    assert len(used) > 250


def test_memory_of_a_tokenizer_is_not_held_twice(tmp_path: Path) -> None:
    folder = save_folder(byte_level("qwen2"), tmp_path)
    tokenizer = Tokenizer.from_folder(os.fspath(folder))
    assert tokenizer._vocabulary.merges == []

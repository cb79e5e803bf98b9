"""A folder's tokenizer said in GGUF's keys is the same tokenizer, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from hostcache.errors import UnsupportedModel
from npu.gguf_header import MetaValue
from npu.gguf_tokenizer import tokenizer_metadata
from npu.hf_tokenizer import FolderTokenizer, special_texts_of_folder
from npu.tokenizer import Tokenizer
from tests.npu.trained import BYTE_LEVEL, byte_level, gguf_of, llama_2, random_texts, save_folder

TEXTS = ["", " ", "  two", *random_texts(150)]


def translated(folder: Path) -> dict[str, MetaValue]:
    return tokenizer_metadata(FolderTokenizer.read(folder), special_texts_of_folder(folder))


def without_user_defined(form: str) -> tokenizers.Tokenizer:
    content = json.loads(llama_2(form).to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    for text in ("<tool>", "\u2581" * 4):
        content["model"]["vocab"].pop(text, None)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def check_same(folder: Path) -> None:
    original, carried = Tokenizer.from_folder(folder), Tokenizer.from_metadata(translated(folder))
    assert (carried.vocab_size, carried.bos_id, carried.eos_ids, carried.add_bos) == (
        original.vocab_size,
        original.bos_id,
        original.eos_ids,
        original.add_bos,
    )
    for text in TEXTS:
        for special in (False, True):
            ids = original.encode(text, special=special)
            assert carried.encode(text, special=special).tolist() == ids.tolist(), text
        assert carried.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_tokenizers_are_carried_over(tmp_path: Path, pre: str) -> None:
    folder = save_folder(byte_level(pre), tmp_path / "folder")
    check_same(folder)
    keys = translated(folder)
    expected = dict(gguf_of(byte_level(pre), pre))
    if pre == "smaug-bpe":  # Llama 3's but for bos, about which the file says what it says
        expected["tokenizer.ggml.pre"] = "llama-bpe"
    assert keys == expected


@pytest.mark.parametrize("form", ["normalizer", "metaspace-never"])
def test_sentencepiece_tokenizers_are_carried_over(tmp_path: Path, form: str) -> None:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = save_folder(without_user_defined(form), tmp_path / "folder", **named)
    check_same(folder)
    keys = translated(folder)
    assert keys["tokenizer.ggml.add_space_prefix"] is (form == "normalizer")
    assert keys["tokenizer.ggml.unknown_token_id"] == 0


def test_every_end_has_a_key_the_tokenizers_own_first(tmp_path: Path) -> None:
    folder = save_folder(byte_level("qwen2"), tmp_path / "folder", pad_token="<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 2]}))
    keys = translated(folder)
    assert [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")] == [2, 0, 1]
    assert keys["tokenizer.ggml.padding_token_id"] == 0


def rewritten(tmp_path: Path, trained: tokenizers.Tokenizer, **changes: Any) -> Path:
    folder = save_folder(trained, tmp_path / "folder", bos_token=None, eos_token=None)
    content = json.loads((folder / "tokenizer.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = content
        for parent in parents:
            part = part[parent]
        part[last] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("pre", "changes", "what"),
    [
        ("gpt-2", {"normalizer": {"type": "NFC"}}, "cuts text as none of gpt-2, smollm, .* does"),
        ("gpt-2", {"pre_tokenizer__add_prefix_space": True}, "cuts text as none of"),
    ],
)
def test_what_gguf_cannot_say_of_words_is_refused(tmp_path: Path, pre: str, changes: dict[str, Any], what: str) -> None:
    folder = rewritten(tmp_path, byte_level(pre), **changes)
    with pytest.raises(UnsupportedModel, match=rf"tokenizer {what}.*, which GGUF cannot say; run the folder as it is"):
        translated(folder)


def test_what_gguf_cannot_say_of_spaces_is_refused(tmp_path: Path) -> None:
    folder = save_folder(llama_2("metaspace-first"), tmp_path / "folder", bos_token="<s>", eos_token="</s>")
    with pytest.raises(UnsupportedModel, match="puts spaces before text in a way of its own"):
        translated(folder)


def test_what_gguf_cannot_say_of_merges_is_refused(tmp_path: Path) -> None:
    trained = without_user_defined("metaspace-never")
    merges = json.loads(trained.to_str())["model"]["merges"]
    folder = rewritten(tmp_path, trained, model__merges=merges[1:])  # one way less to make a token
    with pytest.raises(UnsupportedModel, match="joins tokens in an order that no score for each can say"):
        translated(folder)


def test_more_ends_than_keys_are_refused(tmp_path: Path) -> None:
    folder = save_folder(byte_level("qwen2"), tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 2, 3]}))
    with pytest.raises(UnsupportedModel, match="names 4 tokens that end an answer, where GGUF has 3 keys"):
        translated(folder)

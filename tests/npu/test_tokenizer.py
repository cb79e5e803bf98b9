"""The tokenizer: against llama.cpp on a real vocabulary, by hand on a toy one, and on files that are wrong."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import BadModelFile, MissingExtra, UnsupportedModel, UsageError
from npu.bpe import PRE_TOKENIZERS, build_bpe
from npu.gguf import GGUFFile
from npu.tokenizer import Tokenizer
from npu.vocabulary import TokenKind, Vocabulary
from tests.npu.toy_tokenizer import BYTE_0, byte_ids, spell, toy, toy_metadata

GOLDENS = json.loads((Path(__file__).parent.parent / "goldens" / "llama_cpp_smollm2.json").read_text())

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def smollm2(demo_model: Path) -> Tokenizer:
    with GGUFFile.open(demo_model) as gguf:
        return Tokenizer.from_metadata(gguf.metadata)


# A real vocabulary, judged by llama.cpp


@pytest.mark.parametrize("golden", GOLDENS["tokenize"], ids=lambda golden: golden["text"][:12])
def test_plain_text_gets_the_ids_of_llama_cpp_and_decodes_to_itself(smollm2: Tokenizer, golden: dict[str, Any]) -> None:
    ids = smollm2.encode(golden["text"])
    assert ids.dtype == np.int32
    assert ids.tolist() == golden["ids"]
    assert smollm2.decode(ids) == golden["text"]


@pytest.mark.parametrize("golden", GOLDENS["greedy"], ids=lambda golden: golden["prompt"][-60:-30])
def test_prompts_with_control_tokens_get_the_ids_of_llama_cpp(smollm2: Tokenizer, golden: dict[str, Any]) -> None:
    assert smollm2.encode(golden["prompt"], special=True).tolist() == golden["prompt_ids"]
    assert smollm2.decode(golden["prompt_ids"], special=True) == golden["prompt"]
    assert smollm2.decode(golden["output_ids"]) == golden["text"]


def test_smollm2_special_ids(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == {2}
    assert not smollm2.add_bos
    assert smollm2.token_bytes(2) == b"<|im_end|>"


def test_bytes_without_a_token_are_left_out(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a\x04b").tolist() == [*smollm2.encode("a"), *smollm2.encode("b")]


def test_builds_in_less_than_a_second(demo_model: Path) -> None:
    with GGUFFile.open(demo_model) as gguf:
        start = time.perf_counter()
        Tokenizer.from_metadata(gguf.metadata)
        assert time.perf_counter() - start < 1.0


# A toy vocabulary, worked out by hand


def test_merges_apply_in_order_of_rank_within_words() -> None:
    # "ab" outranks "bc", so abc is ab c; the space starts a new word, so no merge crosses it.
    tokenizer = toy(merges=[("a", "b"), ("b", "c"), ("c", " ")])
    ab, bc = BYTE_0 + 256, BYTE_0 + 257
    assert tokenizer.encode("abc bc").tolist() == [ab, *byte_ids("c "), bc]


@given(TEXT)
def test_any_text_survives_the_round_trip(text: str) -> None:
    tokenizer = toy("smollm", merges=[("a", "b"), (" ", "a")])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'", "LLX", " pay", " 12345", " €", "\n\n ", " now"]),
        ("smollm", ["I", "'", "LLX", " pay", " ", "1", "2", "3", "4", "5", " €", "\n\n ", " now"]),
        ("llama-bpe", ["I", "'LL", "X", " pay", " ", "123", "45", " €\n\n", " ", " now"]),
        ("qwen2", ["I", "'LL", "X", " pay", " ", "1", "2", "3", "4", "5", " €\n\n", " ", " now"]),
    ],
)
def test_each_pre_tokenizer_cuts_words_as_its_expression_says(pre: str, words: list[str]) -> None:
    bpe = build_bpe({}, [], PRE_TOKENIZERS[pre])
    cut = bpe.pre_tokenizer.pre_tokenize_str("I'LLX pay 12345 €\n\n  now")
    assert [word for word, _ in cut] == [spell(word) for word in words]


def test_only_llama_takes_a_word_that_is_a_token_before_merging() -> None:
    # "hello" is a token, but no merge leads to it.
    hello = BYTE_0 + 256
    assert toy("llama-bpe", words=["hello"]).encode("hello").tolist() == [hello]
    assert toy("gpt-2", words=["hello"]).encode("hello").tolist() == byte_ids("hello")


def test_only_qwen_composes_characters() -> None:
    assert toy("qwen2").encode("e\u0301").tolist() == byte_ids("é")
    assert toy("smollm").encode("e\u0301").tolist() == byte_ids("e\u0301")


def test_control_text_is_plain_unless_asked_for() -> None:
    tokenizer = toy()
    text = "<|end|>hi<|user|><|user|>"
    assert tokenizer.encode(text).tolist() == byte_ids(text)
    assert tokenizer.encode(text, special=True).tolist() == [1, *byte_ids("hi"), 3, 3]
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == "hi"
    assert tokenizer.decode(tokenizer.encode(text, special=True), special=True) == text


def test_of_control_tokens_at_one_place_the_longest_is_parsed() -> None:
    assert toy().encode("<|end|>!<|end|>?", special=True).tolist() == [2, 1, *byte_ids("?")]


def test_user_defined_tokens_are_always_parsed_and_always_text() -> None:
    tokenizer = toy(user_defined=["<tool>"])
    tool = tokenizer.vocab_size - 1
    assert tokenizer.encode("a<tool>b").tolist() == [*byte_ids("a"), tool, *byte_ids("b")]
    assert tokenizer.encode("<|end|><tool>", special=True).tolist() == [1, tool]
    assert tokenizer.decode([tool]) == "<tool>"


def test_no_word_reaches_across_a_control_token() -> None:
    tokenizer = toy(merges=[("a", "b")])
    assert tokenizer.encode("a<|end|>b", special=True).tolist() == [*byte_ids("a"), 1, *byte_ids("b")]


def test_bos_is_added_as_the_file_says_or_as_told() -> None:
    asks, silent = toy(add_bos_token=True), toy()
    assert asks.encode("a").tolist() == [0, *byte_ids("a")]
    assert asks.encode("a", bos=False).tolist() == byte_ids("a")
    assert silent.encode("a").tolist() == byte_ids("a")
    assert silent.encode("a", bos=True).tolist() == [0, *byte_ids("a")]
    with pytest.raises(UsageError, match="bos"):
        toy(bos_token_id=None).encode("a", bos=True)


def test_where_the_file_is_silent_bos_follows_the_family() -> None:
    assert toy("llama-bpe", add_bos_token=None).add_bos
    assert not toy("qwen2", add_bos_token=None).add_bos
    assert not toy("llama-bpe", add_bos_token=None, bos_token_id=None).add_bos


def test_all_ends_the_file_names_end_an_answer() -> None:
    assert toy(eot_token_id=2, eom_token_id=3).eos_ids == {1, 2, 3}
    assert toy(eos_token_id=None).eos_ids == frozenset()


def test_bytes_of_every_kind_of_token() -> None:
    kinds = [TokenKind.NORMAL, TokenKind.NORMAL, TokenKind.BYTE, TokenKind.CONTROL, TokenKind.UNKNOWN]
    texts = ["Ġé", "<raw text>", "<0x0A>", "<s>", "<unk>"]  # é is byte E9 in the alphabet, and a space is not in it
    vocabulary = Vocabulary(tokens=texts, kinds=list(kinds), merges=[], bos_id=None, eos_ids=frozenset())
    shown = [vocabulary.token_bytes(token) for token in range(5)]
    assert shown == [b" \xe9", b"<raw text>", b"\n", b"<s>", b"<unk>"]
    hidden = [vocabulary.token_bytes(token, special=False) for token in range(5)]
    assert hidden == [b" \xe9", b"<raw text>", b"\n", b"", b""]


# What is refused


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_surrogates_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(UsageError, match=f"character {len(text) - 1}"):
        toy().encode(text)


@pytest.mark.parametrize("token", [-1, BYTE_0 + 256, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    tokenizer = toy()
    with pytest.raises(UsageError, match=str(token)):
        tokenizer.token_bytes(token)
    with pytest.raises(UsageError, match=str(token)):
        tokenizer.decode([token])


@pytest.mark.parametrize("pre", ["gpt-4o", "default", None, 3])
def test_unknown_pre_tokenizers_are_refused_by_name(pre: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"no pre-tokenizer" if pre is None else repr(pre)):
        toy(pre)


@pytest.mark.parametrize("model", ["t5", "bert", None])
def test_other_tokenizer_families_are_refused_by_name(model: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=repr(model)):
        toy(model=model)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"tokens": None}, "'tokenizer.ggml.tokens'.*missing"),
        ({"tokens": "abc"}, "'tokenizer.ggml.tokens'.*list of str"),
        ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens'.*list of str"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "merges": []}, "tokens 0 and 2 are both 'a'"),
        ({"token_type": None}, "'tokenizer.ggml.token_type'.*missing"),
        ({"token_type": [1, 1]}, "2 kinds for 260 tokens"),
        ({"token_type": [7] * 260}, "7 is not a kind"),
        ({"token_type": [6] * 260}, "byte token '<|begin|>'"),
        ({"merges": None}, "'tokenizer.ggml.merges'.*missing"),
        ({"merges": ["ab"]}, "'ab' is not two tokens"),
        ({"merges": ["a "]}, "'a ' is not two tokens"),
        ({"merges": ["a b"]}, "merge 0 joins 'a' and 'b', but 'ab' is not a token"),
        ({"merges": ["a xy"]}, "'xy' is not a token"),
        ({"merges": ["<|begin|> a"]}, "'<|begin|>' is not a token"),
        ({"eos_token_id": 260}, "'tokenizer.ggml.eos_token_id'.*260 is not one of 260"),
        ({"bos_token_id": "0"}, "'tokenizer.ggml.bos_token_id'.*'0'"),
        ({"eot_token_id": True}, "'tokenizer.ggml.eot_token_id'.*True"),
        ({"add_bos_token": 1}, "add_bos_token' is 1"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token' is True, its bos_token_id None"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_contradict_themselves_are_refused(overrides: dict[str, Any], names: str) -> None:
    metadata = {**toy_metadata(), **{f"tokenizer.ggml.{key}": value for key, value in overrides.items()}}
    with pytest.raises(BadModelFile, match=names.replace("|", r"\|")):
        Tokenizer.from_metadata(metadata)


def test_the_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rockpage\[model\]'"):
        toy()

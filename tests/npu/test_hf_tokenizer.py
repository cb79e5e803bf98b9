"""Hugging Face folders: what each file decides, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostcache.errors import BadModelFile, UnsupportedModel
from npu.generation_config import GenerationConfig
from npu.tokenizer import Tokenizer
from tests.npu.toy_tokenizer import spell

# Three control tokens, the bytes from 3 on, "ab" made by a merge, and a token that is matched as a whole.
BEGIN, END, TURN, BYTE_0 = range(4)
AB, TOOL = BYTE_0 + 256, BYTE_0 + 257
ALPHABET = [next(iter(spell(chr(byte)))) for byte in range(128)]  # of ASCII, which UTF-8 leaves as it is
VOCAB = {"<|end|>": END, **{text: BYTE_0 + byte for byte, text in enumerate(ALPHABET)}, "ab": AB}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def added(token: int, content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": content, **plain, **flags}


ADDED = [
    added(BEGIN, "<|begin|>"),
    added(END, "<|end|>"),
    added(TURN, "<|turn|>"),
    added(TOOL, "<tool>", special=False),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a byte-level model; tests change what they are about."""
    write(tmp_path, "tokenizer.json", tokenizer_json())
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}})
    return tmp_path


def tokenizer_json(model: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    return {
        "added_tokens": ADDED,
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b"], **(model or {})},
        **parts,
    }


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def template(*special: str, behind: tuple[str, ...] = ()) -> dict[str, Any]:
    tokens = [{"SpecialToken": {"id": text, "type_id": 0}} for text in (*special, *behind)]
    tokens.insert(len(special), {"Sequence": {"id": "A", "type_id": 0}})
    return {"type": "TemplateProcessing", "single": tokens, "pair": [], "special_tokens": {}}


def test_each_file_adds_its_part(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == TOOL + 1
    assert tokenizer.bos_id == BEGIN
    assert tokenizer.eos_ids == {END}
    assert not tokenizer.add_bos
    ids = tokenizer.encode("ab<tool><|turn|>", special=True).tolist()
    assert ids == [AB, TOOL, TURN]
    assert tokenizer.decode(ids) == "ab<tool>"
    # Not special: the control token's text is spelled, though the vocabulary lists it as well.
    assert TURN not in tokenizer.encode("<|turn|>")
    assert tokenizer.decode(tokenizer.encode("<|end|>")) == "<|end|>"
    assert END not in tokenizer.encode("<|end|>")


def test_merges_may_be_pairs_or_texts(folder: Path) -> None:
    write(folder, "tokenizer.json", tokenizer_json({"merges": [["a", "b"]]}))
    assert Tokenizer.from_folder(folder).encode("ab").tolist() == [AB]


def test_older_files_name_special_tokens_in_a_map_of_their_own(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    write(folder, "special_tokens_map.json", {"bos_token": "<|begin|>", "eos_token": "<|turn|>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id == BEGIN
    assert tokenizer.eos_ids == {TURN}


def test_tokens_of_tokenizer_config_come_on_top(folder: Path) -> None:
    more = {str(TOOL): {"content": "<tool>", "special": True}, str(TOOL + 1): {"content": "<new>", "special": False}}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": more})
    tokenizer = Tokenizer.from_folder(folder)
    assert TOOL not in tokenizer.encode("<tool>")
    assert tokenizer.encode("<new>").tolist() == [TOOL + 1]


def test_rows_without_a_token_are_unused_ids(folder: Path) -> None:
    write(folder, "config.json", {"vocab_size": TOOL + 10})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == TOOL + 10
    assert tokenizer.decode([TOOL + 9]) == f"[UNUSED {TOOL + 9}]"


@pytest.mark.parametrize(
    ("post_processor", "add_bos_token", "adds"),
    [
        (None, None, False),
        (template("<|begin|>"), None, True),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template("<|begin|>")]}, None, True),
        (template(), None, False),
        (template("<|begin|>"), False, False),
        (None, True, True),
    ],
)
def test_bos_is_added_as_the_config_says_or_else_the_post_processor(
    folder: Path, post_processor: Any, add_bos_token: bool | None, adds: bool
) -> None:
    write(folder, "tokenizer.json", tokenizer_json(post_processor=post_processor))
    write(folder, "tokenizer_config.json", {"bos_token": "<|begin|>", "add_bos_token": add_bos_token})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.add_bos is adds
    assert tokenizer.encode("ab").tolist() == ([BEGIN] if adds else []) + [AB]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, {}, {END}),
        (None, {"eos_token_id": TURN}, {END, TURN}),
        ({"eos_token_id": [TURN, TOOL]}, {"eos_token_id": BEGIN}, {END, TURN, TOOL}),
        ({"eos_token_id": TURN}, {}, {END, TURN}),
        ({"eos_token_id": None}, {"eos_token_id": TURN}, {END, TURN}),
        ({"temperature": 0.6}, {"eos_token_id": [TURN]}, {END, TURN}),
    ],
)
def test_ends_come_from_generation_config_before_config(
    folder: Path, generation: Any, config: Any, ends: set[int]
) -> None:
    write(folder, "config.json", config)
    if generation is not None:
        write(folder, "generation_config.json", generation)
    assert Tokenizer.from_folder(folder).eos_ids == ends


def test_recommended_sampling_is_data(folder: Path) -> None:
    assert GenerationConfig.from_folder(folder) == GenerationConfig()
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    write(folder, "generation_config.json", {**recommended, "eos_token_id": [2, 1], "min_p": None, "max_length": 9})
    config = GenerationConfig.from_folder(folder)
    assert config.sampling == recommended
    assert config.eos_ids == (2, 1)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": "hot"},
        {"top_p": float("nan")},
        {"top_k": 10**400},
        {"min_p": float("-inf")},
        {"eos_token_id": "2"},
        {"eos_token_id": [True]},
        [1],
    ],
)
def test_a_generation_config_that_says_nothing_usable_is_refused(folder: Path, content: Any) -> None:
    write(folder, "generation_config.json", content)
    with pytest.raises(BadModelFile, match="generation_config"):
        GenerationConfig.from_folder(folder)


def test_a_folder_without_tokenizer_json_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (tokenizer_json({"type": "Unigram"}), "model 'Unigram'"),
        (tokenizer_json({"dropout": 0.1}), "dropout=0.1"),
        (tokenizer_json({"continuing_subword_prefix": "##"}), "continuing_subword_prefix='##'"),
        (tokenizer_json(normalizer={"type": "NFKC"}), "normalizer 'NFKC'"),
        (tokenizer_json(normalizer="NFC"), "normalizer 'NFC'"),
        (tokenizer_json(pre_tokenizer=None), "normalizer None"),
        (tokenizer_json(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer 'Whitespace'"),
        (tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]}), r"Regex': '\(a\+"),
        (tokenizer_json(pre_tokenizer={**BYTE_LEVEL, "use_regex": False}), "use_regex=False"),
        (tokenizer_json(pre_tokenizer={**METASPACE, "split": True}), "Metaspace.*split=True"),
        (tokenizer_json(pre_tokenizer={**METASPACE, "prepend_scheme": "last"}), "prepend_scheme='last'"),
        (tokenizer_json({"ignore_merges": True}, pre_tokenizer=METASPACE), "ignore_merges=True"),
        (tokenizer_json(pre_tokenizer=METASPACE), "0 of 256 byte tokens"),
        (tokenizer_json(post_processor={"type": "BertProcessing"}), "post_processor 'BertProcessing'"),
        (tokenizer_json(post_processor=template("<|begin|>", behind=("<|end|>",))), "TemplateProcessing"),
        (tokenizer_json(added_tokens=[added(9999, "<mask>", lstrip=True)]), "'<mask>'.*lstrip"),
        # Values of another type than anybody would write.
        (tokenizer_json(post_processor={"type": "TemplateProcessing", "single": [7]}), r"single=\[7\]"),
        (tokenizer_json(post_processor={"type": "TemplateProcessing", "single": [[], {"Sequence": 1}]}), r"single=\["),
        (tokenizer_json(post_processor={"type": "TemplateProcessing", "single": {"Sequence": 1}}), "single={'Seq"),
        (tokenizer_json(pre_tokenizer={**METASPACE, "prepend_scheme": []}), r"prepend_scheme=\[\]"),
        (
            tokenizer_json(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [{**SPLIT, "pattern": {"Regex": {}}}, {**BYTE_LEVEL, "use_regex": False}],
                }
            ),
            "'Regex': {}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_steps_that_are_not_known_are_refused_by_name(folder: Path, content: Any, names: str) -> None:
    write(folder, "tokenizer.json", content)
    with pytest.raises(UnsupportedModel, match=names):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("tokenizer.json", [], "not a JSON object"),
        ("tokenizer.json", {}, "'model' is None"),
        ("tokenizer.json", tokenizer_json({"vocab": []}), r"'vocab' is \[\]"),
        ("tokenizer.json", tokenizer_json({"vocab": {"a": -1}}), "token 'a' has the id -1"),
        ("tokenizer.json", tokenizer_json({"vocab": {"a": 1 << 40}}), "token 'a' has the id 1099511627776"),
        ("tokenizer.json", tokenizer_json({"vocab": {"a": 7, "b": 7}, "merges": []}), "'a' and 'b' have one id"),
        ("tokenizer.json", tokenizer_json({"merges": None}), "'merges' is None"),
        ("tokenizer.json", tokenizer_json({"merges": ["a"]}), "merge 'a' is not two tokens"),
        ("tokenizer.json", tokenizer_json({"merges": [["a", "b", "c"]]}), "is not two tokens"),
        ("tokenizer.json", tokenizer_json({"merges": ["a c"]}), "'ac' is not a token"),
        ("tokenizer.json", tokenizer_json(added_tokens=[{"id": 1}]), "no id or no content"),
        ("tokenizer.json", tokenizer_json(added_tokens=["<x>"]), "stands for a token"),
        ("tokenizer.json", tokenizer_json(added_tokens=[added(1, "<x>"), added(2, "<x>")]), "the ids 1 and 2"),
        ("tokenizer.json", tokenizer_json(post_processor=template("<|turn|>")), r"puts \['<|turn|>'\]"),
        ("tokenizer_config.json", {"bos_token": 3}, "'bos_token' of tokenizer_config.json is 3"),
        ("tokenizer_config.json", {"bos_token": "<|begin|>", "add_bos_token": 1}, "'add_bos_token'.* is 1"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}, "no id or no content"),
        ("config.json", {"vocab_size": 1 << 40}, "'vocab_size' of config.json is 1099511627776"),
        ("config.json", {"vocab_size": 1 << 17}, "of 131072 ids have no token"),
        ("tokenizer.json", tokenizer_json({"vocab": {**VOCAB, "x": 1 << 19}}), "ids have no token"),
        ("config.json", {"eos_token_id": 5000}, "'eos_token_id' is 5000, not one of"),
    ],
)
def test_files_that_contradict_themselves_are_refused(folder: Path, name: str, content: Any, names: str) -> None:
    write(folder, name, content)
    with pytest.raises(BadModelFile, match=names.replace("|", r"\|")):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1e'])
def test_files_that_are_no_json_are_refused_with_their_path(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    with pytest.raises(BadModelFile, match=r"tokenizer\.json is not"):
        Tokenizer.from_folder(folder)

"""Constraints over a vocabulary of bytes, where the tokens that may follow can be said by looking at the text."""

from __future__ import annotations

import json
import re
import sys
import time

import jsonschema  # type: ignore[import-untyped] # has no annotations
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import MissingExtra, RequestFailed, UsageError
from npu import structured
from npu.structured import TEXT_LIMIT, Constraint, Structure, StructureCompiler
from npu.tokenizer import Tokenizer
from tests.npu.toy_tokenizer import BYTE_0, byte_ids, toy, toy_metadata

TOKENIZER = toy(words=("true", "ab"))
TRUE, AB = 260, 261
END, USER = 1, 3
COMPILER = StructureCompiler(TOKENIZER)


def ids(tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def follows(constraint: Constraint, text: str | list[int]) -> set[int]:
    """The tokens that may follow a text."""
    allowed = constraint.allowed(ids(byte_ids(text) if isinstance(text, str) else text))
    assert (np.diff(allowed) > 0).all()
    return set(allowed.tolist())


def tokens(characters: str, *others: int) -> set[int]:
    return {*byte_ids(characters), *others}


def test_the_mask_is_what_the_expression_says() -> None:
    constraint = COMPILER.constraint(Structure.regex("[ab]x{1,2}|true"))
    assert follows(constraint, "") == tokens("abt", TRUE)
    assert follows(constraint, "t") == tokens("r")
    assert follows(constraint, "a") == tokens("x")
    assert follows(constraint, "ax") == tokens("x", END)  # it may end here, and need not


def test_a_token_that_ends_answers_from_now_on_ends_structures_too() -> None:
    """As a chat template's end of a turn does, which is known when the first conversation comes."""
    tokenizer = toy()
    compiler = StructureCompiler(tokenizer)
    either = Structure.regex("ax{1,2}")
    before = compiler.constraint(either)
    assert follows(before, "ax") == tokens("x", END)
    tokenizer.eos_ids |= {USER}
    assert follows(compiler.constraint(either), "ax") == tokens("x", END, USER)
    assert follows(before, "ax") == tokens("x", END)  # its answer goes on as it began


def test_a_token_of_several_letters_counts_as_its_letters() -> None:
    constraint = COMPILER.constraint(Structure.regex("[ab]{3}"))
    assert follows(constraint, "") == tokens("ab", AB)
    assert follows(constraint, [AB]) == tokens("ab")  # another `ab` would be a letter too many
    assert constraint.completed_by(ids([AB]), BYTE_0 + ord("a"))


def test_it_is_complete_when_nothing_can_follow() -> None:
    constraint = COMPILER.constraint(Structure.regex("ax{1,2}"))
    x = BYTE_0 + ord("x")
    assert not constraint.completed_by(ids(byte_ids("a")), x)
    assert constraint.completed_by(ids(byte_ids("ax")), x)


def test_every_end_token_may_end_it() -> None:
    compiler = StructureCompiler(toy(eot_token_id=USER))
    assert follows(compiler.constraint(Structure.regex("a+")), "a") == tokens("a", END, USER)


def test_a_model_without_end_tokens_ends_when_it_is_complete() -> None:
    constraint = StructureCompiler(toy(eos_token_id=None)).constraint(Structure.regex("a{1,2}"))
    assert follows(constraint, "a") == tokens("a")
    assert constraint.completed_by(ids(byte_ids("a")), BYTE_0 + ord("a"))


def test_control_tokens_are_no_text() -> None:
    """The text of a control token can be spelt; the token itself is not a way to spell it."""
    constraint = COMPILER.constraint(Structure.choice(["<|user|>"]))
    assert follows(constraint, "") == tokens("<")
    assert USER not in follows(COMPILER.constraint(Structure.regex("(?s:.+)")), "")


def test_it_depends_on_the_answers_tokens_alone() -> None:
    """Asked in any order, with steps that were rolled back in between, and twice: one answer."""
    pattern = Structure.regex("(ab|ac)*d")
    texts = ["", "a", "ab", "aba", "ac", "acab", "a", "abac", ""]
    asked = COMPILER.constraint(pattern)
    for text in texts:
        expected = tokens("bc") if text.endswith("a") else tokens("ad", *([] if text.endswith("a") else [AB]))
        assert follows(asked, text) == expected
        assert asked.completed_by(ids(byte_ids(text)), BYTE_0 + ord("d")) if not text.endswith("a") else True


def test_constraints_of_one_structure_do_not_touch_each_other() -> None:
    structure = Structure.regex("ab|xy")
    first, second = COMPILER.constraint(structure), COMPILER.constraint(structure)
    assert follows(first, "a") == tokens("b")
    assert follows(second, "x") == tokens("y")
    assert follows(COMPILER.constraint(structure), "") == tokens("ax", AB)


def test_an_answer_against_the_structure_fails_and_a_good_one_does_afterwards() -> None:
    constraint = COMPILER.constraint(Structure.regex("a+b"))
    for _ in range(2):
        with pytest.raises(RequestFailed, match="behind token 2 of the answer") as failure:
            constraint.allowed(ids(byte_ids("ac")))
        assert failure.value.values["tokens"] == 2
        with pytest.raises(RequestFailed, match="behind token 2 of the answer"):
            constraint.completed_by(ids(byte_ids("a")), BYTE_0 + ord("c"))
        assert follows(constraint, "a") == tokens("ab", AB)


def without_letter(letter: str, eos_token_id: int | None = END) -> Tokenizer:
    """A vocabulary that cannot spell a letter: its token is a filler that stands for itself no more."""
    metadata = dict(toy_metadata(eos_token_id=eos_token_id))
    texts = metadata["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    metadata["tokenizer.ggml.tokens"] = ["filler" if text == letter else str(text) for text in texts]
    return Tokenizer.from_metadata(metadata)


def test_a_dead_end_is_named() -> None:
    constraint = StructureCompiler(without_letter("z")).constraint(Structure.regex("az"))
    assert follows(constraint, "") == tokens("a")
    with pytest.raises(RequestFailed, match="behind token 1 of the answer: no token of the vocabulary fits"):
        constraint.allowed(ids(byte_ids("a")))


def test_an_answer_that_could_end_but_for_an_end_token_is_a_dead_end_too() -> None:
    structure = Structure.regex("az?")
    assert follows(StructureCompiler(without_letter("z")).constraint(structure), "a") == {END}
    endless = StructureCompiler(without_letter("z", eos_token_id=None)).constraint(structure)
    assert not endless.completed_by(ids([]), BYTE_0 + ord("a"))
    with pytest.raises(RequestFailed, match="no token of the vocabulary fits"):
        endless.allowed(ids(byte_ids("a")))


def test_what_cannot_be_spelt_at_all_is_refused() -> None:
    compiler = StructureCompiler(without_letter("z"))
    with pytest.raises(UsageError, match="no text of this model's tokens satisfies it"):
        compiler.constraint(Structure.regex("z+"))


OPTIONS = [
    "yes",
    "yes sir",
    'a"b',
    "back\\slash",
    "new\nline",
    "é漢😀",
    "[a-z]+",
    "/x/i",
    "$x\x7f\x01",
    "<|user|>",
    "'",
]


@pytest.mark.parametrize("option", OPTIONS)
def test_each_choice_can_be_taken_to_the_letter(option: str) -> None:
    constraint = COMPILER.constraint(Structure.choice(OPTIONS))
    answer = byte_ids(option)
    for index, token in enumerate(answer):
        assert token in follows(constraint, answer[:index])
    if option == "yes":
        assert follows(constraint, answer) == tokens(" ", END)
    else:
        assert constraint.completed_by(ids(answer[:-1]), answer[-1])


def test_a_grammar_may_nest() -> None:
    """More than a regular expression can say: brackets that match."""
    constraint = COMPILER.constraint(Structure.lark('start: pair\npair: "(" pair? ")"'))
    assert follows(constraint, "") == tokens("(")
    assert follows(constraint, "((") == tokens("()")
    assert follows(constraint, "(()") == tokens(")")
    assert constraint.completed_by(ids(byte_ids("(()")), BYTE_0 + ord(")"))


def test_json_is_laid_out_as_json_dumps_does() -> None:
    constraint = COMPILER.constraint(Structure.json_schema({"type": "array", "items": {"enum": [1, 2]}}))
    assert follows(constraint, "[") == tokens("12]")
    assert follows(constraint, "[1") == tokens(",]")
    assert follows(constraint, "[1,") == tokens(" ")
    assert follows(constraint, "[1, ") == tokens("12")


def test_a_schema_may_loosen_the_layout() -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "x-guidance": {"whitespace_flexible": True}}
    assert follows(COMPILER.constraint(Structure.json_schema(schema)), "[") >= tokens("1] \n")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(st.characters(codec="ascii", min_codepoint=32)),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(VALUES, VALUES)
def test_a_constant_accepts_itself_and_nothing_else(value: object, other: object) -> None:
    constraint = COMPILER.constraint(Structure.json_schema({"const": value}))
    answer = byte_ids(json.dumps(value))
    assert constraint.completed_by(ids(answer[:-1]), answer[-1])
    if json.dumps(value) != json.dumps(other):
        with pytest.raises(RequestFailed):  # from its first byte that differs, or because it goes on or ends early
            assert constraint.completed_by(ids([]), END) or constraint.allowed(ids([*byte_ids(json.dumps(other)), END]))


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 120}, "s": {"type": "string", "maxLength": 2}},
    "required": ["n"],
    "additionalProperties": False,
}


@settings(max_examples=60)
@given(st.integers(-200, 200), st.none() | st.text("ab", max_size=4))
def test_a_schema_accepts_what_its_validator_accepts(number: int, text: str | None) -> None:
    value = {"n": number} if text is None else {"n": number, "s": text}
    constraint = COMPILER.constraint(Structure.json_schema(SCHEMA))
    answer = byte_ids(json.dumps(value))
    try:
        accepted = constraint.completed_by(ids(answer[:-1]), answer[-1])
    except RequestFailed:
        accepted = False
    assert accepted == jsonschema.Draft202012Validator(SCHEMA).is_valid(value)


@pytest.mark.parametrize(
    ("structure", "match"),
    [
        (Structure.json_schema("{"), "the JSON schema cannot be used: EOF"),
        (Structure.json_schema("true"), "the JSON schema cannot be used"),
        (Structure.json_schema('{"type": "strng"}'), "Invalid type: strng"),
        (Structure.json_schema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Structure.json_schema('{"type": "integer", "minimum": 5, "maximum": 4}'), "Unsatisfiable schema"),
        (Structure.json_schema('{"$ref": "#"}'), "no text of this model's tokens satisfies it"),
        (Structure.json_schema('{"$ref": "file:///etc/passwd"}'), "not present in a registry"),
        (Structure.json_schema("[" * 50_000), "recursion limit"),
        (Structure.json_schema("\ud800"), "not JSON serializable"),
        (Structure.regex("\ud800"), "surrogates not allowed"),
        (Structure.regex("(a"), "unclosed group"),
        (Structure.regex("(?=a)b"), "look-around"),
        (Structure.regex(r"[^\s\S]"), "no text of this model's tokens satisfies it"),
        (Structure.lark("start: missing"), "missing"),
        (Structure.lark("%json {"), "the grammar cannot be used"),
        (Structure.regex("a" * (TEXT_LIMIT + 1)), f"it has {TEXT_LIMIT + 1} characters, {TEXT_LIMIT} at most"),
        (
            Structure.json_schema({"enum": [f"value {index} {index * 7919 % 10007}" for index in range(12_000)]}),
            "too big",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(structure: Structure, match: str) -> None:
    with pytest.raises(UsageError, match=match) as refusal:
        COMPILER.constraint(structure)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


def test_a_hostile_expression_stays_cheap() -> None:
    """A million states, as a schema's `pattern`: with llguidance's own limits each token takes half a second."""
    started = time.process_time()
    constraint = COMPILER.constraint(Structure.json_schema({"type": "string", "pattern": "^(a{1000}){1000}$"}))
    with pytest.raises(RequestFailed, match="too many expressions constructed; loosen it"):
        constraint.allowed(ids(byte_ids('"a')))
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        ('start: /a+/ "a"', "a"),
        ('start: "x" /a+/ /a+/', "xaa"),
        ('%llguidance {"no_forcing": false}\nstart: /a+/ /a+/', "a"),
        ("start: (/a+/){2,10000}", "a"),
    ],
)
def test_a_text_that_has_no_end_is_not_looked_for(grammar: str, answer: str) -> None:
    """The first terminal takes every `a` there is, and the second waits for one."""
    assert follows(COMPILER.constraint(Structure.lark(grammar)), answer) == tokens("a")


@pytest.mark.parametrize("options", [[], "yes", ["yes", ""], ["yes", 3]])
def test_choices_are_texts(options: list[str]) -> None:
    with pytest.raises(UsageError, match="non-empty texts"):
        Structure.choice(options)


def test_too_complex_is_not_taken_for_unsatisfiable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(structured._LIMITS, "step_lexer_fuel", 1)
    with pytest.raises(UsageError, match="the regular expression cannot be used: lexer error: too many expressions"):
        StructureCompiler(TOKENIZER).constraint(Structure.regex("([a-z]{3}|[0-9]{2}x)+"))


def test_a_structure_is_text() -> None:
    with pytest.raises(UsageError, match="the regular expression is a int; pass its text"):
        Structure.regex(5)  # type: ignore[arg-type] # what a client may send


@pytest.mark.parametrize("schema", [{"const": float("nan")}, {"const": {1, 2}}, {"const": b""}])
def test_a_mapping_that_is_no_json_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        Structure.json_schema(schema)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'rockpage[structured]'")):
        StructureCompiler(TOKENIZER).constraint(Structure.regex("a"))


def test_the_last_structures_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = StructureCompiler(TOKENIZER)
    compiled: list[str] = []
    compile_anew = StructureCompiler._compile

    def counting(self: StructureCompiler, structure: Structure) -> object:
        compiled.append(structure.text)
        return compile_anew(self, structure)

    monkeypatch.setattr(StructureCompiler, "_compile", counting)
    first = Structure.regex("a0")
    for _ in range(3):
        compiler.constraint(first)
    assert compiled == ["a0"]
    for number in range(1, 16):  # sixteen are kept
        compiler.constraint(Structure.regex(f"a{number}"))
    compiler.constraint(first)
    assert len(compiled) == 16
    compiler.constraint(Structure.regex("a16"))  # in place of the one that was used longest ago, a1
    compiler.constraint(first)
    assert len(compiled) == 17
    compiler.constraint(Structure.regex("a1"))
    assert compiled[17:] == ["a1"]


def test_structures_are_equal_by_value_and_print_no_text() -> None:
    assert Structure.regex("secret") == Structure.regex("secret") != Structure.lark("secret")
    assert "secret" not in repr(Structure.regex("secret"))
